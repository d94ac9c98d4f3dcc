"""Is every gate alive, asleep or dead? And where is the broken link?"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from lit_resinit.find.gates import holds
from lit_resinit.graph import ops
from lit_resinit.graph.tensors import is_sharded, whole
from lit_resinit.graph.where import clean_name
from lit_resinit.judge.flow import Flow
from lit_resinit.judge.seen import BY_BATCH, Reason
from lit_resinit.judge.shut import hidden_gates, shut_branches
from lit_resinit.judge.sizes import frozen_branches, gradient_sizes, steps_in_backward
from lit_resinit.judge.verdicts import GateGradient, GradientReport, Role, Status, harmless
from lit_resinit.plan.values import CONSTANT_SCHEMES, ResidualPlan, check_plan
from lit_resinit.words import together

EXPLODING = 1e6  # times the median over gates
STEEP = 1e5  # slope above which the first step of any usual size throws the gate far away
SLOW = 1e-3  # slope below which a start is slow
_SMALLEST = float(torch.finfo(torch.float32).tiny)  # below it a gradient has lost its digits and says nothing of size
_LET_PASS = "let that hook pass the gradient on as it is, or remove it"
_DIVIDE = (
    "divide by something that is never zero, `v / torch.where(norm > 0, norm, 1.0)`, with no other `where` around it "
    "(a constant in place of the quotient has no slope); or "
)
_TRUE_GRADIENT = "return the true gradient there"
_LET_BATCHES = "let some batch reach it within `patience` steps, or raise `patience` where such batches are rare"
_BY_BATCH_WORDS: dict[str, tuple[str, str]] = {  # why it sleeps, and what to do if it does not wake
    "underflow": (
        "the error is too small for half precision, which rounds it to zero: scale the loss (a GradScaler), "
        "or use bfloat16",
        "scale the loss (a GradScaler), or use bfloat16",
    ),
    "data": ("this batch sent it no error (masked, dropped or cut off)", _LET_BATCHES),
    "balance": ("in this batch the terms of its error cancel", _LET_BATCHES),
    "counter": (
        "a buffer that the forward itself writes is zero in this step",
        "let that buffer leave zero within `patience` steps, or raise `patience`",
    ),
}


_Verdict = Callable[..., "GateGradient"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Judged:
    name: str
    branch: str
    role: Role
    gate: str


def judged_parameters(plan: ResidualPlan) -> list[_Judged]:
    """What is judged: gates, then the biases closed with them, then the zero layers."""
    found: dict[str, _Judged] = {}
    for branch in plan.active if plan.gates else ():
        for gate in branch.gates:
            found.setdefault(gate.parameter, _Judged(gate.parameter, branch.name, "gate", gate.parameter))
    for branch in plan.active if plan.gates else ():
        for gate in branch.gates:
            for bias in gate.biases:
                found.setdefault(bias, _Judged(bias, branch.name, "bias", gate.parameter))
    for name in plan.zero_layers:
        found.setdefault(name, _Judged(name, "", "zero layer", name))
    return list(found.values())


def check_gradients(model: nn.Module, plan: ResidualPlan, flow: Flow | None = None) -> GradientReport:
    """Judge the gradients that ``loss.backward()`` left on the gates.

    The gradient of a gate ``g`` on ``u(x)`` is the error that arrives, times ``u(x)``: it is zero when one of the two
    is. Whether training can change that is known exactly after :func:`observe`; from the gradients alone, a zero one
    counts as asleep while another zero parameter of the plan is alive.

    Args:
        model: The model, after one backward.
        plan: The plan.
        flow: What :func:`observe` saw, if it was used.

    Returns:
        One verdict for each gate, bias and zero layer.

    Example:
        >>> from lit_resinit import apply_, make_plan
        >>> layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8)
        >>> plan = make_plan(layer, x)
        >>> apply_(layer, plan)(x).square().sum().backward()
        >>> {g.status for g in check_gradients(layer, plan).gates.values()}
        {'alive'}
    """
    check_plan(model, plan)
    return _Judge(model, plan, flow).report()


def judge_layers(model: nn.Module, plan: ResidualPlan, flow: Flow, names: Collection[str]) -> list[GateGradient]:
    """Verdicts on other parameters without a gradient, except where the terms of it cancel, as a rule of calculus."""
    judge = _Judge(model, plan, flow)
    apart = [n for n in names if all(r.kind != "cancel" for r in flow.reasons_of(n, flow.edges.get(n, [])))]
    return [judge.verdict(_Judged(name, "", "layer", name)) for name in sorted(apart)]


class _Judge:
    """All verdicts of one step: each asks the same step, and in the end they are compared with one another."""

    def __init__(self, model: nn.Module, plan: ResidualPlan, flow: Flow | None) -> None:
        self.plan, self.flow = plan, flow
        self.parameters: dict[str, nn.Parameter] = {
            clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)
        }
        self.judged = judged_parameters(plan)
        self.sizes = gradient_sizes(self.parameters)
        if flow is not None:
            self.sizes |= {n: h.kept for n, h in flow.seen.hooked.items() if h.used}
        if flow is not None and plan.scheme not in CONSTANT_SCHEMES:
            known = {j.name for j in self.judged}
            hidden = [_Judged(n, b, "gate", n) for b, n in hidden_gates(plan, flow) if n not in known]
            self.judged += list({j.name: j for j in hidden}.values())
        self.moving = self._moving() if flow is not None else set()

    def report(self) -> GradientReport:
        verdicts = {j.name: self.verdict(j) for j in self.judged}
        self._mark_exploding(verdicts)
        self._mark_origin(verdicts)
        for judged in self.judged:
            verdict, gate = verdicts[judged.name], verdicts[judged.gate]
            if judged.role == "bias" and gate.status == "alive" and verdict.status == "dead":
                verdicts[judged.name] = harmless(verdict, judged.gate)
        if self.flow is not None:
            verdicts |= {v.parameter: v for v in shut_branches(self.plan, self.flow, self._frozen)}
        return GradientReport(verdicts)

    def verdict(self, judged: _Judged) -> GateGradient:
        """The verdict on one parameter."""
        size = self.sizes.get(judged.name)
        parameter = self.parameters.get(judged.name)

        def verdict(status: Status, cause: str = "", **more: Any) -> GateGradient:
            size_ = math.nan if size is None else size
            return GateGradient(judged.name, status, cause, size=size_, branch=judged.branch, role=judged.role, **more)

        if parameter is None:
            return verdict("missing", "the model has no such parameter; apply the plan first")
        if size is None:
            return self._without_gradient(judged, parameter, verdict)
        hooked = self.flow.seen.hooked.get(judged.name) if self.flow is not None else None
        if hooked is not None and size == 0.0 and hooked.sent != 0.0:
            why = f"a hook on it turns its gradient ({hooked.sent:.3g}) into zero"
            return verdict("dead", why, source=hooked.source, remedy=_LET_PASS)
        if hooked is not None and math.isfinite(hooked.sent) and not math.isfinite(size):
            why = f"a hook on it turns its finite gradient ({hooked.sent:.3g}) into NaN or inf"
            return verdict("nonfinite", why, source=hooked.source, remedy=_LET_PASS)
        if not math.isfinite(size):
            return self._nonfinite(judged, verdict)
        edges = self.flow.edges.get(judged.name, []) if self.flow is not None else []
        if not (size == 0.0 if self.flow is None else self._is_zero(judged.name, size)):
            return verdict("alive", self._silent_elements(parameter), **self._slope(judged))
        return self._zero(judged, edges, verdict)

    def _without_gradient(self, judged: _Judged, parameter: nn.Parameter, verdict: _Verdict) -> GateGradient:
        if not parameter.requires_grad and self._is_open(judged.gate):
            return verdict("alive", "it is frozen, and open: its branch takes part as it is")
        if judged.branch and judged.branch in self._frozen:
            return verdict("asleep", "its whole block is frozen, and waits to be unfrozen or copied into")
        if not parameter.requires_grad:
            opener = self._open_beside(judged)
            if opener:
                return verdict("alive", f"it is frozen; {opener} opens its branch")
            return verdict("missing", "it is frozen (requires_grad is False), so its branch stays closed for good")
        if self.flow is None and steps_in_backward(parameter):
            return verdict("asleep", "a hook on it may have used its gradient up; use `observe` to see it")
        reader = self.flow.reader(judged.name) if self.flow is not None else 0
        if reader is None:
            return verdict("asleep", "this batch did not run its branch")
        if self.flow is None:
            return verdict("missing", "no gradient came back: use `observe` to see where it was cut off")
        place, how = self.flow.links.cut(self.flow.leaves[judged.name])
        why = f"it was read in the forward, but no gradient came back: {how}"
        return verdict("missing", why, source=self.flow.graph.calls[reader if place is None else place].source)

    @functools.cached_property
    def _frozen(self) -> set[str]:
        return frozen_branches(self.plan.branches, self.parameters)

    def _open_beside(self, judged: _Judged) -> str:
        """Another gate of a branch that is a sum, which has a gradient: a low-rank update of a frozen layer."""
        gates = next((b.gates for b in self.plan.branches if b.name == judged.branch), ())
        return next((g.parameter for g in gates if g.parameter != judged.gate and self.sizes.get(g.parameter)), "")

    def _is_open(self, name: str) -> bool:
        gates = [g for g in self.plan.gates if g.parameter == name]
        value = whole(self.parameters[name])
        values = [value if g.index is None else value[g.index] for g in gates]
        return bool(gates) and not any(holds(v, g.value) for v, g in zip(values, gates, strict=True))

    def _silent_elements(self, parameter: nn.Parameter) -> str:
        grad = parameter.grad
        if grad is None or grad.numel() < 2 or grad.is_sparse or is_sharded(grad):
            return ""
        silent = int((grad == 0).sum())
        return f"{silent} of {grad.numel()} elements have no gradient" if silent else ""

    # ---------------------------------------------------------------- zero

    def _zero(self, judged: _Judged, edges: list[tuple[int, float]], verdict: _Verdict) -> GateGradient:
        if self.flow is None:
            other = next((n for n in self._zero_and_alive() if n != judged.name), None)
            if other is not None:
                cause = f"no error arrives while {other} is zero, and {other} learns"
                return verdict("asleep", cause, waits_for=other, remedy=_move(other))
            return verdict("dead", "its gradient is exactly zero, and no zero parameter that learns explains it")
        reasons = self.flow.reasons_of(judged.name, edges)
        if not reasons:
            return verdict("asleep", "this batch sent it no error", remedy=_LET_BATCHES)
        dropped = any(r.kind == "chance" for r in reasons)
        for reason in reasons:
            others = sorted(reason.parameters - {judged.name})
            mover = next((n for n in others if n in self.moving), None)
            if mover is not None:
                what = "is zero" if self._is_all_zero(mover) else "stands where it lets none through"
                cause = f"no error arrives while {mover} {what}, and {self._how_it_moves(mover)}"
                return verdict("asleep", cause, waits_for=mover, by_chance=dropped, remedy=_move(mover))
        if dropped:
            return verdict("asleep", "a random draw dropped its branch", by_chance=True, remedy=_LET_BATCHES)
        by_batch = next((r.kind for r in reasons if r.kind in _BY_BATCH_WORDS), "")
        if by_batch:
            cause, remedy = _BY_BATCH_WORDS[by_batch]
            first = min((r for r in reasons if r.kind == by_batch), key=lambda r: r.call)
            return verdict("asleep", cause, remedy=remedy, source=self.flow.seen.source(first.place))
        reason = min(reasons, key=lambda r: r.call)
        cause, remedy = self._broken_link(judged, reason), self._cure(judged, reason)
        return verdict("dead", cause, source=self.flow.seen.source(reason.place), remedy=remedy)

    def _is_all_zero(self, name: str) -> bool:
        return holds(whole(self.parameters[name]), 0.0)

    def _how_it_moves(self, name: str) -> str:
        assert self.flow is not None
        return f"{name} learns" if name in self.flow.alive else f"{name} is to learn next"

    def _zero_and_alive(self) -> list[str]:
        return [
            n
            for n in (j.name for j in self.judged)
            if n in self.parameters and self.sizes.get(n) and holds(whole(self.parameters[n]), 0.0)
        ]

    def _moving(self) -> set[str]:
        """Parameters that training moves: they have a gradient, or wait for other data or for one that moves.

        The least such set, so that two zeros that wait for each other are not in it.
        """
        assert self.flow is not None
        edges, flow = self.flow.edges, self.flow
        zero = {n for n, s in self.sizes.items() if self._is_zero(n, s)}
        moving = {n for n in self.sizes if n not in zero and self.parameters[n].requires_grad}
        waiting: dict[str, list[str]] = {}
        fresh = set()
        for name in zero:
            if not self.parameters[name].requires_grad:
                continue
            for reason in flow.reasons_of(name, edges.get(name, [])):
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

    def _is_zero(self, name: str, size: float) -> bool:
        assert self.flow is not None
        return size == 0.0 or self.flow.is_noise(self.flow.edges.get(name, []), size)

    def _broken_link(self, judged: _Judged, reason: Reason) -> str:
        assert self.flow is not None
        call = self.flow.graph.calls[reason.call]
        op, reader = ops.base_name(call.func), self.flow.reader(judged.name)
        end = self.flow.seen.additions.get(judged.branch, -1)
        others = sorted(reason.parameters - {judged.name})
        frozen = [n for n in others if n in self.flow.seen.frozen]
        flat = ops.has_no_slope(call.func, call.args, call.kwargs)
        point = "everywhere" if flat else f"at {self._point(reason)}"
        why = {
            "factor": f"`{op}` multiplies by zero",
            "slope": f"`{op}` has slope zero {point}",
            "cancel": f"the terms of `{op}` cancel, so the true gradient is zero and this one is rounding noise",
            "unreached": "the loss does not use it",
            "hook": f"a hook on the output of `{op}` replaces it",
        }.get(reason.kind, f"`{op}` sends nothing back")
        if reason.kind == "written":
            line = next(line for (call, _), line in self.flow.seen.written.items() if call == reason.call)
            why = f"{self.flow.seen.spelled(reason.call)} returns a zero that no error went into (made at {line})"
        if reason.fixed_by:
            why += f", because {together(sorted(reason.fixed_by))} is a buffer of zeros"
        elif frozen:
            why += f", because {together(frozen)} is zero and frozen"
        elif judged.gate in reason.parameters and reason.kind == "factor":
            why += f", a value computed from the zero output of {judged.gate} itself"
        elif others and not (reason.kind == "slope" and judged.name in reason.parameters):  # else they are summands
            zero = "zero too and " if all(map(self._is_all_zero, others)) else ""
            why += f", because of {together(others)}, {zero}without a gradient"
        it = "it" if judged.role == "layer" else "the gate"
        if reason.call == reader and reason.kind == "factor":
            return f"the input of {it} is zero: {why}"
        if end >= 0 and reason.call > end:
            return f"no error arrives at the block: {why}"
        if judged.role == "layer":
            return f"an operation behind it turns the error into zero: {why}"
        return f"an operation between the gate and the end of the branch turns the error into zero: {why}"

    def _cure(self, judged: _Judged, reason: Reason) -> str:
        """What to do about a broken link, followed to the letter."""
        assert self.flow is not None
        others = sorted(reason.parameters - {judged.name})
        frozen = [n for n in others if n in self.flow.seen.frozen]
        end = self.flow.seen.additions.get(judged.branch, -1)
        if reason.kind in ("hook", "written"):
            return _LET_PASS if reason.kind == "hook" else _TRUE_GRADIENT
        if frozen:
            return f"unfreeze {together(frozen)}, or give it other values than zero"
        if reason.fixed_by:
            return f"give {together(sorted(reason.fixed_by))} other values than zero, or make it a parameter"
        if reason.kind == "factor" and others and judged.gate not in reason.parameters:
            return f"initialise {together(others)} as any other layer, not at zero: one zero in a row is enough"
        if reason.kind == "unreached":
            return "let what the block returns take part in the loss, or exclude its branch"
        if end >= 0 and reason.call > end:
            return "let that operation pass an error on, for it is behind the block and stops what all of it learns"
        return self._close_behind(judged.gate)

    def _close_behind(self, gate: str) -> str:
        """The edit that closes a branch behind the operation that stops the error of its gate."""
        if any(g.parameter == gate and g.kind in ("scale", "inserted") for g in self.plan.gates):
            return f"multiply by {gate} behind that operation, as the last factor of what is added to the stream"
        return (
            f"start {gate} as any other layer, not at zero, and close the branch behind that operation: "
            "`self.gate = lit_resinit.ScalarGate()` in `__init__`, `x + self.gate(branch)` in `forward`"
        )

    def _point(self, reason: Reason) -> str:
        assert self.flow is not None
        return "zero" if self.flow.links.explained.reads_zero(reason.call) else "its input"

    # ---------------------------------------------------------------- nonfinite and exploding

    def _nonfinite(self, judged: _Judged, verdict: _Verdict) -> GateGradient:
        if self.flow is None:
            return verdict("nonfinite", "its gradient is NaN or inf; use `observe` to find the operation")
        origins = self.flow.origins_of(self.flow.edges.get(judged.name, []))
        if not origins:
            return verdict("nonfinite", "the loss itself sends NaN or inf")
        place = max(origins)
        end = self.flow.seen.additions.get(judged.branch, -1)
        maker = self.flow.links.explained.nan_maker(place)
        if maker is not None:
            cause = f"the forward itself is NaN: {self.flow.seen.spelled(maker)} makes it of values without NaN"
            return verdict("nonfinite", cause, source=self.flow.seen.source(maker))
        op, remedy = self.flow.seen.spelled(place), _TRUE_GRADIENT if place in self.flow.seen.python else ""
        if place in self.flow.seen.replaced:
            remedy = _LET_PASS
            cause = f"a hook on the output of {op} turns a finite error into NaN or inf"
        elif end >= 0 and place > end:
            cause = f"inherits {_from_behind(op)}"
            return verdict("nonfinite", cause, source=self.flow.seen.source(place), remedy=remedy, origin=False)
        else:
            cause = (
                f"{op} turns a finite error into NaN or inf: guard the argument of the operation, not its result "
                "(its unselected branch still runs backward), or keep away from the point where it has no slope"
            )
            divides = ops.base_name(self.flow.graph.calls[place].func) in ("div", "div_", "true_divide", "reciprocal")
            remedy = remedy or (_DIVIDE if divides else "") + self._close_behind(judged.gate)
        return verdict("nonfinite", cause, source=self.flow.seen.source(place), remedy=remedy)

    def _mark_origin(self, verdicts: dict[str, GateGradient]) -> None:
        """Where every affected gate only inherits the NaN, the loss (or the head) is the origin: say so once."""
        bad = [n for n, v in verdicts.items() if v.status == "nonfinite"]
        if not bad or any(verdicts[n].origin for n in bad):
            return
        assert self.flow is not None  # without it every verdict stands for itself
        place = max(self.flow.origins_of(self.flow.edges.get(bad[-1], [])))
        behind = _from_behind(self.flow.seen.spelled(place))
        cause = f"gets {behind}: the loss or what leads to it is not differentiable at the identity"
        verdicts[bad[-1]] = dataclasses.replace(verdicts[bad[-1]], cause=cause, origin=True)

    def _mark_exploding(self, verdicts: dict[str, GateGradient]) -> None:
        judged = {n: v for n, v in verdicts.items() if v.status == "alive" and v.role != "bias"}
        sizes = [v.size for v in judged.values() if v.size >= _SMALLEST]
        limit = EXPLODING * statistics.median_high(sizes) if len(sizes) > 1 else math.inf
        gains = {n: g for n, v in judged.items() if (g := self._gain(v)) >= _SMALLEST}
        most = EXPLODING * statistics.median_high(gains.values()) if len(gains) > 1 else math.inf
        for name, v in judged.items():
            large = v.size > limit and (name not in gains or len(gains) < 2 or gains[name] > most)
            if large or v.slope > STEEP:
                why, source = self._steepest(v)
                size = f"{v.size * EXPLODING / limit:.1e} times the median over gates" if large else f"{v.size:.1e}"
                cause = f"its gradient explodes ({size}): {why}"
                verdicts[name] = dataclasses.replace(v, status="exploding", cause=cause, source=source)

    def _gain(self, v: GateGradient) -> float:
        """The gradient over the error at the branch's end, which is small for as long as what lies behind sleeps."""
        error = self.flow.arriving.get(self.flow.seen.additions.get(v.branch, -1)) if self.flow is not None else None
        return v.size / error if error and math.isfinite(error) else math.nan

    def _steepest(self, v: GateGradient) -> tuple[str, str]:
        """What makes a gradient large: an operation on the way of the error, else what the gate multiplies."""
        gain, call = max(self._steps(v.parameter, v.branch), default=(0.0, -1))
        if self.flow is None or gain <= 1.0 / SLOW:
            return "the gate multiplies large values, or the error that arrives is large", ""
        op = ops.base_name(self.flow.graph.calls[call].func)
        why = f"`{op}` makes the error {gain:.1e} times larger, as a normalisation of a zero vector does"
        return why, self.flow.graph.calls[call].source

    # ---------------------------------------------------------------- slope

    def _slope(self, judged: _Judged) -> dict[str, Any]:
        if self.flow is None or judged.branch not in self.flow.seen.additions:
            return {}
        reader, end = self.flow.reader(judged.name), self.flow.seen.additions[judged.branch]
        at_gate, at_end = self.flow.arriving.get(reader if reader is not None else -1), self.flow.arriving.get(end)
        if not at_gate or not at_end or not math.isfinite(at_gate / at_end):
            return {}
        slope = at_gate / at_end
        steps = self._steps(judged.name, judged.branch) if slope < SLOW else []
        if not steps:
            return {"slope": slope}
        call = self.flow.graph.calls[min(steps)[1]]
        return {"slope": slope, "attenuated_by": f"`{ops.base_name(call.func)}` at {call.source}"}

    def _steps(self, name: str, branch: str) -> list[tuple[float, int]]:
        if self.flow is None or branch not in self.flow.seen.additions:
            return []
        reader = self.flow.reader(name)
        return [] if reader is None else self.flow.steps_between(reader, self.flow.seen.additions[branch])


def _from_behind(op: str) -> str:
    return f"NaN or inf from {op} after its block, where the error was still finite"


def _move(mover: str) -> str:
    return f"see that an optimizer moves {mover} (in a parameter group, at a rate above zero), or raise `patience`"
