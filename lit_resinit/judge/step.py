"""One step as the verdicts ask it: what is judged, how large its gradients are, and what training moves."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from torch import nn

from lit_resinit.find.gates import holds
from lit_resinit.graph.tensors import whole
from lit_resinit.graph.where import clean_name
from lit_resinit.judge.flow import Flow
from lit_resinit.judge.seen import BY_BATCH, Reason
from lit_resinit.judge.shut import hidden_gates
from lit_resinit.judge.sizes import frozen_branches, gradient_sizes
from lit_resinit.judge.verdicts import Role, Status, Words
from lit_resinit.plan.values import CONSTANT_SCHEMES, ResidualPlan


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """A parameter to judge, its branch ("" for none), and the gate that it is or belongs to."""

    name: str
    branch: str
    role: Role
    gate: str


def judged_parameters(plan: ResidualPlan) -> list[Judged]:
    """What is judged: gates, then the biases closed with them, then the zero layers."""
    found: dict[str, Judged] = {}
    for branch in plan.active if plan.gates else ():
        for gate in branch.gates:
            found.setdefault(gate.parameter, Judged(gate.parameter, branch.name, "gate", gate.parameter))
    for branch in plan.active if plan.gates else ():
        for gate in branch.gates:
            for bias in gate.biases:
                found.setdefault(bias, Judged(bias, branch.name, "bias", gate.parameter))
    for name in plan.zero_layers:
        found.setdefault(name, Judged(name, "", "zero layer", name))
    return list(found.values())


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What is known of one step when its gradients are judged.

    Args:
        plan: The plan.
        flow: What was seen of the step; None where there are gradients only.
        parameters: All of the model, by name.
        sizes: Largest absolute gradient of those that have one.
        judged: What is judged.
        resting: Branches whose whole block is frozen.
        moving: Parameters that training moves: now, or once others have; empty where the step was not seen.
    """

    plan: ResidualPlan
    flow: Flow | None
    parameters: dict[str, nn.Parameter]
    sizes: dict[str, float]
    judged: tuple[Judged, ...]
    resting: set[str]
    moving: set[str]

    @staticmethod
    def of(model: nn.Module, plan: ResidualPlan, flow: Flow | None, known: Sequence[Judged] = ()) -> Step:
        """The step whose gradients the model holds; what earlier steps judged is judged again."""
        parameters = {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
        sizes = gradient_sizes(parameters)
        judged = judged_parameters(plan)
        judged += [j for j in known if j.name not in {p.name for p in judged}]
        if flow is not None:
            sizes |= {n: h.kept for n, h in flow.seen.hooked.items() if h.used}
            judged = _with_hidden(judged, plan, flow)
        moving = _moving(flow, parameters, sizes) if flow is not None else set[str]()
        resting = frozen_branches(plan.branches, parameters)
        return Step(plan, flow, parameters, sizes, tuple(judged), resting, moving)

    def is_all_zero(self, name: str) -> bool:
        """Whether a parameter is zero everywhere."""
        return holds(whole(self.parameters[name]), 0.0)

    def has_no_gradient(self, name: str) -> bool:
        """Whether the gradient of a parameter that has one is zero, as far as is known."""
        size = self.sizes[name]
        return size == 0.0 if self.flow is None else _is_zero(self.flow, name, size)


def _with_hidden(judged: list[Judged], plan: ResidualPlan, flow: Flow) -> list[Judged]:
    """Branches without a gate that zero parameters keep closed have these as gates."""
    if plan.scheme in CONSTANT_SCHEMES:
        return judged
    known = {j.name for j in judged}
    hidden = [Judged(name, branch, "gate", name) for branch, name in hidden_gates(plan, flow) if name not in known]
    return [*judged, *{j.name: j for j in hidden}.values()]


def _is_zero(flow: Flow, name: str, size: float) -> bool:
    return size == 0.0 or flow.is_noise(name, flow.edges.get(name, []), size)


def _moving(flow: Flow, parameters: dict[str, nn.Parameter], sizes: dict[str, float]) -> set[str]:
    """Parameters that training moves: they have a gradient, or wait for other data or for one that moves.

    The least such set, so that two zeros that wait for each other are not in it.
    """
    zero = {n for n, s in sizes.items() if _is_zero(flow, n, s)}
    moving = {n for n in sizes if n not in zero and parameters[n].requires_grad}
    waiting: dict[str, list[str]] = {}
    fresh = set()
    for name in zero:
        if not parameters[name].requires_grad:
            continue
        for reason in flow.reasons_of(name, flow.edges.get(name, [])):
            if reason.kind in BY_BATCH:
                fresh.add(name)
            for other in reason.parameters - {name}:
                waiting.setdefault(other, []).append(name)
    stack = [*moving, *fresh]
    moving |= fresh
    while stack:
        for name in waiting.get(stack.pop(), ()):
            if name not in moving:
                moving.add(name)
                stack.append(name)
    return moving


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One judged parameter in one step: what a rule is asked about."""

    step: Step
    judged: Judged

    @property
    def name(self) -> str:
        """Of the parameter."""
        return self.judged.name

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter; None where the model has none of that name."""
        return self.step.parameters.get(self.name)

    @property
    def frozen(self) -> bool:
        """Whether the parameter takes no gradient."""
        return self.parameter is not None and not self.parameter.requires_grad

    @property
    def size(self) -> float | None:
        """Largest absolute gradient; None where none came."""
        return self.step.sizes.get(self.name)

    @property
    def flow(self) -> Flow:
        """What was seen of the step, for rules that are asked only where it was."""
        assert self.step.flow is not None
        return self.step.flow

    @property
    def edges(self) -> list[tuple[int, float]]:
        """Which operations sent it an error, and how large."""
        return self.flow.edges.get(self.name, [])

    @functools.cached_property
    def reasons(self) -> tuple[Reason, ...]:
        """Why its gradient is zero."""
        return self.flow.reasons_of(self.name, self.edges)

    @property
    def reader(self) -> int | None:
        """The operation in which it meets the data."""
        return self.flow.reader(self.name)

    @property
    def end(self) -> int:
        """The addition at the end of its branch; -1 for none."""
        return self.flow.seen.additions.get(self.judged.branch, -1)

    @property
    def may_round(self) -> bool:
        """Whether rounding alone may look like a gradient of it."""
        return self.step.flow is None or self.end < 0 or self.flow.may_round(self.name, self.end)


Rule = Callable[[Case], Words | None]
Rules = tuple[tuple[Status, Rule], ...]
