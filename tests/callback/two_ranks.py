"""Runs of two forked processes, each written to a folder of its own; ``test_ranks.py`` reads what they found.

A process may be forked only before it ran a backward pass or started torch's pool of threads (``set_num_threads``
does), which its children then start from several threads at once; so these run in an interpreter of their own.
"""

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from networks import WIDTH, Classifier, Plain, Scaled, data, stack, trainer
from torch import Tensor, nn

from lit_resinit import ResidualInit

TWO = {"strategy": "ddp_fork", "devices": 2}


class Telling(ResidualInit):
    """Writes down what each rank found, for forked processes share no memory."""

    root: Path

    def _write(self, trainer: pl.Trainer, **more: Any) -> None:
        found = {"identity": self.identity_report and self.identity_report.ok}
        found["statuses"] = [g.status for g in self.gradient_report.gates.values()] if self.gradient_report else None
        torch.save(found | more | self.history.to_dict(), self.root / f"rank{trainer.global_rank}.pt")

    @contextlib.contextmanager
    def _telling(self, trainer: pl.Trainer) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._write(trainer, error=f"{type(error).__name__}: {error}")
            time.sleep(1.0)  # the first process that ends takes the others with it
            raise

    def on_before_backward(self, trainer: pl.Trainer, *rest: Any) -> None:
        with self._telling(trainer):
            super().on_before_backward(trainer, *rest)

    def on_after_backward(self, trainer: pl.Trainer, *rest: Any) -> None:
        with self._telling(trainer):
            super().on_after_backward(trainer, *rest)

    def on_before_optimizer_step(self, trainer: pl.Trainer, *rest: Any) -> None:
        with self._telling(trainer):
            super().on_before_optimizer_step(trainer, *rest)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._write(
            trainer, usefulness=self.usefulness, state={n: v.clone() for n, v in pl_module.state_dict().items()}
        )


class OnRankOne(Classifier):
    """One branch is open on rank 1 only."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.net[:-1]:
            x = x + block.scale * block.f(x)
        return self.net[-1](x)

    def on_train_start(self) -> None:
        if self.global_rank == 1:
            with torch.no_grad():
                self.net[0].scale.fill_(1e-3)


class Shut(Scaled):
    """Dead: a zero scale before a ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.scale * self.f(x))


class Masked(Scaled):
    """A branch that the last feature multiplies."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.f(x) * x[..., -1:]


class Uneven(Classifier):
    """Rank 1 runs no block while it trains, rank 0 all of them."""

    def forward(self, x: Tensor) -> Tensor:
        fake = isinstance(x, torch._subclasses.FakeTensor)
        return self.net[-1](x if self.global_rank == 1 and not fake else self.net[:-1](x))


class Overflow(torch.amp.GradScaler):
    """Overflows in its first steps."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=2.0**100, backoff_factor=2.0**-20)


class Sliced(Classifier):
    """Every rank takes its share of the rows of one batch."""

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        return [rows[self.global_rank :: self.trainer.world_size] for rows in batch]


def joined(block: Any) -> Classifier:
    torch.manual_seed(1)
    return Sliced(stack(block), lr=0.1)


def share(root: Path, block: Any) -> None:
    fit(root, joined(block), data(WIDTH, rows=24, batch=8), use_distributed_sampler=False)


def zero_head() -> Classifier:
    net = stack(Plain)
    nn.init.zeros_(net[-1].weight)
    return Classifier(net)


def masked_data() -> Any:
    loader = data(WIDTH, rows=48)
    loader.dataset.tensors[0][:, -1] = 0.0
    return loader


class OnOne(Classifier):
    """The step has no loss on held-out data on rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.training and torch.distributed.get_rank() == 1:
            raise KeyError("only here")
        return super().training_step(batch, batch_idx)


def useful(root: Path, module: pl.LightningModule) -> None:
    options = {"usefulness": "path", "max_steps": 12, "max_epochs": -1}
    fit(root, module, data(WIDTH, rows=48), held=data(WIDTH, rows=96), **options)


def fit(
    root: Path,
    module: pl.LightningModule,
    loader: Any,
    scheme: Any = "auto",
    usefulness: Any = False,
    held: Any = None,
    **options: Any,
) -> None:
    ours = Telling(scheme, usefulness=usefulness)
    ours.root = root
    trainer(root, ours, **TWO | options).fit(module, loader, held)


def masked(root: Path) -> None:
    module = Classifier(nn.Sequential(Masked(value=0.0), nn.Linear(WIDTH, 2)))
    fit(root, module, masked_data(), "observe", max_steps=6)


def scaled(root: Path) -> None:
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", Overflow())
    fit(root, Classifier(stack(Scaled)), data(WIDTH, rows=64), plugins=[plugin], max_steps=8)


RUNS: dict[str, Callable[[Path], None]] = {
    "joined_insert": lambda root: share(root, Plain),
    "joined_zero": lambda root: share(root, Scaled),
    "open_on_one": lambda root: fit(root, OnRankOne(stack(Scaled)), data(WIDTH, rows=24)),
    "dead": lambda root: fit(root, Classifier(stack(lambda: Shut(value=0.0))), data(WIDTH), "observe"),
    "uneven": lambda root: fit(
        root, Uneven(stack(Plain)), data(WIDTH, rows=24), strategy="ddp_fork_find_unused_parameters_true"
    ),
    "asleep": lambda root: fit(root, zero_head(), data(WIDTH, rows=24)),
    "patience": masked,
    "scaler": scaled,
    "useful": lambda root: useful(root, Classifier(stack(Scaled), lr=0.3)),
    "useless": lambda root: useful(root, OnOne(stack(Scaled), lr=0.3)),
}


def main(root: Path) -> None:
    warnings.simplefilter("ignore")
    chosen = sys.argv[2:] or list(RUNS)
    for name, run in ((n, RUNS[n]) for n in chosen):
        (root / name).mkdir()
        try:
            run(root / name)
        except Exception as error:
            (root / name / "parent.txt").write_text(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
