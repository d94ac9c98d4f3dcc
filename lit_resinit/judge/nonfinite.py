"""Where NaN and inf come from: the operation that makes them, whether in the forward or on the way back."""

from __future__ import annotations

import dataclasses
import math

from lit_resinit.graph import ops
from lit_resinit.judge.cures import DIVIDE, LET_PASS, TRUE_GRADIENT, close_behind
from lit_resinit.judge.step import Case, Judged, Step
from lit_resinit.judge.verdicts import GateGradient, Words


def hook_to_nan(case: Case) -> Words | None:
    """A hook of the user's on the parameter itself spoils a finite gradient."""
    hooked = case.flow.seen.hooked.get(case.name)
    if hooked is None or not math.isfinite(hooked.sent):
        return None
    why = f"a hook on it turns its finite gradient ({hooked.sent:.3g}) into NaN or inf"
    return Words(why, source=hooked.source, remedy=LET_PASS)


def unseen(case: Case) -> Words:
    """From the gradients alone nothing more is known."""
    return Words("its gradient is NaN or inf; use `observe` to find the operation")


def from_the_loss(case: Case) -> Words | None:
    """No operation turned a finite error into it."""
    return None if case.flow.origins_of(case.edges) else Words("the loss itself sends NaN or inf")


def from_the_forward(case: Case) -> Words | None:
    """The operation read NaN already."""
    maker = case.flow.links.explained.nan_maker(_origin(case))
    if maker is None:
        return None
    cause = f"the forward itself is NaN: {case.flow.seen.spelled(maker)} makes it of values without NaN"
    return Words(cause, source=case.flow.seen.source(maker))


def from_a_hook(case: Case) -> Words | None:
    """A hook of the user's on a value."""
    place, seen = _origin(case), case.flow.seen
    if place not in seen.replaced:
        return None
    cause = f"a hook on the output of {seen.spelled(place)} turns a finite error into NaN or inf"
    return Words(cause, source=seen.source(place), remedy=LET_PASS)


def from_behind(case: Case) -> Words | None:
    """It only arrives, from behind the block."""
    place, seen = _origin(case), case.flow.seen
    if not 0 <= case.end < place:
        return None
    remedy = TRUE_GRADIENT if place in seen.python else ""
    return Words(f"inherits {_behind(case, place)}", source=seen.source(place), remedy=remedy, origin=False)


def from_an_operation(case: Case) -> Words:
    """An operation of the branch has no slope where it stands."""
    place, seen = _origin(case), case.flow.seen
    divides = ops.base_name(case.flow.graph.calls[place].func) in ("div", "div_", "true_divide", "reciprocal")
    cause = (
        f"{seen.spelled(place)} turns a finite error into NaN or inf: guard the argument of the operation, not its "
        "result (its unselected branch still runs backward), or keep away from the point where it has no slope"
    )
    usual = "" if case.judged.role == "layer" else (DIVIDE if divides else "") + close_behind(case)
    return Words(cause, source=seen.source(place), remedy=TRUE_GRADIENT if place in seen.python else usual)


def poisoned_layers(step: Step) -> list[Case]:
    """Parameters other than the judged ones whose gradient is NaN or inf; of those that were seen, the origin's.

    The optimizer's step puts it into them, and one forward later it is everywhere.
    """
    judged = {j.name for j in step.judged}
    names = [n for n, s in step.sizes.items() if n not in judged and not math.isfinite(s)]
    cases = [Case(step, Judged(name, "", "layer", name)) for name in names]
    if step.flow is None:
        return cases
    last = {case.name: max(case.flow.origins_of(case.edges), default=math.inf) for case in cases}
    return [case for case in cases if last[case.name] == max(last.values())]


def mark_origin(step: Step, verdicts: dict[str, GateGradient]) -> None:
    """Where every affected gate only inherits the NaN, the loss (or the head) is the origin: say so once."""
    bad = [n for n, v in verdicts.items() if v.status == "nonfinite"]
    if not bad or any(verdicts[n].origin for n in bad):
        return
    case = Case(step, next(j for j in step.judged if j.name == bad[-1]))
    behind = _behind(case, _origin(case))
    cause = f"gets {behind}: the loss or what leads to it is not differentiable at the identity"
    verdicts[bad[-1]] = dataclasses.replace(verdicts[bad[-1]], cause=cause, origin=True)


def _origin(case: Case) -> int:
    """The operation nearest the loss that turned a finite error into NaN or inf."""
    return max(case.flow.origins_of(case.edges))


def _behind(case: Case, place: int) -> str:
    return f"NaN or inf from {case.flow.seen.spelled(place)} after its block, where the error was still finite"
