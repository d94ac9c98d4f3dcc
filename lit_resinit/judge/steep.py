"""How steep a branch is at its closed gate: gradients that explode, and starts that are slow."""

from __future__ import annotations

import dataclasses
import math
import statistics

import torch

from lit_resinit.graph import ops
from lit_resinit.judge.step import Case, Judged, Step
from lit_resinit.judge.verdicts import GateGradient, Words

EXPLODING = 1e6  # times the median over gates
STEEP = 1e5  # slope above which the first step of any usual size throws the gate far away
SLOW = 1e-3  # slope below which a start is slow
_SMALLEST = float(torch.finfo(torch.float32).tiny)  # below it a gradient has lost its digits and says nothing of size


def with_slope(case: Case, cause: str) -> Words:
    """Words on a gate that learns, with its slope: the error at its output over that at the branch's end."""
    if case.step.flow is None or case.judged.branch not in case.flow.seen.additions:
        return Words(cause)
    at_gate = case.flow.arriving.get(case.reader if case.reader is not None else -1)
    at_end = case.flow.arriving.get(case.end)
    if not at_gate or not at_end or not math.isfinite(at_gate / at_end):
        return Words(cause)
    slope = at_gate / at_end
    steps = _steps(case) if slope < SLOW else []
    if not steps:
        return Words(cause, slope=slope)
    call = case.flow.graph.calls[min(steps)[1]]
    return Words(cause, slope=slope, attenuated_by=f"`{ops.base_name(call.func)}` at {call.source}")


def mark_exploding(step: Step, verdicts: dict[str, GateGradient]) -> None:
    """Gates whose gradient is far above that of the others, or whose branch is far too steep."""
    judged = {n: v for n, v in verdicts.items() if v.status == "alive" and v.role != "bias"}
    sizes = [v.size for v in judged.values() if v.size >= _SMALLEST]
    limit = EXPLODING * statistics.median_high(sizes) if len(sizes) > 1 else math.inf
    gains = {n: g for n, v in judged.items() if (g := _gain(step, v)) >= _SMALLEST}
    most = EXPLODING * statistics.median_high(gains.values()) if len(gains) > 1 else math.inf
    for name, v in judged.items():
        large = v.size > limit and (name not in gains or len(gains) < 2 or gains[name] > most)
        if large or v.slope > STEEP:
            why, source = _steepest(step, v)
            size = f"{v.size * EXPLODING / limit:.1e} times the median over gates" if large else f"{v.size:.1e}"
            cause = f"its gradient explodes ({size}): {why}"
            verdicts[name] = dataclasses.replace(v, status="exploding", cause=cause, source=source)


def _gain(step: Step, v: GateGradient) -> float:
    """The gradient over the error at the branch's end, which is small for as long as what lies behind sleeps."""
    error = step.flow.arriving.get(step.flow.seen.additions.get(v.branch, -1)) if step.flow is not None else None
    return v.size / error if error and math.isfinite(error) else math.nan


def _steepest(step: Step, v: GateGradient) -> tuple[str, str]:
    """What makes a gradient large: an operation on the way of the error, else what the gate multiplies."""
    case = Case(step, Judged(v.parameter, v.branch, v.role, v.parameter))
    gain, place = max(_steps(case), default=(0.0, -1))
    if gain <= 1.0 / SLOW:
        return "the gate multiplies large values, or the error that arrives is large", ""
    call = case.flow.graph.calls[place]
    op = ops.base_name(call.func)
    return f"`{op}` makes the error {gain:.1e} times larger, as a normalisation of a zero vector does", call.source


def _steps(case: Case) -> list[tuple[float, int]]:
    """(error out / error in, operation) for every operation between a gate and the end of its branch."""
    if case.step.flow is None or case.judged.branch not in case.flow.seen.additions or case.reader is None:
        return []
    return case.flow.steps_between(case.reader, case.end)
