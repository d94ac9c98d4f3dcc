"""Runs of two processes that hold a part of every parameter each (FSDP2); ``test_shards.py`` reads what they found."""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from networks import WIDTH, NormLast, Plain, Scaled, data, stack, trainer
from torch import nn
from torch.distributed.fsdp import fully_shard
from two_ranks import Sliced, Telling

from lit_resinit import ResInitError, apply_, make_plan


class Shut(Scaled):
    """Dead: a zero scale before a ReLU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.scale * self.f(x))


BLOCKS = {"insert": Plain, "zero": NormLast, "dead": lambda: Shut(value=0.0), "late": Scaled}


class Sharded(Sliced):
    """Built, closed and sharded in ``configure_model``."""

    def __init__(self, kind: str) -> None:
        super().__init__(nn.Identity(), lr=0.1)
        self.kind = kind

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            self.net = network(self.kind)
            mesh = self.device_mesh["data_parallel"]
            for module in (*self.net, self.net):
                fully_shard(module, mesh=mesh)


def network(kind: str) -> nn.Sequential:
    torch.manual_seed(1)
    net = stack(BLOCKS[kind])
    if kind != "late":
        scheme = "observe" if kind == "dead" else "auto"
        apply_(net, make_plan(net, torch.randn(2, WIDTH), scheme=scheme))
    return net


def fit(root: Path, kind: str) -> None:
    ours: Any = Telling()
    ours.root = root / kind
    ours.root.mkdir(exist_ok=True)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    options = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False}
    trainer(root, ours, **options).fit(Sharded(kind), data(WIDTH, rows=24, batch=8))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in BLOCKS:
        try:
            fit(Path(sys.argv[1]), name)
        except ResInitError as error:
            (Path(sys.argv[1]) / f"{name}.txt").write_text(str(error))
