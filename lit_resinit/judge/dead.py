"""The gradient is zero for good: which link of the chain rule is broken, and by what."""

from __future__ import annotations

from lit_resinit.graph import ops
from lit_resinit.judge.cures import LET_PASS, cure
from lit_resinit.judge.seen import Reason
from lit_resinit.judge.step import Case
from lit_resinit.judge.verdicts import Words
from lit_resinit.words import together


def hook_to_zero(case: Case) -> Words | None:
    """A hook of the user's on the parameter itself took the gradient away."""
    hooked = case.flow.seen.hooked.get(case.name)
    if hooked is None or case.size != 0.0 or hooked.sent == 0.0:
        return None
    why = f"a hook on it turns its gradient ({hooked.sent:.3g}) into zero"
    return Words(why, source=hooked.source, remedy=LET_PASS)


def unexplained(case: Case) -> Words:
    """From the gradients alone, nothing that learns is in the way."""
    return Words("its gradient is exactly zero, and no zero parameter that learns explains it")


def broken_link(case: Case) -> Words:
    """One operation stops the error, and nothing in training, data, draws or counters changes that."""
    reason = min(case.reasons, key=lambda r: r.call)
    cause = f"{_where(case, reason)}: {_what(case, reason)}{_because(case, reason)}"
    return Words(cause, source=case.flow.seen.source(reason.place), remedy=cure(case, reason))


def _where(case: Case, reason: Reason) -> str:
    """The link, seen from the gate: at its input, between it and the end of the branch, or behind the block."""
    layer = case.judged.role == "layer"
    if reason.call == case.reader and reason.kind == "factor":
        return f"the input of {'it' if layer else 'the gate'} is zero"
    if case.end >= 0 and reason.call > case.end:
        return "no error arrives at the block"
    if layer:
        return "an operation behind it turns the error into zero"
    return "an operation between the gate and the end of the branch turns the error into zero"


def _what(case: Case, reason: Reason) -> str:
    """What the operation does to the error."""
    call = case.flow.graph.calls[reason.call]
    op = ops.base_name(call.func)
    if reason.kind == "written":
        line = next(line for (call, _), line in case.flow.seen.written.items() if call == reason.call)
        return f"{case.flow.seen.spelled(reason.call)} returns a zero that no error went into (made at {line})"
    flat = ops.has_no_slope(call.func, call.args, call.kwargs)
    point = "zero" if case.flow.links.explained.reads_zero(reason.call) else "its input"
    return {
        "factor": f"`{op}` multiplies by zero",
        "slope": f"`{op}` has slope zero {'everywhere' if flat else f'at {point}'}",
        "cancel": f"the terms of `{op}` cancel, so the true gradient is zero and this one is rounding noise",
        "unreached": "the loss does not use it",
        "hook": f"a hook on the output of `{op}` replaces it",
    }.get(reason.kind, f"`{op}` sends nothing back")


def _because(case: Case, reason: Reason) -> str:
    """What makes it do so: buffers, frozen parameters, the gate itself, or other zeros."""
    others = sorted(reason.parameters - {case.name})
    frozen = [n for n in others if n in case.flow.seen.frozen]
    if reason.fixed_by:
        return f", because {together(sorted(reason.fixed_by))} is a buffer of zeros"
    if frozen:
        return f", because {together(frozen)} is zero and frozen"
    if case.judged.gate in reason.parameters and reason.kind == "factor":
        return f", a value computed from the zero output of {case.judged.gate} itself"
    if others and not (reason.kind == "slope" and case.name in reason.parameters):  # else they are summands
        zero = "zero too and " if all(map(case.step.is_all_zero, others)) else ""
        return f", because of {together(others)}, {zero}without a gradient"
    return ""
