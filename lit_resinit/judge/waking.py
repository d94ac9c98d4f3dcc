"""Gates that are asleep or frozen at first, looked at again in later steps."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit.graph.tensors import local
from lit_resinit.graph.where import clean_name
from lit_resinit.judge.sizes import gradient_sizes, steps_in_backward
from lit_resinit.judge.step import Judged
from lit_resinit.judge.verdicts import GateGradient, GradientReport, Status, harmless

_OBSERVE_THAT = "run a step like that inside `with observe(model, plan)` of a plain loop, which names the operation"
_ROUNDING = 32 * float(torch.finfo(torch.float32).eps)  # of the largest gradient: what may be rounding alone
_TOO_SMALL = "its gradient is so small beside the largest that it may be rounding alone"
_SEE_LATER = "wait: the step that uses up `patience` is observed, and says what it is"
UNSEEN = 50  # steps without any gradient after which a branch that never ran is missing


def until_unfrozen(report: GradientReport, model: nn.Module) -> GradientReport:
    """The report with gates that are frozen now, but will be unfrozen later, as sleepers instead of an alarm."""
    frozen = {clean_name(n) for n, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return _waited_for(report, frozen, "it is frozen until it is unfrozen")


def until_stepped(report: GradientReport, held: set[str]) -> GradientReport:
    """The report with gates of other optimizers, which have no gradient before their own step, as sleepers."""
    return _waited_for(report, report.gates.keys() - held, "the optimizer that holds it is still to step")


def _waited_for(report: GradientReport, names: set[str], cause: str) -> GradientReport:
    gates = {
        name: dataclasses.replace(gate, status="asleep", cause=cause)
        if gate.status == "missing" and name in names
        else gate
        for name, gate in report.gates.items()
    }
    return GradientReport(gates)


def leaves_behind(loss: Tensor, *, through_empty: bool = True) -> set[int]:
    """``id`` of every leaf that the backward of a loss ends in."""
    found: set[int] = set()
    stack, seen = [loss.grad_fn], {loss.grad_fn}
    while stack:
        function: Any = stack.pop()
        shapes = [m.shape for m in getattr(function, "_input_metadata", ())]
        if function is None or not (through_empty or not shapes or any(0 not in shape for shape in shapes)):
            continue
        if hasattr(function, "variable"):
            found.add(id(function.variable))
        fresh = {f for f, _ in function.next_functions} - seen
        seen |= fresh
        stack += fresh
    return found


class Waking:
    """Gates that were asleep, judged again after each real optimizer step until they wake or ``patience`` is used up.

    Args:
        report: The first report.
        patience: How many real steps a gate may sleep; those in which it is frozen do not count, nor those in which its
            branch did not run, or ran on nothing.
    """

    def __init__(self, report: GradientReport, patience: int) -> None:
        self.report, self.patience = report, patience
        self.steps = 0
        self.woke: dict[str, int] = {}
        self.slept = {n: 0 for n, g in report.gates.items() if g.status == "asleep"}
        self.unseen: dict[str, int] = {}
        self._values: dict[str, Tensor] = {}
        self._depends: set[str] = set()  # sleepers that a loss of this step depends on, and then of these
        self._fed: set[str] = set()  # those that it depends on through values that are not empty

    @property
    def waiting(self) -> bool:
        """Whether some gate is still asleep."""
        return bool(self.slept)

    def hidden(self) -> list[Judged]:
        """The sleepers that are gates of branches in which a plan has none: later steps need not find them."""
        gates = [self.report.gates[n] for n in self.slept]
        return [Judged(g.parameter, g.branch, "gate", g.parameter) for g in gates if g.role == "gate"]

    def resume(self, model: nn.Module, slept: dict[str, int]) -> GradientReport:
        """Go on with what gates had slept before a checkpoint; the first report was one more look at them."""
        again = [n for n in self.slept if n in slept]
        self.slept |= {n: slept[n] for n in again}
        return self._look(model, again, self.report)

    def before_backward(self, model: nn.Module, loss: Tensor) -> None:
        """Note which sleepers this loss depends on through empty tensors only, as an expert without tokens."""
        names = {id(p): clean_name(n) for n, p in model.named_parameters() if clean_name(n) in self.slept}
        self._depends |= {names[i] for i in leaves_behind(loss) if i in names}
        self._fed |= {names[i] for i in leaves_behind(loss, through_empty=False) if i in names}

    def ends(self, model: nn.Module, held: set[str] | None = None) -> bool:
        """Whether one more real step, which moves those ``held``, or all, uses up the patience with some sleeper."""
        last = {n for n, slept in self.slept.items() if slept + 1 >= self.patience and (held is None or n in held)}
        return any(p.requires_grad and clean_name(n) in last for n, p in model.named_parameters())

    def step(
        self,
        model: nn.Module,
        held: set[str] | None = None,
        anew: GradientReport | None = None,
        *,
        waits: bool = False,
    ) -> GradientReport:
        """Judge the sleepers by the gradients of one more real step.

        Args:
            model: The model.
            held: Names of the parameters that the step moves; all when None.
            anew: The verdicts on this step, where it was observed.
            waits: Whether a later step will be, so that patience does not end at one that was not.
        """
        self.steps += 1
        return self._look(model, [n for n in self.slept if held is None or n in held], anew, waits)

    def _look(
        self, model: nn.Module, names: list[str], anew: GradientReport | None = None, waits: bool = False
    ) -> GradientReport:
        parameters = {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
        sizes = gradient_sizes(parameters)
        least = _ROUNDING * max((s for s in sizes.values() if math.isfinite(s)), default=0.0)
        gates = dict(self.report.gates)
        for name in names:
            if name in parameters and not parameters[name].requires_grad:
                continue
            if not sizes.get(name) and name in parameters and self._moved(name, parameters[name]):
                self.woke[name] = self.steps
                gates[name] = _woken(gates[name], gates[name].size)
                del self.slept[name]
                continue
            size = None if name in self._depends - self._fed and sizes.get(name) == 0.0 else sizes.get(name)
            dropped = size == 0.0 and gates[name].by_chance
            if (size is None or dropped) and self._may_run_later(name):
                continue
            last, seen = self.slept[name] + 1 >= self.patience, anew.gates.get(name) if anew is not None else None
            if size and size < least and gates[name].may_round and _is_doubtful(seen, wait=waits or not last):
                gates[name], size = _too_small(gates[name]), 0.0
            if not size and waits and anew is None and last:
                continue
            self.slept[name] += 1
            verdict = self._verdict(gates[name], size, seen)
            if verdict.status != "asleep":
                gates[name] = verdict
                del self.slept[name]
        self._depends, self._fed = set(), set()
        self.report = GradientReport({n: _unless_harmless(g, gates) for n, g in gates.items()})
        return self.report

    def _moved(self, name: str, parameter: Tensor) -> bool:
        """Whether a gate moved since the last look, where the backward uses its gradient up: then it had one."""
        if not steps_in_backward(parameter):
            return False
        before, now = self._values.get(name), local(parameter).detach().clone()
        self._values[name] = now
        return before is not None and not torch.equal(before, now)

    def _may_run_later(self, name: str) -> bool:
        """A step that did not run the branch (an expert without tokens, a dropped layer) says nothing of its gate."""
        self.unseen[name] = self.unseen.get(name, 0) + 1
        return self.unseen[name] < UNSEEN

    def _verdict(self, gate: GateGradient, size: float | None, anew: GateGradient | None) -> GateGradient:
        if size is not None and not math.isfinite(size):
            if anew is not None and anew.status == "nonfinite":
                return anew
            cause = f"NaN or inf {self.slept[gate.parameter]} steps after the first one, in which it had no gradient"
            return dataclasses.replace(gate, status="nonfinite", size=size, cause=cause, remedy=_OBSERVE_THAT)
        if size:
            self.woke[gate.parameter] = self.steps
            return _woken(gate, size)
        slept = self.slept[gate.parameter]
        if size is None and self.unseen.get(gate.parameter) == UNSEEN:
            cause = f"no gradient came in {UNSEEN} optimizer steps: {gate.cause}"
            return dataclasses.replace(gate, status="missing", cause=cause)
        if slept < self.patience:
            return gate
        status: Status = "missing" if size is None else "dead"
        through = f"it slept through {slept} optimizer steps"
        if anew is None:
            return dataclasses.replace(gate, status=status, cause=f"{through}; at the first one {gate.cause}")
        if anew.status == "asleep":
            return dataclasses.replace(anew, status=status, cause=f"{through}; at the last one {anew.cause}")
        return anew if anew.status == "alive" else dataclasses.replace(anew, cause=f"{through}: {anew.cause}")


def _is_doubtful(seen: GateGradient | None, *, wait: bool) -> bool:
    """Whether a small gradient counts as none: an observed step says what it is, and later ones may be observed."""
    return wait if seen is None else seen.status != "alive"


def _too_small(gate: GateGradient) -> GateGradient:
    return dataclasses.replace(gate, cause=_TOO_SMALL, waits_for=None, source="", remedy=_SEE_LATER)


def _woken(gate: GateGradient, size: float) -> GateGradient:
    return dataclasses.replace(gate, status="alive", cause="", waits_for=None, size=size, source="", remedy="")


def _unless_harmless(verdict: GateGradient, gates: dict[str, GateGradient]) -> GateGradient:
    """A bias that gets nothing beside a gate that does is no alarm."""
    if verdict.role != "bias" or verdict.status != "dead":
        return verdict
    alive = [g.parameter for g in gates.values() if g.branch == verdict.branch and g.role == "gate"]
    alive = [n for n in alive if gates[n].status == "alive"]
    return harmless(verdict, alive[0]) if alive else verdict
