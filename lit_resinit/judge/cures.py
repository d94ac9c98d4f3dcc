"""What to do about a gradient that is zero or NaN, followed to the letter."""

from __future__ import annotations

from lit_resinit.judge.seen import Reason
from lit_resinit.judge.step import Case
from lit_resinit.words import together

LET_PASS = "let that hook pass the gradient on as it is, or remove it"
TRUE_GRADIENT = "return the true gradient there"
LET_BATCHES = "let some batch reach it within `patience` steps, or raise `patience` where such batches are rare"
DIVIDE = (
    "divide by something that is never zero, `v / torch.where(norm > 0, norm, 1.0)`, with no other `where` around it "
    "(a constant in place of the quotient has no slope); or "
)


def move(mover: str) -> str:
    """What a sleeper waits for has to move."""
    return f"see that an optimizer moves {mover} (in a parameter group, at a rate above zero), or raise `patience`"


def close_behind(case: Case) -> str:
    """The edit that closes a branch behind the operation that stops the error of its gate."""
    gate = case.judged.gate
    if any(g.parameter == gate and g.kind in ("scale", "inserted") for g in case.step.plan.gates):
        return f"multiply by {gate} behind that operation, as the last factor of what is added to the stream"
    return (
        f"start {gate} as any other layer, not at zero, and close the branch behind that operation: "
        "`self.gate = lit_resinit.ScalarGate()` in `__init__`, `x + self.gate(branch)` in `forward`"
    )


def cure(case: Case, reason: Reason) -> str:
    """What to do about a broken link."""
    others = sorted(reason.parameters - {case.name})
    frozen = [n for n in others if n in case.flow.seen.frozen]
    if reason.kind in ("hook", "written"):
        return LET_PASS if reason.kind == "hook" else TRUE_GRADIENT
    if frozen:
        return f"unfreeze {together(frozen)}, or give it other values than zero"
    if reason.fixed_by:
        return f"give {together(sorted(reason.fixed_by))} other values than zero, or make it a parameter"
    if reason.kind == "factor" and others and case.judged.gate not in reason.parameters:
        return f"initialise {together(others)} as any other layer, not at zero: one zero in a row is enough"
    if reason.kind == "unreached":
        return "let what the block returns take part in the loss, or exclude its branch"
    if case.end >= 0 and reason.call > case.end:
        return "let that operation pass an error on, for it is behind the block and stops what all of it learns"
    return close_behind(case)
