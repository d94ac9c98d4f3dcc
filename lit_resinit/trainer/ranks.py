"""One plan for all ranks: rank 0's, if it fits the network of every other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lit_resinit.errors import ResInitError
from lit_resinit.graph.where import clean_name
from lit_resinit.plan.values import ResidualPlan

_SHOWN = 3  # differences that a message names


def agreed_plan(trainer: Any, module: nn.Module, make: Callable[[], ResidualPlan]) -> ResidualPlan:
    """The plan of rank 0, which made it from its own data; on a single rank simply the plan.

    Every rank makes one, since a forward may wait for the other ranks; what a rank other than 0 finds, a failure
    included, depends on its data and has no say.

    Raises:
        ResInitError: On every rank: what failed on rank 0, or how the network of a rank differs from rank 0's.
    """
    if trainer.world_size == 1:
        return make()
    made, own = _attempt(make)
    text = "" if own is None else str(own).removeprefix(f"{getattr(own, 'code', '')}: ")
    plan, kind, text, needed = trainer.strategy.broadcast((made, type(own), text, made and _needed(made, module)))
    if plan is None:
        if isinstance(own, kind):
            raise own
        raise kind(text) if issubclass(kind, ResInitError) else ResInitError(f"planning on rank 0: {text}")
    found = _of_ranks(trainer, _differences(needed, _needed(plan, module)))
    if found:
        raise ResInitError(
            f"comparing the network of every rank with the plan of rank 0: expected the same modules and parameters, "
            f"found {found}. Build the same network on every rank; where data decide what is built, let rank 0 decide. "
            "Nothing was changed."
        )
    return plan  # type: ignore[no-any-return]


def _attempt(make: Callable[[], ResidualPlan]) -> tuple[ResidualPlan | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:  # every rank has to come to the broadcast
        return None, error


def _needed(plan: ResidualPlan, module: nn.Module) -> dict[str, str]:
    """What a plan names, and what a module has under that name."""
    parameters = {clean_name(n): p for n, p in module.named_parameters(remove_duplicate=False)}
    modules = {clean_name(n) for n, _ in module.named_modules(remove_duplicate=False)}
    found = {name: "none" for branch in plan.branches for name in (branch.block, *(g.module for g in branch.gates))}
    found = {name: "a module" if name in modules else "none" for name in found}
    for gate in (g for branch in plan.branches for g in branch.gates):
        names = gate.biases if gate.kind == "inserted" and gate.module else (gate.parameter, *gate.biases)
        for name in names:
            found[name] = f"shape {tuple(parameters[name].shape)}" if name in parameters else "none"
    return found


def _differences(wanted: dict[str, str], have: dict[str, str]) -> str:
    """In words, what a module has otherwise than rank 0's; "" where nothing."""
    apart = [f"{n or 'the top module'}: {have[n]} instead of {wanted[n]}" for n in wanted if wanted[n] != have[n]]
    more = f" and {len(apart) - _SHOWN} more" if len(apart) > _SHOWN else ""
    return "; ".join(apart[:_SHOWN]) + more


def _of_ranks(trainer: Any, message: str) -> str:
    """The first rank's message that has one, on every rank; "" where none has."""
    if not trainer.strategy.reduce_boolean_decision(bool(message), all=False):
        return ""
    messages: list[str] = [""] * trainer.world_size
    torch.distributed.all_gather_object(messages, message)
    return next(f"on rank {rank}: {text}" for rank, text in enumerate(messages) if text)
