"""Runs of two forked processes that would plan differently; ``test_shared_plan.py`` reads what each of them found."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from networks import WIDTH, Classifier, Plain, trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from lit_resinit import ResidualInit


class Stream(IterableDataset):
    """Other data on every rank: the first items of one rank are of one sign."""

    def __init__(self, positive: int) -> None:
        self.positive = positive

    def __iter__(self) -> Iterator[Any]:
        rank = torch.distributed.get_rank()
        generator = torch.Generator().manual_seed(rank)
        for index in range(32):
            x = torch.randn(WIDTH, generator=generator)
            x[0] = 1.0 if (rank == self.positive if index < 4 else index % 2) else -1.0
            yield x, 0


class Routed(Classifier):
    """A block that runs when the batch holds such an item."""

    def __init__(self, first: bool) -> None:
        super().__init__(nn.ModuleList([Plain(), Plain(), nn.Linear(WIDTH, 2)]))
        self.first = first

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = self.net[0](x) if self.first else x
        x = self.net[1](x) if bool((x[:, 0] > 0).any()) else x
        return functional.cross_entropy(self.net[2](x), y)


class Telling(ResidualInit):
    """Writes down what each rank found, for forked processes share no memory."""

    file: str
    differs = False

    def setup(self, runner: pl.Trainer, pl_module: Any, stage: str) -> None:
        if self.differs and runner.global_rank == 1:
            pl_module.net = nn.Sequential(Plain(), nn.Sequential(), nn.Linear(WIDTH, 2))
        try:
            super().setup(runner, pl_module, stage)
        except Exception as error:
            torch.save({"error": f"{type(error).__name__}: {error}"}, f"{self.file}{runner.global_rank}.pt")
            time.sleep(2.0)  # the first process that ends takes the other with it
            raise

    def on_train_end(self, runner: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = {"branches": [b.name for b in self.plan.branches], "records": len(self.history)}
        torch.save(found, f"{self.file}{runner.global_rank}.pt")


def run(file: Path, module: Classifier, positive: int, scheme: str, differs: bool = False) -> None:
    ours = Telling(scheme)
    ours.file, ours.differs = str(file), differs
    options = {"strategy": "ddp_fork_find_unused_parameters_true", "devices": 2}
    with contextlib.suppress(torch.multiprocessing.ProcessRaisedException):  # the processes have told already
        trainer(file.parent, ours, **options).fit(module, DataLoader(Stream(positive), batch_size=4))


if __name__ == "__main__":
    root = Path(sys.argv[1])
    run(root / "shared", Routed(first=True), 0, "last_layer")
    run(root / "nothing_on_1", Routed(first=False), 0, "auto")
    run(root / "nothing_on_0", Routed(first=False), 1, "auto")
    run(root / "different", Classifier(nn.Sequential(Plain(), Plain(), nn.Linear(WIDTH, 2))), 0, "auto", differs=True)
