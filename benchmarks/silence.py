"""Healthy networks under the callback: does it stay silent?

Run as ``python -m benchmarks.silence [--only TEXT] [--seeds N] [--steps N] [--save FILE]``. Every model of ``zoo.json``
is trained for a few steps by a Trainer with ``ResidualInit()``: its branches are closed by ``auto``, the first step is
observed, sleeping gates are followed. The models drop layers at random, share weights, start with a zero head or tie
their embeddings; all of them can learn. So every warning or error of this package is a false alarm, but for one: that
the stream itself passes a norm or a function between its additions is a remark, and true.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.zoo import MODELS, OutOfTimeError, Subject, build, loss_of, time_limit
from lit_resinit import GateError, ResidualInit, ResInitError, ResInitWarning, param_groups

REMARK = "the stream from"
STEPS = 20
SEEDS = 3


class Training(pl.LightningModule):
    """A model of the list, trained on the list's inputs and a fixed random target; gates without weight decay."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.model = subject.model
        self.inputs = [subject.args, subject.kwargs]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        args, kwargs = batch
        return loss_of(self.model(*args, **kwargs))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader([self.inputs] * STEPS, batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        (callback,) = [c for c in self.trainer.callbacks if isinstance(c, ResidualInit)]
        assert callback.plan is not None
        return torch.optim.AdamW(param_groups(self, callback.plan, lr=1e-3))


@dataclasses.dataclass
class Row:
    """What the callback said about one model with one seed; ``failed`` is what has nothing to do with it."""

    id: str
    seed: int
    alarms: list[str] = dataclasses.field(default_factory=list)
    remarks: list[str] = dataclasses.field(default_factory=list)
    gates: int = 0
    asleep: int = 0
    failed: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        words = self.failed or "; ".join(self.alarms) or "; ".join(["silent", *self.remarks])
        counts = f"{self.gates:4} judged  {self.asleep:4} slept"
        return f"{self.id:34}seed {self.seed}  {counts}  {self.seconds:6.1f} s  {words}"


def measure(entry: dict[str, Any], seed: int, steps: int) -> Row:
    """Train one model, and note every alarm."""
    row, start = Row(entry["id"], seed), time.perf_counter()
    try:
        with time_limit(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(build(entry, seed), steps, row)
    except GateError as error:  # nothing was changed, and the message says which line to edit: refused, not alarmed
        row.failed = " ".join(f"refused: {error}".split())
    except ResInitError as error:
        row.alarms.append(" ".join(f"{type(error).__name__}: {error}".split()))
    except (Exception, OutOfTimeError) as error:
        row.failed = f"{type(error).__name__}: {error}".split("\n")[0]
    for text in (" ".join(str(w.message).split()) for w in caught if issubclass(w.category, ResInitWarning)):
        (row.remarks if text.startswith(REMARK) else row.alarms).append(text)
    row.seconds = time.perf_counter() - start
    return row


def train(subject: Subject, steps: int, row: Row) -> None:
    """A few steps under the callback."""
    callback = First()
    trainer = pl.Trainer(
        max_steps=steps,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Training(subject).train())
    row.gates, row.asleep = callback.judged, callback.asleep


class First(ResidualInit):
    """The callback itself, and how many gates its first report judged."""

    judged = asleep = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if not self.judged and self.gradient_report is not None:
            gates = self.gradient_report.gates.values()
            self.judged, self.asleep = len(gates), sum(g.status == "asleep" for g in gates)


def summary(rows: list[Row]) -> str:
    """One line for all rows."""
    run = [r for r in rows if not r.failed]
    loud = [r for r in run if r.alarms]
    models = len({r.id for r in run})
    return (
        f"{models} models, {len(run)} runs, {sum(r.gates for r in run)} gates, biases and zero layers judged, "
        f"{sum(r.asleep for r in run)} of them asleep at first: {len(loud)} runs with a false alarm, "
        f"{sum(bool(r.remarks) for r in run)} with the remark; "
        f"{len(rows) - len(run)} runs did not train; {sum(r.seconds for r in rows):.0f} s"
    )


def main() -> int:
    """Run from the command line; 1 if there is a false alarm."""
    parser = argparse.ArgumentParser(description="Train public models, and count what the callback says of them.")
    parser.add_argument("--only", default="", metavar="TEXT", help="models whose id contains TEXT")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the lines there")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    entries = [e for e in json.loads(MODELS.read_text()) if options.only in e["id"] and e["additions"]]
    rows = []
    for entry in entries:
        for seed in range(options.seeds):
            rows.append(measure(entry, seed, options.steps))
            print(rows[-1], flush=True)
    print(summary(rows))
    if options.save is not None:
        options.save.write_text("\n".join([*map(str, rows), summary(rows)]) + "\n")
    return int(any(r.alarms for r in rows))


if __name__ == "__main__":
    raise SystemExit(main())
