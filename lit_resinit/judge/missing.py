"""No gradient came at all: is that a fault, or is the parameter frozen, its branch not run, its gradient used up?"""

from __future__ import annotations

from lit_resinit.find.gates import holds
from lit_resinit.graph.tensors import whole
from lit_resinit.judge.sizes import steps_in_backward
from lit_resinit.judge.step import Case
from lit_resinit.judge.verdicts import Words


def no_such_parameter(case: Case) -> Words | None:
    """The plan was not applied to this model."""
    return Words("the model has no such parameter; apply the plan first") if case.parameter is None else None


def frozen_and_open(case: Case) -> Words | None:
    """Nothing waits for a frozen gate that is open."""
    gates = [g for g in case.step.plan.gates if g.parameter == case.judged.gate]
    if not case.frozen or not gates:
        return None
    value = whole(case.step.parameters[case.judged.gate])
    if any(holds(value if g.index is None else value[g.index], g.value) for g in gates):
        return None
    return Words("it is frozen, and open: its branch takes part as it is")


def rests(case: Case) -> Words | None:
    """Nothing of its block is trained."""
    if case.judged.branch and case.judged.branch in case.step.resting:
        return Words("its whole block is frozen, and waits to be unfrozen or copied into")
    return None


def opened_by_another(case: Case) -> Words | None:
    """It is frozen, but another summand of its branch learns: a low-rank update of a frozen layer."""
    gates = next((b.gates for b in case.step.plan.branches if b.name == case.judged.branch), ())
    others = [g.parameter for g in gates if g.parameter != case.judged.gate]
    opener = next((name for name in others if case.step.sizes.get(name)), "")
    return Words(f"it is frozen; {opener} opens its branch") if case.frozen and opener else None


def frozen(case: Case) -> Words | None:
    """Nothing else opens the branch of a frozen gate."""
    return Words("it is frozen (requires_grad is False), so its branch stays closed for good") if case.frozen else None


def may_be_used_up(case: Case) -> Words | None:
    """An optimizer that steps in the backward takes the gradient away; only `observe` sees it."""
    if case.parameter is not None and steps_in_backward(case.parameter):
        return Words("a hook on it may have used its gradient up; use `observe` to see it")
    return None


def not_run(case: Case) -> Words | None:
    """No operation of this step reads it together with data."""
    return Words("this batch did not run its branch") if case.reader is None else None


def cut_off_unseen(case: Case) -> Words:
    """The step was not seen."""
    return Words("no gradient came back: use `observe` to see where it was cut off")


def cut_off(case: Case) -> Words:
    """The way from it to the loss ends somewhere for gradients."""
    place, how = case.flow.links.cut(case.flow.leaves[case.name])
    place = case.reader if place is None else place
    assert place is not None  # `not_run` comes first
    why = f"it was read in the forward, but no gradient came back: {how}"
    return Words(why, source=case.flow.graph.calls[place].source)
