"""The gradient is zero, and training, the next batch or the next draw changes that: what the gate waits for."""

from __future__ import annotations

from lit_resinit.judge.cures import LET_BATCHES, move
from lit_resinit.judge.step import Case
from lit_resinit.judge.verdicts import Words

_BY_BATCH: dict[str, tuple[str, str]] = {  # why it sleeps, and what to do if it does not wake
    "underflow": (
        "the error is too small for half precision, which rounds it to zero: scale the loss (a GradScaler), "
        "or use bfloat16",
        "scale the loss (a GradScaler), or use bfloat16",
    ),
    "data": ("this batch sent it no error (masked, dropped or cut off)", LET_BATCHES),
    "balance": ("in this batch the terms of its error cancel", LET_BATCHES),
    "rounding": ("in this batch its error is multiplied by what rounding leaves of terms that cancel", LET_BATCHES),
    "number": (
        "the code multiplies its error by a number that is zero in this step",
        "if that is a schedule, let the number leave zero within `patience` steps, or raise `patience`; else drop it",
    ),
    "counter": (
        "a buffer that the forward itself writes is zero in this step",
        "let that buffer leave zero within `patience` steps, or raise `patience`",
    ),
}


def no_error(case: Case) -> Words | None:
    """Nothing was sent to it."""
    return None if case.reasons else Words("this batch sent it no error", remedy=LET_BATCHES)


def waits_for_a_mover(case: Case) -> Words | None:
    """A parameter on the way is zero, or lets nothing through where it stands, and training moves it."""
    for reason in case.reasons:
        mover = next((n for n in sorted(reason.parameters - {case.name}) if n in case.step.moving), None)
        if mover is not None:
            what = "is zero" if case.step.is_all_zero(mover) else "stands where it lets none through"
            how = "learns" if mover in case.flow.alive else "is to learn next"
            cause = f"no error arrives while {mover} {what}, and {mover} {how}"
            return Words(cause, waits_for=mover, by_chance=_is_dropped(case), remedy=move(mover))
    return None


def dropped(case: Case) -> Words | None:
    """A random draw was zero."""
    if not _is_dropped(case):
        return None
    return Words("a random draw dropped its branch", by_chance=True, remedy=LET_BATCHES)


def by_batch(case: Case) -> Words | None:
    """Another batch may send it something, or the next step."""
    kind = next((r.kind for r in case.reasons if r.kind in _BY_BATCH), "")
    if not kind:
        return None
    cause, remedy = _BY_BATCH[kind]
    first = min((r for r in case.reasons if r.kind == kind), key=lambda r: r.call)
    return Words(cause, remedy=remedy, source=case.flow.seen.source(first.place))


def _is_dropped(case: Case) -> bool:
    return any(r.kind == "chance" for r in case.reasons)


def waits_unseen(case: Case) -> Words | None:
    """From the gradients alone: another zero parameter of the plan learns."""
    step = case.step
    names = (j.name for j in step.judged if j.name in step.parameters and j.name != case.name)
    other = next((n for n in names if step.sizes.get(n) and step.is_all_zero(n)), None)
    if other is None:
        return None
    return Words(f"no error arrives while {other} is zero, and {other} learns", waits_for=other, remedy=move(other))
