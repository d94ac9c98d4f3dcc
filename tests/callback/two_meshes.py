"""Sharded runs of two processes with the callback and without, and their checkpoints; ``test_meshes.py`` reads them."""

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from networks import WIDTH, NormLast, Plain, Scaled, data, stack, trainer
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from two_ranks import Sliced, Telling

from lit_resinit import apply_, make_plan

BLOCKS = {"insert": Plain, "zero": NormLast, "scale": Scaled}
STEPS, HALF = 10, 6


def network(kind: str, closed: bool = True) -> nn.Sequential:
    torch.manual_seed(1)
    net = stack(BLOCKS[kind])
    if closed:
        apply_(net, make_plan(net, torch.randn(2, WIDTH)))
    return net


class Meshed(Sliced):
    """Built, closed and sharded in ``configure_model``; with tensor parallelism every rank takes all rows."""

    def __init__(self, kind: str, tensor: bool = False) -> None:
        super().__init__(nn.Identity(), lr=0.1)
        self.kind, self.tensor = kind, tensor

    def on_after_batch_transfer(self, batch: list[torch.Tensor], dataloader_idx: int) -> list[torch.Tensor]:
        return batch if self.tensor else super().on_after_batch_transfer(batch, dataloader_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def configure_model(self) -> None:
        if not isinstance(self.net, nn.Identity):
            return
        self.net = network(self.kind)
        if self.tensor:
            for block in self.net[:-1]:
                ways = {"f.0": ColwiseParallel(), "f.2": RowwiseParallel()}
                parallelize_module(block, self.device_mesh["tensor_parallel"], ways)
            return
        for module in (*self.net, self.net):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


class Ending(pl.Callback):
    """Writes the whole weights down, at the start and at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        whole = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in module.state_dict().items()}
        if trainer.is_global_zero:
            torch.save({n: v.clone() for n, v in whole.items()}, self.folder / name)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.write("start.pt", trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.write("end.pt", trainer, pl_module)


def fit(root: Path, name: str, module: Meshed, watched: bool = True, steps: int = STEPS, **options: Any) -> pl.Trainer:
    (root / name).mkdir(exist_ok=True)
    callbacks: list[pl.Callback] = [Ending(root / name)]
    if watched:
        ours: Any = Telling()
        ours.root = root / name
        callbacks.insert(0, ours)
    sizes = (1, 2) if module.tensor else (2, 1)
    shards = options.pop("shards", True)
    strategy = ModelParallelStrategy(*sizes, save_distributed_checkpoint=shards)
    choices = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False, "max_steps": steps}
    runner = trainer(root, *callbacks, **choices, max_epochs=-1)
    runner.fit(module, data(WIDTH, rows=24, batch=8), **options)
    return runner


def checkpoints(root: Path, kind: str, shards: bool) -> None:
    name = f"{kind} {'shards' if shards else 'whole'}"
    runner = fit(root, f"{name} first", Meshed(kind), steps=HALF, shards=shards)
    runner.save_checkpoint(root / f"{name}.ckpt")
    for watched in (True, False) if kind == "zero" else (True,):
        end = "resumed" if watched else "resumed without"
        fit(root, f"{name} {end}", Meshed(kind), watched, shards=shards, ckpt_path=str(root / f"{name}.ckpt"))


def main(root: Path) -> None:
    for kind in ("insert", "zero"):
        fit(root, f"{kind} plain", Meshed(kind), watched=False)
        fit(root, f"{kind} watched", Meshed(kind))
    for kind in ("insert", "scale"):
        fit(root, f"{kind} tensor plain", Meshed(kind, tensor=True), watched=False)
        fit(root, f"{kind} tensor watched", Meshed(kind, tensor=True))
    for kind in ("insert", "zero"):
        for shards in (True, False):
            checkpoints(root, kind, shards)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
