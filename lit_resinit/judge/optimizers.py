"""What the optimizers do with the gates: which they hold, at which settings, and which they never move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit.errors import GateOptimizerError, warn
from lit_resinit.graph.tensors import local, peak_of, to_host
from lit_resinit.graph.where import clean_name
from lit_resinit.judge.sizes import frozen_branches, gradient_sizes
from lit_resinit.judge.verdicts import GradientReport
from lit_resinit.plan.values import ResidualPlan
from lit_resinit.words import together

STEPS_TO_MOVE = 2  # steps after which a gate with a gradient should have left its closing value
_LOST = 1e-30  # gradients below it may make steps that no number holds
STILL = 0.01  # part of the median movement below which a gate has not moved
_SETTLED = 5  # steps after which movements can be compared
_RECORDS = 3  # and records: a gate that swings about zero is near it now and then


def holds_gates(optimizer: Any, optimizers: Sequence[Any], model: nn.Module, plan: ResidualPlan) -> bool:
    """Whether this optimizer moves any gate: where some do, the others say nothing about gates."""
    if len(optimizers) == 1:
        return True
    wanted = {g.parameter for g in plan.gates} | set(plan.zero_layers)
    ours = {id(p) for n, p in model.named_parameters() if clean_name(n) in wanted}
    return not ours & set(_groups(optimizers)) or bool(ours & set(_groups([optimizer])))


def held_names(optimizer: Any, model: nn.Module) -> set[str]:
    """Names of the parameters that an optimizer moves."""
    held = _groups([optimizer])
    return {clean_name(n) for n, p in model.named_parameters(remove_duplicate=False) if id(p) in held}


def has_rate(optimizer: Any) -> bool:
    """Whether its step moves anything: a warm-up may begin at a learning rate of zero."""
    return any(group.get("lr", 1.0) != 0 for group in optimizer.param_groups)


def has_finite_gradients(optimizer: Any) -> bool:
    """Whether no gradient of its parameters is NaN or inf."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sizes = gradient_sizes({str(i): p for i, p in enumerate(parameters)})
    return all(math.isfinite(s) for s in sizes.values())


def _groups(optimizers: Sequence[Any]) -> dict[int, dict[str, Any]]:
    """The parameter group of every parameter, by its id."""
    return {id(p): group for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def check_optimizers(optimizers: Sequence[Any], model: nn.Module, plan: ResidualPlan) -> None:
    """Every gate has to be in an optimizer, and a scalar one should not be decayed.

    Where the optimizers hold nothing at all, the network is moved by something else: a step in the backward.

    Raises:
        GateOptimizerError: If a gate is in none, and is not frozen.
    """
    held = _groups(optimizers)
    if not held:
        return
    wanted = {g.parameter for g in plan.gates}
    gates = {clean_name(n): p for n, p in model.named_parameters() if clean_name(n) in wanted}
    lost = [n for n, p in gates.items() if id(p) not in held and p.requires_grad]
    if lost:
        parameters = {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
        frozen = frozen_branches(plan.branches, parameters)
        resting = {g.parameter for b in plan.branches if b.name in frozen for g in b.gates}
        lost = [n for n in lost if n not in resting]
    if lost:
        raise GateOptimizerError(
            f"looked for {len(gates)} gates in {sum(len(o.param_groups) for o in optimizers)} parameter groups; "
            f"expected each in one, found {len(lost)} in none: {_first(lost, ', ', ' and')}. "
            "Nothing would ever move them. Build the optimizer from `self.parameters()` or "
            "`lit_resinit.param_groups(self)`; a network that is never trained (a target, a teacher) says so "
            "with `requires_grad_(False)`, or is left out with `exclude`."
        )
    scalars = [n for n, p in gates.items() if p.numel() == 1 and held.get(id(p), {}).get("weight_decay")]
    if scalars:
        warn(
            f"weight_decay pulls on {len(scalars)} gates ({together(scalars)}); it holds them below what they want. "
            "Put them in a group of their own: `lit_resinit.param_groups(self)`."
        )


def _first(texts: Sequence[str], between: str, more: str) -> str:
    """The first six, and how many more there are."""
    return between.join(texts[:6]) + ("" if len(texts) <= 6 else f"{more} {len(texts) - 6} more")


def to_move(report: GradientReport) -> set[str]:
    """What any optimizer should move: all with a gradient, but those so small that a step is lost."""
    return {n for n, g in report.gates.items() if g.status == "alive" and not g.size < _LOST}


def not_moved(optimizer: Any, model: nn.Module, plan: ResidualPlan, alive: set[str]) -> str:
    """What an optimizer left where it was although it has a gradient: a step in proportion to its norm (LARS, LAMB)."""
    resting = _resting(optimizer, model, plan, alive)
    if not resting:
        return ""
    return (
        f"{type(optimizer).__name__} has not moved {len(resting)} zero tensors in {STEPS_TO_MOVE} steps, "
        f"although each has a gradient: {together(resting)}. A step proportional to the weight's norm "
        "(LARS, LAMB) leaves a zero where it is. Give them plain steps, in a group of their own: "
        "`lit_resinit.param_groups(self)`."
    )


def _resting(optimizer: Any, model: nn.Module, plan: ResidualPlan, alive: set[str]) -> list[str]:
    """Gates and zero layers among ``alive`` that this optimizer holds, with a rate above zero, and that are closed."""
    stepped = {id(p) for group in optimizer.param_groups if group.get("lr", 1.0) != 0 for p in group["params"]}
    closing = {g.parameter: g for g in plan.gates} | dict.fromkeys(plan.zero_layers)
    gaps: dict[str, Tensor] = {}  # of a sharded one the part that is here: the rank that has it warns
    for name, parameter in ((clean_name(n), p) for n, p in model.named_parameters()):
        if name in closing and name in alive and id(parameter) in stepped:
            gate, value = closing[name], local(parameter).detach()
            if gate is not None:
                value = (value if gate.index is None else value[gate.index]) - gate.value
            peak = peak_of(value)
            gaps |= {} if peak is None else {name: peak}
    return [name for name, gap in zip(gaps, to_host(list(gaps.values())), strict=True) if gap == 0.0]


def still_gates(
    optimizers: Sequence[Any],
    model: nn.Module,
    plan: ResidualPlan,
    movement: Tensor,
    report: GradientReport | None,
    steps: int,
    records: int,
) -> str:
    """Awake, and yet hardly moved: the optimizer is to blame, or a dtype too coarse for its steps; "" if none is."""
    moves = movement[~movement.isnan()]
    if steps < _SETTLED or not moves.numel() or not moves.median():
        return ""
    median = float(moves.median())
    least = STILL * median if records >= _RECORDS else torch.finfo(movement.dtype).tiny
    verdicts = report.gates if report is not None else {}
    still = [
        gate.parameter
        for branch, distance in zip(plan.branches, movement.tolist(), strict=True)
        for gate in branch.gates
        if branch.action != "excluded" and distance < least
        if gate.parameter not in verdicts or verdicts[gate.parameter].status == "alive"
    ]
    if not still:
        return ""
    settings = _settings(optimizers, model)
    listed = [f"{name} ({settings.get(name, 'in no optimizer')})" for name in still]
    number = f"{len(still)} gate{'' if len(still) == 1 else 's'}"
    return (
        f"{number} with a gradient moved less than {STILL:.0%} of the median over all gates "
        f"({median:.3g}) in {steps} steps: {_first(listed, '; ', '; and')}. Compare their "
        "learning rate, weight decay and dtype with those of the others."
    )


def _settings(optimizers: Sequence[Any], model: nn.Module) -> dict[str, str]:
    """Learning rate, weight decay and dtype of every parameter in an optimizer, by name."""
    held = _groups(optimizers)
    return {
        clean_name(n): f"learning rate {float(held[id(p)].get('lr', math.nan)):g}, weight decay "
        f"{held[id(p)].get('weight_decay', 0):g}, {str(p.dtype).removeprefix('torch.')}"
        for n, p in model.named_parameters()
        if id(p) in held
    }
