"""What a Trainer's loggers and its progress bar are given."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from lit_resinit.report.figures import activation_figure, takes_figures
from lit_resinit.trainer.steps import step_index
from lit_resinit.watch.history import History
from lit_resinit.watch.logs import metrics


def send_record(trainer: Any, history: History, per_branch: bool | None, *, to_loggers: bool) -> dict[str, float]:
    """The newest record, in one call to each logger; its aggregates also to ``callback_metrics``.

    Returns:
        All of it, by key.
    """
    values = metrics(history, per_branch)
    aggregates = {k: torch.tensor(v) for k, v in values.items() if k.count("/") == 1}
    trainer.callback_metrics.update(aggregates)
    for logger in trainer.loggers if to_loggers else ():
        logger.log_metrics(values, step=step_index(trainer))
    return values


def show_progress(trainer: Any, module: Any, history: History, values: dict[str, float]) -> None:
    """How many blocks are on, in the progress bar, where there is one."""
    closed = len(history.branches) - len(history.open_from_start())
    if trainer.progress_bar_callback is not None:
        module.log(f"blocks on/{closed}", values["resinit/switched_on"], prog_bar=True, logger=False)


def prints(trainer: Any) -> bool:
    """Whether this rank prints: not where the Trainer's bars are switched off by themselves, or all output is."""
    bars = trainer.progress_bar_callback
    return trainer.is_global_zero and not trainer.barebones and not getattr(bars, "is_disabled", False)


def send_figure(trainer: Any, history: History) -> bool:
    """The heat map; matplotlib is an extra, without it loggers get numbers only.

    Returns:
        Whether a logger took it.
    """
    if trainer.fast_dev_run or not trainer.is_global_zero:
        return False
    takers = [send for logger in trainer.loggers if (send := takes_figures(logger)) is not None]
    if not takers or importlib.util.find_spec("matplotlib") is None:
        return False
    figure = activation_figure(history)
    for send in takers:
        send("resinit/blocks", figure, step_index(trainer))
    return True
