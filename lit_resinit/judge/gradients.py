"""Is every gate alive, asleep or dead? The rules in their order; their words stand in the files of the statuses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

from torch import nn

from lit_resinit.graph.tensors import is_sharded
from lit_resinit.judge import asleep, dead, missing, nonfinite, steep
from lit_resinit.judge.flow import Flow
from lit_resinit.judge.shut import shut_branches
from lit_resinit.judge.step import Case, Judged, Rules, Step
from lit_resinit.judge.verdicts import GateGradient, GradientReport, Words, harmless
from lit_resinit.plan.values import ResidualPlan, check_plan


def learns(case: Case) -> Words:
    """Its gradient is finite, and no rounding noise."""
    grad = case.parameter.grad if case.parameter is not None else None
    if grad is None or grad.numel() < 2 or grad.is_sparse or is_sharded(grad):
        return steep.with_slope(case, "")
    silent = int((grad == 0).sum())
    return steep.with_slope(case, f"{silent} of {grad.numel()} elements have no gradient" if silent else "")


# Which rules are asked, by what came back: tried in order, the first that has words gives the verdict. Each kind of
# gradient has a last rule that always has some. The second table is for steps of which only the gradients are known.
SEEN: dict[str, Rules] = {
    "no gradient": (
        ("missing", missing.no_such_parameter),
        ("alive", missing.frozen_and_open),
        ("asleep", missing.rests),
        ("alive", missing.opened_by_another),
        ("missing", missing.frozen),
        ("asleep", missing.not_run),
        ("missing", missing.cut_off),
    ),
    "zero": (
        ("dead", dead.hook_to_zero),
        ("asleep", asleep.no_error),
        ("asleep", asleep.waits_for_a_mover),
        ("asleep", asleep.dropped),
        ("asleep", asleep.by_batch),
        ("dead", dead.broken_link),
    ),
    "nonfinite": (
        ("nonfinite", nonfinite.hook_to_nan),
        ("nonfinite", nonfinite.from_the_loss),
        ("nonfinite", nonfinite.from_the_forward),
        ("nonfinite", nonfinite.from_a_hook),
        ("nonfinite", nonfinite.from_behind),
        ("nonfinite", nonfinite.from_an_operation),
    ),
    "a gradient": (("alive", learns),),
}
UNSEEN: dict[str, Rules] = {
    "no gradient": (
        *SEEN["no gradient"][:-2],
        ("asleep", missing.may_be_used_up),
        ("missing", missing.cut_off_unseen),
    ),
    "zero": (("asleep", asleep.waits_unseen), ("dead", dead.unexplained)),
    "nonfinite": (("nonfinite", nonfinite.unseen),),
    "a gradient": (("alive", learns),),
}


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
        >>> import torch
        >>> from lit_resinit import apply_, make_plan
        >>> layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8)
        >>> plan = make_plan(layer, x)
        >>> apply_(layer, plan)(x).square().sum().backward()
        >>> {g.status for g in check_gradients(layer, plan).gates.values()}
        {'alive'}
    """
    check_plan(model, plan)
    return judge_step(model, plan, flow)


def judge_step(
    model: nn.Module, plan: ResidualPlan, flow: Flow | None = None, known: Sequence[Judged] = ()
) -> GradientReport:
    """The verdicts of one step: on what the plan has, and on what earlier steps have found besides."""
    step = Step.of(model, plan, flow, known)
    verdicts = {j.name: verdict(Case(step, j)) for j in step.judged}
    steep.mark_exploding(step, verdicts)
    nonfinite.mark_origin(step, verdicts)
    for judged in step.judged:
        own, gate = verdicts[judged.name], verdicts[judged.gate]
        if judged.role == "bias" and gate.status == "alive" and own.status == "dead":
            verdicts[judged.name] = harmless(own, judged.gate)
    if all(v.status != "nonfinite" for v in verdicts.values()):
        verdicts |= {case.name: verdict(case) for case in nonfinite.poisoned_layers(step)}
    if flow is not None:
        verdicts |= {v.parameter: v for v in shut_branches(plan, flow, step.resting)}
    return GradientReport(verdicts)


def judge_layers(model: nn.Module, plan: ResidualPlan, flow: Flow, names: Collection[str]) -> list[GateGradient]:
    """Verdicts on other parameters without a gradient, except where the terms of it cancel, as a rule of calculus."""
    step = Step.of(model, plan, flow)
    cases = [Case(step, Judged(name, "", "layer", name)) for name in sorted(names)]
    return [verdict(case) for case in cases if all(r.kind != "cancel" for r in case.reasons)]


def verdict(case: Case) -> GateGradient:
    """The verdict on one parameter: the words of the first rule that has some."""
    judged, size = case.judged, math.nan if case.size is None else case.size
    rules = UNSEEN if case.step.flow is None else SEEN
    for status, rule in rules[_what_came(case)]:
        words = rule(case)
        if words is not None:
            found = GateGradient(judged.name, status, size=size, branch=judged.branch, role=judged.role, **words.fields)
            return dataclasses.replace(found, may_round=case.may_round) if status == "asleep" else found
    raise AssertionError(f"no rule on the gradient of {judged.name}")  # the last one always has words


def _what_came(case: Case) -> str:
    """The kind of gradient that came back."""
    if case.parameter is None or case.size is None:
        return "no gradient"
    if not math.isfinite(case.size):
        return "nonfinite"
    return "zero" if case.step.has_no_gradient(case.name) else "a gradient"
