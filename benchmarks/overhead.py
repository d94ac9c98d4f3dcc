"""What the package costs, as ratios to plain training in the same process.

Run as ``python -m benchmarks.overhead [--small] [--out FILE]``. The pieces of work alternate with plain steps, and
their processor times are divided; a row gives the median of the quotients and its quartiles. A run of the Trainer is
measured from inside: every fifth batch logs, and its time over that of the plain ones around it gives the cost of a run
that logs every 50. What a step that does not log carries is counted: hooks and dispatch modes.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.networks import Training, mlp, resnet50
from benchmarks.report import RESULTS, Row, origin, publish, table
from benchmarks.timing import Work, ratios
from lit_resinit import History, ResidualInit, ResidualPlan, apply_, check_identity, make_plan, observe
from lit_resinit.watch.logs import metrics
from lit_resinit.watch.watching import Watching

INTERVAL = 50  # of Lightning's default
EVERY = 5  # here, so that a short run has several


# -------------------------------------------------------------------- pieces of work


def set_up(training: Training) -> ResidualPlan:
    """Trace, plan and apply, as ``setup`` of the callback does."""
    plan = make_plan(training.net, training.x[:4])
    apply_(training.net, plan, overwrite_trained=True)
    return plan


def observed_step(training: Training, plan: ResidualPlan) -> None:
    training.optimizer.zero_grad()
    with observe(training.net, plan, training.x):
        training.loss().backward()
    training.optimizer.step()


def logging_step(training: Training, plan: ResidualPlan, history: History) -> None:
    """A step with everything that the callback does when it logs."""
    training.optimizer.zero_grad()
    watching = Watching(training.net, plan, history)
    watching.before_forward()
    loss = training.loss()
    watching.after_forward()
    loss.backward()
    watching.before_step(len(history))
    metrics(history)
    training.optimizer.step()


def pieces(training: Training, bar: float, repeats: int) -> list[Row]:
    """Setup, identity check, observed step and logging step of one network."""
    plan = set_up(training)
    history = History([b.name for b in plan.branches])
    by_step: dict[str, Work] = {
        "setup: trace, plan, apply": lambda: set_up(training),
        "first step, observed": lambda: observed_step(training, plan),
        "logging step": lambda: logging_step(training, plan, history),
    }
    bars = {"setup: trace, plan, apply": 3.0, "first step, observed": 4.0, "logging step": bar, "identity check": 2.0}
    found = ratios(training.step, by_step, repeats)
    check: dict[str, Work] = {"identity check": lambda: check_identity(training.net, plan, training.x)}
    found |= ratios(training.forward, check, repeats)
    return [
        {
            "network": training.name,
            "what": what,
            "unit": "forward" if what == "identity check" else "step",
            "ratio": f"{ratio.median:.2f}",
            "quartiles": ratio.spread,
            "bar": f"{bars[what]:g}",
        }
        for what, ratio in found.items()
    ]


# -------------------------------------------------------------------- whole runs


class Classifier(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(pl.Callback):
    """Times every batch, and counts what hangs on the network while it runs."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.carried: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._start = time.process_time()

    def on_before_backward(self, trainer: Any, pl_module: nn.Module, loss: Tensor) -> None:
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in pl_module.modules())
        modes = len(_get_current_dispatch_mode_stack())
        backward = sum(len(p._backward_hooks or ()) for p in pl_module.parameters())
        self.carried.append(hooks + modes + backward)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.process_time() - self._start)


def whole_run(training: Training, windows: int) -> Row:
    """A run of the Trainer with the callback: every batch that logs against the plain ones before it."""
    data = TensorDataset(training.x, training.y)
    loader = DataLoader(data, batch_size=len(training.x))
    clock, steps = Clock(), EVERY * windows
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_steps=steps,
            max_epochs=-1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=EVERY,
            callbacks=[_Outside(clock), ResidualInit(), clock],
        )
        trainer.fit(Classifier(training.net), loader)
    parts = [clock.times[i * EVERY : (i + 1) * EVERY] for i in range(windows)]
    plain = [statistics.median(p[1:-1]) for p in parts]
    extra = [p[-1] / m for p, m in zip(parts, plain, strict=True)]
    ratio = 1 + (statistics.median(extra) - 1) / INTERVAL
    carried = max(c for i, c in enumerate(clock.carried) if i and (i + 1) % EVERY)
    return {
        "network": training.name,
        "what": f"Trainer, one step of {INTERVAL} logs",
        "unit": f"{INTERVAL} steps",
        "ratio": f"{ratio:.4f}",
        "logging batch": f"{statistics.median(extra):.2f}",
        "bar": "1.01",
        "hooks and modes on a plain step": str(carried),
        "first batch": clock.times[0] / plain[0],
    }


class _Outside(pl.Callback):
    """Starts the clock before the other callbacks' hooks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._clock.on_train_batch_start(trainer, pl_module, batch, batch_idx)


def main(argv: Sequence[str] | None = None) -> dict[str, list[Row]]:
    """Measure, print, write the file, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small network, one repetition, and no file")
    parser.add_argument("--repeats", type=int, default=9, help="quotients for each row (default: 9)")
    parser.add_argument("--out", type=Path, default=RESULTS / "overhead.txt", help="where to write")
    options = parser.parse_args(argv)
    if options.small:
        work = pieces(mlp(8, 32, 16), 1.3, 1)
        runs = [whole_run(mlp(8, 32, 16), 1)]
    else:
        work = pieces(mlp(200), 1.3, options.repeats) + pieces(resnet50(), 1.15, options.repeats)
        runs = [whole_run(mlp(blocks), 6 if blocks == 200 else 3) for blocks in (200, 1000)]
    text = [origin("lightning", "torchvision"), "", table(work), "", table(runs)]
    publish("\n".join(text), None if options.small else options.out)
    return {"pieces": work, "runs": runs}


if __name__ == "__main__":
    main()
