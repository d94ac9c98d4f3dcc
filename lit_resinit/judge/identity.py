"""Is every branch closed? Measured in one forward, at the additions themselves."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_iter

from lit_resinit.errors import IdentityError
from lit_resinit.find.gates import Gate, holds
from lit_resinit.graph import ops
from lit_resinit.graph.eager import eager
from lit_resinit.graph.keep import keep_rng, keep_state, no_collection
from lit_resinit.graph.record import Recorder
from lit_resinit.graph.tensors import as_wide, local, mean_and_variance, measuring, peak_of, to_host, whole
from lit_resinit.graph.values import Call
from lit_resinit.graph.where import Address, clean_name
from lit_resinit.plan.make import as_arguments
from lit_resinit.plan.values import CONSTANT_SCHEMES, Branch, ResidualPlan, check_plan
from lit_resinit.words import together, without_numbers

Cause = Literal["unzeroed scale", "bias after scale", "ungated branch", "nonfinite branch", "stream changed"]
NOT_RUN = "this forward did not run the branch; judged by its parameters"
GROWTH = (0.5, math.e)  # Var(out)/Var(in) of a stream under a constant scale: (1 + 1/L)^L stays below e


@dataclasses.dataclass(frozen=True, slots=True)
class BranchIdentity:
    """The verdict on one branch: ``closed`` when the sum equals the skip exactly, else ``open`` with the cause.

    ``culprit`` is the parameter to blame, or else the module; ``deviation`` is the largest ``|out - skip|``, in units
    of the activations.
    """

    name: str
    status: Literal["closed", "open"]
    cause: Cause | None = None
    culprit: str | None = None
    deviation: float = 0.0
    note: str = ""
    source: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class StackIdentity:
    """A chain of branches on one stream: the tensor entering the first against the tensor leaving the last.

    ``exact`` is whether they are equal; ``changed_by`` names what the stream passes between the additions (a ReLU, a
    norm after the sum, a projection), ``rescaled_by`` those among them that divide the stream by its own size;
    ``growth`` is Var(out)/Var(in), dimensionless.
    """

    first: str
    last: str
    exact: bool
    deviation: float
    changed_by: tuple[str, ...]
    growth: float
    rescaled_by: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class IdentityReport:
    """One verdict for each branch of a plan that was not excluded, and one for each stream."""

    branches: tuple[BranchIdentity, ...]
    stacks: tuple[StackIdentity, ...]
    constant: bool = False

    @property
    def ok(self) -> bool:
        """Whether every branch is closed; with a constant scale, whether every stream keeps its variance."""
        if self.constant:
            return all(GROWTH[0] <= s.growth <= GROWTH[1] for s in self.stacks)
        return all(b.status == "closed" for b in self.branches)

    def __str__(self) -> str:
        return describe(self)

    def raise_if_open(self) -> None:
        """Raise when :attr:`ok` is false.

        Raises:
            IdentityError: Naming block, cause and culprit of the first, and how many more there are.
        """
        if not self.ok:
            raise IdentityError(describe(self), self)


# -------------------------------------------------------------------- measuring


class IdentityProbe(Recorder):
    """A recorder that compares every planned addition with its skip while the forward runs.

    Nothing is read from the device before :meth:`identity`. With ``values`` every operation is recorded and the size of
    every value measured, so that the first non-finite operation can be named.
    """

    def __init__(self, model: nn.Module, plan: ResidualPlan, inputs: Any = (), *, values: bool = True) -> None:
        self._measures_values = values
        self._peaks: list[Tensor] = []
        self._peak_of: dict[int, int] = {}
        super().__init__(model, inputs)
        self.plan = plan
        self._model_parameters: dict[str, Tensor] = {
            clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)
        }
        self._planned = {b.address: b for b in plan.active}
        self._looked_at = {b.address.op for b in plan.active} | ops.NORMS | ops.REDUCTIONS
        self._counts: dict[tuple[str, str, str], int] = {}
        self.addition_calls: dict[str, int] = {}
        self._compared: dict[str, Tensor] = {}
        self._stack_of, self._first, self._last = _stacks(plan)
        self._entering: dict[str, tuple[Tensor, Tensor]] = {}
        self._stack_values: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Without values, only what the verdicts need is recorded: additions, and what rescales a stream."""
        if self._measures_values or ops.base_name(func) in self._looked_at:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))

    def _execute(self, call: Call, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        branch = self._branch_at(call)
        if branch is None:
            return func(*args, **kwargs)
        tensors = [a for a in tree_iter((args, kwargs)) if isinstance(a, Tensor)]
        skip = local(tensors[branch.skip_input])
        if ops.written_arguments(func):
            with measuring():
                skip = skip.detach().clone()
        out = func(*args, **kwargs)
        with measuring():
            self._compare(branch, skip.detach(), local(out).detach())
        self.addition_calls[branch.name] = len(self.graph.calls)
        return out

    def _branch_at(self, call: Call) -> Branch | None:
        key = (call.owner, call.line, ops.base_name(call.func))
        count = self._counts[key] = self._counts.get(key, -1) + 1
        return self._planned.get(Address(*key, count))

    def _finish(self, call: Call, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        super()._finish(call, func, args, kwargs, out)
        if not self._measures_values:
            return
        tensors = [t for t in tree_iter(out) if isinstance(t, Tensor)]
        for tensor, node in zip(tensors, call.outputs, strict=False):
            if self.graph.nodes[node].op == "view":
                self._share_peak(node, call.inputs[0])
            else:
                self._note_peak(node, tensor)

    def _note_peak(self, node: int, tensor: Tensor) -> None:
        peak = peak_of(tensor)
        if peak is not None:
            self._peak_of[node] = len(self._peaks)
            self._peaks.append(peak)

    def _share_peak(self, view: int, base: int) -> None:
        if base in self._peak_of:
            self._peak_of[view] = self._peak_of[base]

    def _compare(self, branch: Branch, skip: Tensor, out: Tensor) -> None:
        self._compared[branch.name] = _gap(out, skip)  # zero exactly when they are equal
        stack = self._stack_of[branch.name]
        if self._first[stack] == branch.name:
            kept = skip if self._last[stack] == branch.name else skip.clone()
            self._entering[stack] = kept, mean_and_variance(skip)[1]
        if self._last[stack] == branch.name and stack in self._entering:
            start, variance = self._entering.pop(stack)
            same = start.shape == out.shape
            gap = _gap(out, start) if same else torch.full((), math.nan, device=out.device)
            self._stack_values[stack] = gap, variance, mean_and_variance(out)[1]

    # ---------------------------------------------------------------- reports

    def peaks(self) -> dict[int, float]:
        """Largest absolute value of every node that was computed; NaN where a value is not finite."""
        values = to_host(self._peaks)
        return {node: values[position] for node, position in self._peak_of.items()}

    def identity(self) -> IdentityReport:
        """The verdicts, in one transfer from the device."""
        self._gather_parameters()
        with measuring():
            return self._report()

    def _gather_parameters(self) -> None:
        """Sharded parameters that the verdicts need, as a whole; every rank has to come here."""
        wanted = {n for b in self.plan.active for g in b.gates for n in (g.parameter, *g.biases)}
        for name in wanted.union(*(b.factor for b in self.plan.active)):
            if name in self._model_parameters:
                self._model_parameters[name] = whole(self._model_parameters[name])

    def _report(self) -> IdentityReport:
        names = list(self._compared)
        stacks = list(self._stack_values)
        flat = [self._compared[n] for n in names] + [v for s in stacks for v in self._stack_values[s]]
        numbers = to_host(flat)
        measured = dict(zip(names, numbers, strict=False))
        rest = numbers[len(names) :]
        values = {s: tuple(rest[3 * i : 3 * i + 3]) for i, s in enumerate(stacks)}
        broken = any(not math.isfinite(d) for d in measured.values())
        origin = self._first_nonfinite() if broken else None
        rows = tuple(self._verdict(b, measured.get(b.name), origin) for b in self.plan.active)
        members: dict[str, list[Branch]] = {}
        for b in self.plan.active:
            members.setdefault(self._stack_of[b.name], []).append(b)
        return IdentityReport(
            rows,
            tuple(self._stack(s, m, values.get(s)) for s, m in members.items()),
            self.plan.scheme in CONSTANT_SCHEMES,
        )

    def _first_nonfinite(self) -> tuple[int, str] | None:
        """(call, module) of the first operation that turned finite values into something else."""
        peaks = self.peaks()
        for index, call in enumerate(self.graph.calls):
            if any(not math.isfinite(peaks.get(n, 0.0)) for n in call.outputs[:1]):
                return index, call.owner.split(".parametrizations")[0]
        return None

    def _verdict(self, branch: Branch, measured: float | None, origin: tuple[int, str] | None) -> BranchIdentity:
        def row(status: Literal["closed", "open"], **more: Any) -> BranchIdentity:
            return BranchIdentity(branch.name, status, deviation=measured or 0.0, source=branch.source, **more)

        cause, culprit = self._blame(branch)
        if measured is None:
            if cause is None and branch.gates:
                return row("closed", note=NOT_RUN)
            return row("open", cause=cause or "ungated branch", culprit=culprit or branch.name, note=NOT_RUN)
        changed = self._changed_stream(branch)
        if changed is not None:
            return row("open", cause="stream changed", culprit=changed)
        if not math.isfinite(measured):
            return row("open", cause="nonfinite branch", culprit=origin[1] if origin else branch.name)
        if measured == 0.0:
            rounded = cause == "unzeroed scale"
            note = f"{culprit} is not zero, but rounds to closed in this dtype" if rounded else ""
            return row("closed", note=note)
        return row("open", cause=cause or "ungated branch", culprit=culprit or branch.culprit or branch.name)

    def _blame(self, branch: Branch) -> tuple[Cause | None, str | None]:
        for gate in branch.gates:
            if not self._is_closed(gate):
                if gate.kind == "layer" and any(not self._holds(b, 0.0) for b in gate.biases):
                    return "ungated branch", branch.name
                return "unzeroed scale", gate.parameter
        for gate in branch.gates:
            for bias in gate.biases:
                if not self._holds(bias, 0.0):
                    return "bias after scale", bias
        return None, None

    def _is_closed(self, gate: Gate) -> bool:
        return self._holds(gate.parameter, gate.value, gate.index)

    def _holds(self, name: str, value: float, index: int | None = None) -> bool:
        parameter = self._model_parameters.get(name)
        return parameter is not None and holds(parameter if index is None else parameter[index], value)

    def _changed_stream(self, branch: Branch) -> str | None:
        """What scales the skip away from one, if anything does."""
        for name in branch.factor:
            if name not in self._model_parameters:
                return branch.block or branch.name
            if not self._holds(name, 1.0):
                return name
        return None

    def _stack(self, stack: str, members: list[Branch], values: tuple[float, ...] | None) -> StackIdentity:
        last = self._last[stack]
        between = [x for b in members[1:] for x in b.between] + list(self.plan.after_last.get(last, ()))
        gap, before, after = values if values is not None else (math.nan, math.nan, math.nan)
        exact = gap == 0.0 and not self.plan.after_last.get(last)
        growth = after / before if before else math.nan
        changed = tuple(dict.fromkeys(between))
        rescaled = tuple(n for n in changed if n in self._rescaling)
        return StackIdentity(self._first[stack], last, exact, gap, changed, growth, rescaled)

    @functools.cached_property
    def _rescaling(self) -> set[str]:
        """Modules and operations that divide by a size of their input: norms, also those written out."""
        found = [n for n in self.graph.nodes if n.op == "norm" or n.op in ops.REDUCTIONS]
        return {n.op for n in found} | {self.graph.owner(n.index) for n in found}


def _stacks(plan: ResidualPlan) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """For every branch the name of its stream (that of its first branch), and for each stream its first and last."""
    stack_of: dict[str, str] = {}
    first: dict[str, str] = {}
    last: dict[str, str] = {}
    for branch in plan.active:
        stack = stack_of.get(branch.previous or "", branch.name)
        stack_of[branch.name] = stack
        first.setdefault(stack, branch.name)
        last[stack] = branch.name
    return stack_of, first, last


def _gap(out: Tensor, start: Tensor) -> Tensor:
    """Largest absolute difference, exactly zero only where two tensors are equal."""
    if out.numel() == 0:
        return torch.zeros((), device=out.device)
    lowest, highest = torch.aminmax(as_wide(out) - as_wide(start))
    return torch.maximum(-lowest, highest)


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
    with no_collection(), keep_rng(), keep_state(model), torch.no_grad(), eager():
        model.train()
        report = _run_probe(model, plan, arguments, kwargs or {}, values=False)
        if any(b.cause == "nonfinite branch" for b in report.branches):
            report = _run_probe(model, plan, arguments, kwargs or {}, values=True)
        return report


def _run_probe(
    model: nn.Module, plan: ResidualPlan, args: tuple[Any, ...], kwargs: dict[str, Any], *, values: bool
) -> IdentityReport:
    probe = IdentityProbe(model, plan, (args, kwargs), values=values)
    with keep_rng(), probe:
        model(*args, **kwargs)
    return probe.identity()


# -------------------------------------------------------------------- words

_NEXT = {
    "unzeroed scale": "set it to its closing value after the last initialisation, or let scheme='auto' do so",
    "bias after scale": "zero that bias with the scale; scheme='auto' closes both",
    "ungated branch": "give the branch a gate: scheme='insert', or a `ScalarGate` at its end",
    "nonfinite branch": "zero times infinity is no zero: bound that operation, or close before it",
    "stream changed": "leave the skip alone (a factor of one) and scale the branch instead",
}


def describe(report: IdentityReport) -> str:
    """The report as a message: the first of each kind by name, the others counted."""
    if report.constant:
        return _describe_growth(report)
    open_ = [b for b in report.branches if b.status == "open"]
    if not open_:
        unseen = sum(b.note == NOT_RUN for b in report.branches)
        more = f"; {unseen} of them did not run in this forward and were judged by their parameters" if unseen else ""
        return f"checked {len(report.branches)} branches: each contributes exactly nothing{more}."
    groups: dict[tuple[str, str], list[BranchIdentity]] = {}
    for b in open_:
        key = (
            (b.cause or "", b.culprit or "")
            if b.cause == "nonfinite branch"
            else (b.cause or "", without_numbers(b.culprit or ""))
        )
        groups.setdefault(key, []).append(b)
    lines = [
        f"compared {len(report.branches)} residual additions with their skip; expected each branch to "
        f"contribute exactly nothing, found {len(open_)} of {len(report.branches)} open:"
    ]
    for (cause, _), rows in groups.items():
        first = next((r for r in rows if (r.culprit or "").startswith(r.name)), rows[0])
        total = sum(without_numbers(b.name) == without_numbers(first.name) for b in report.branches)
        names = first.name if len(rows) == 1 else f"{together([r.name for r in rows])} ({len(rows)} of {total} such)"
        if cause == "nonfinite branch":
            names = first.name if len(rows) == 1 else f"{first.name} and what comes after it ({len(rows)} in all)"
        where = f", at {first.source}" if first.source else ""
        size = f", deviation {first.deviation:.3g}"
        lines.append(f"- {names}: {cause}, culprit {first.culprit}{size}{where}. Next: {_NEXT[cause]}.")
    lines.append("To watch an open network as it is, pass identity='ignore' or exclude those branches.")
    return "\n".join(lines)


def _describe_growth(report: IdentityReport) -> str:
    lines = [f"Var(out)/Var(in) of each stream; expected between {GROWTH[0]} and {GROWTH[1]:.3g}:"]
    lines += [f"- {s.first} to {s.last}: {s.growth:.3g}" for s in report.stacks]
    return "\n".join(lines)
