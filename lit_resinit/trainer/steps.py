"""Where a Trainer stands: its steps as loggers count them, and what its ranks, scaler and callbacks do with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lit_resinit.judge.optimizers import has_finite_gradients


def moves_by_itself(trainer: Any) -> bool:
    """Whether no optimizer that the Trainer knows holds anything: the module steps in its backward, or not at all."""
    return not any(group["params"] for optimizer in trainer.optimizers for group in optimizer.param_groups)


def steps_done(trainer: Any) -> int:
    """Optimizer steps done; batches where the module steps by itself, which nobody counts."""
    return int(trainer.fit_loop.total_batch_idx if moves_by_itself(trainer) else trainer.global_step)


def step_index(trainer: Any) -> int:
    """Optimizer steps counted by batches, the x-axis of Lightning's own logs."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def is_due(trainer: Any, every: int) -> bool:
    """Whether the running batch is one of those, ``every`` steps apart, that log."""
    return bool(every) and (step_index(trainer) + 1) % every == 0


def accumulates(trainer: Any) -> bool:
    """Whether more batches lead to the same optimizer step."""
    return bool(trainer.fit_loop._should_accumulate())


def agreement(trainer: Any) -> Callable[[bool], bool]:
    """Whether any rank of the strategy found something, given whether this one did."""
    return lambda found: bool(trainer.strategy.reduce_boolean_decision(found, all=False))


def will_skip(trainer: Any, optimizer: Any) -> bool | None:
    """Whether the gradient scaler will skip this optimizer's step, as this rank sees it; None without a scaler."""
    return None if trainer.scaler is None else not has_finite_gradients(optimizer)


def will_unfreeze(trainer: Any) -> bool:
    """Whether a callback of the kind of ``BackboneFinetuning`` unfreezes parameters later."""
    return any(hasattr(c, "unfreeze_and_add_param_group") for c in trainer.callbacks)
