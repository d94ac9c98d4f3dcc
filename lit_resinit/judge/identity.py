"""Is every branch closed? Measured in one forward, at the additions themselves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_resinit.errors import TrainedWeightsError
from lit_resinit.find.gates import holds
from lit_resinit.graph import ops
from lit_resinit.graph.eager import eager
from lit_resinit.graph.faults import Faults
from lit_resinit.graph.keep import keep_rng, keep_state, no_collection
from lit_resinit.graph.ops import Does
from lit_resinit.graph.record import Recorder
from lit_resinit.graph.tensors import measuring, whole
from lit_resinit.graph.values import Graph
from lit_resinit.graph.where import clean_name
from lit_resinit.judge.compare import AtAdditions, Comparison, Peaks, Reader
from lit_resinit.judge.identity_report import NOT_RUN, BranchIdentity, Cause, IdentityReport, StackIdentity
from lit_resinit.judge.silenced import may_be_silenced, silenced
from lit_resinit.judge.tap import Tap
from lit_resinit.plan.evidence import check_untrained
from lit_resinit.plan.make import as_arguments
from lit_resinit.plan.values import CONSTANT_SCHEMES, Branch, ResidualPlan, check_plan

# -------------------------------------------------------------------- measuring


class IdentityProbe:
    """Context manager around one forward that is recorded: additions compared, and the size of every value measured.

    So that the first non-finite operation can be named, and what an output depends on. Where only the additions matter
    a :class:`~lit_resinit.judge.tap.Tap` is enough.

    Args:
        model: The model, with the plan applied.
        plan: The plan.
        inputs: Anything with tensors in it that counts as data.
        readers: Who else measures at the additions.
        before_write: Called with every tensor that an operation is about to write.
        faults: What becomes of an exception of ours; it passes on when None.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ResidualPlan,
        inputs: Any = (),
        *,
        readers: Sequence[Reader] = (),
        before_write: Callable[[Tensor], None] | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.plan, self.comparison, self.peaks = plan, Comparison(plan), Peaks()
        self.additions = AtAdditions(plan, (self.comparison, *readers))
        heard: dict[str, Any] = {"listeners": [self.additions, self.peaks], "before_write": before_write}
        self.recorder = Recorder(model, inputs, strange_is_data=True, faults=faults, **heard)
        self.parameters = _parameters(model)

    @property
    def graph(self) -> Graph:
        """What was recorded."""
        return self.recorder.graph

    def __enter__(self) -> IdentityProbe:
        self.recorder.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.recorder.__exit__(*exc)

    def identity(self) -> IdentityReport:
        """The verdicts, in one transfer from the device."""
        self.parameters |= _gathered(self.plan, self.parameters)
        found = [n for n in self.graph.nodes if n.op == "norm" or ops.does(n.op, Does.REDUCES)]
        rescaling = {n.op for n in found} | {self.graph.owner(n.index) for n in found}
        return _report(self.plan, self.parameters, self.comparison, rescaling, self._first_nonfinite)

    def _first_nonfinite(self) -> str | None:
        """Module of the first operation that turned finite values into something else."""
        peaks = self.peaks.numbers()
        broken = (c for c in self.graph.calls if any(not math.isfinite(peaks.get(n, 0.0)) for n in c.outputs[:1]))
        return next((call.owner.split(".parametrizations")[0] for call in broken), None)


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}


# -------------------------------------------------------------------- verdicts


def _report(
    plan: ResidualPlan,
    parameters: dict[str, Tensor],
    comparison: Comparison,
    rescaling: Collection[str],
    origin: Callable[[], str | None],
) -> IdentityReport:
    """The verdicts on what was compared.

    Args:
        plan: The plan.
        parameters: By name, those that the verdicts need as a whole.
        comparison: Skips and sums.
        rescaling: Operations that divide by a size of their input, and modules that do.
        origin: Finds the module that made values non-finite.
    """
    values = _Values(parameters)
    with measuring():
        measured, stacks = comparison.numbers()
        first = origin() if any(not math.isfinite(d) for d in measured.values()) else None
        rows = tuple(_verdict(b, measured.get(b.name), first, values) for b in plan.active)
    trained = _trained(plan, parameters, {r.name for r in rows if r.cause})
    return IdentityReport(rows, _stacks(plan, comparison, stacks, rescaling), plan.scheme in CONSTANT_SCHEMES, trained)


def _gathered(plan: ResidualPlan, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters that the verdicts need, sharded ones as a whole; every rank has to come here."""
    wanted = {n for b in plan.active for g in b.gates for n in (g.parameter, *g.biases)}
    names = wanted.union(*(b.factor for b in plan.active)) & parameters.keys()
    return {n: whole(parameters[n]) for n in sorted(names)}


def _trained(plan: ResidualPlan, parameters: dict[str, Tensor], opened: set[str]) -> str:
    """A parameter that looks trained, of the open branches of a network that is only observed."""
    if plan.scheme != "observe":
        return ""
    try:
        check_untrained([b for b in plan.active if b.name in opened], parameters)
    except TrainedWeightsError as error:
        return next(iter(error.report)) if isinstance(error.report, dict) else ""
    return ""


def _stacks(
    plan: ResidualPlan, comparison: Comparison, values: dict[str, tuple[float, ...]], rescaling: Collection[str]
) -> tuple[StackIdentity, ...]:
    members: dict[str, list[Branch]] = {}
    for b in plan.active:
        members.setdefault(comparison.stack_of[b.name], []).append(b)
    found = []
    for stack, inside in members.items():
        first, last = comparison.first[stack], comparison.last[stack]
        after_last = plan.after_last.get(last, ())
        gap, before, after = values.get(stack, (math.nan,) * 3)
        changed = tuple(dict.fromkeys([x for b in inside[1:] for x in b.between] + list(after_last)))
        rescaled = tuple(n for n in changed if n in rescaling)
        growth = after / before if before else math.nan
        found.append(StackIdentity(first, last, gap == 0.0 and not after_last, gap, changed, growth, rescaled))
    return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True)
class _Values:
    """The parameters, asked for their values."""

    parameters: dict[str, Tensor]

    def holds(self, name: str, value: float, index: int | None = None) -> bool:
        parameter = self.parameters.get(name)
        return parameter is not None and holds(parameter if index is None else parameter[index], value)


def _verdict(branch: Branch, measured: float | None, origin: str | None, values: _Values) -> BranchIdentity:
    def row(status: Literal["closed", "open"], source: str = branch.source, **more: Any) -> BranchIdentity:
        return BranchIdentity(branch.name, status, deviation=measured or 0.0, source=source, **more)

    cause, culprit = _blame(branch, values)
    if measured is None:
        if cause is None and branch.gates:
            return row("closed", note=NOT_RUN)
        return row("open", cause=cause or "ungated branch", culprit=culprit or branch.name, note=NOT_RUN)
    changed = _changed_stream(branch, values)
    if changed is not None:
        return row("open", cause="stream changed", culprit=changed)
    if branch.overwritten_by:
        writer = branch.overwritten_in or "(root)"
        return row("open", source=branch.overwritten_at, cause="stream changed", culprit=writer)
    if not math.isfinite(measured):
        return row("open", cause="nonfinite branch", culprit=origin if origin is not None else branch.name)
    if measured == 0.0:
        rounded = cause == "unzeroed scale"
        note = f"{culprit} is not zero, but rounds to closed in this dtype" if rounded else ""
        return row("closed", note=note)
    return row("open", cause=cause or "ungated branch", culprit=culprit or branch.culprit or branch.name)


def _blame(branch: Branch, values: _Values) -> tuple[Cause | None, str | None]:
    for gate in branch.gates:
        if not values.holds(gate.parameter, gate.value, gate.index):
            if gate.kind == "layer" and any(not values.holds(b, 0.0) for b in gate.biases):
                return "ungated branch", branch.name
            return "unzeroed scale", gate.parameter
    for gate in branch.gates:
        for bias in gate.biases:
            if not values.holds(bias, 0.0):
                return "bias after scale", bias
    return None, None


def _changed_stream(branch: Branch, values: _Values) -> str | None:
    """What scales the skip away from one, if anything does."""
    for name, unit in zip(branch.factor, branch.units, strict=True):
        if unit is None or name not in values.parameters:
            return branch.block or branch.name
        if not values.holds(name, unit):
            return name
    return None


# -------------------------------------------------------------------- one forward


def check_identity(
    model: nn.Module, plan: ResidualPlan, args: Any = (), kwargs: dict[str, Any] | None = None
) -> IdentityReport:
    """Run one forward and compare the output of every residual addition with its skip.

    A block ``y = x + f(x)`` is closed when ``y`` equals ``x`` in every bit; there is no tolerance.

    Args:
        model: The model, with the plan applied.
        plan: The plan.
        args: Inputs of one forward: a tuple, or one tensor.
        kwargs: Keyword inputs.

    Returns:
        One row for each branch, with cause and culprit where it is open, and one for each stream.

    Note:
        The forward runs in training mode without gradients; buffers, training flags, gradients and the random state are
        put back. Cost: about two plain forwards.

    Example:
        >>> from lit_resinit import apply_, make_plan
        >>> layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True), torch.randn(2, 3, 8)
        >>> plan = make_plan(layer, x)
        >>> check_identity(apply_(layer, plan), plan, x).ok
        True
    """
    check_plan(model, plan)
    arguments = as_arguments(args)
    with no_collection(), keep_rng(), keep_state(model, announced=True) as kept, torch.no_grad(), eager():
        model.train()
        comparison = Comparison(plan)
        tap = Tap(model, AtAdditions(plan, (comparison,)), before_write=kept.before_write, notes_rescaling=True)
        with keep_rng(), tap:
            output = model(*arguments, **(kwargs or {}))
        parameters = _parameters(model)
        found = _report(plan, parameters | _gathered(plan, parameters), comparison, tap.rescaling, lambda: None)
        broken = any(b.cause == "nonfinite branch" for b in found.branches)
        if not broken and not may_be_silenced(output):
            return found
        probe = IdentityProbe(model, plan, (arguments, kwargs), before_write=kept.before_write)
        with keep_rng(), probe:
            output = model(*arguments, **(kwargs or {}))
        names = silenced(probe.recorder, plan, probe.parameters, output)
        return dataclasses.replace(probe.identity() if broken else found, silenced=names)
