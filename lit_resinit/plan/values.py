"""A plan as a plain value: the decision per branch, seen from a parent module, as plain types, and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from torch import nn

from lit_resinit.find.gates import Gate
from lit_resinit.graph.where import Address
from lit_resinit.words import Shown, in_columns, in_common, together, without_numbers

Scheme = Literal["auto", "zero", "insert", "last_layer", "sqrt_depth", "downscale", "observe"]
Action = Literal["zero", "insert", "last_layer", "sqrt_depth", "downscale", "already_closed", "excluded", "observe"]
CONSTANT_SCHEMES = ("sqrt_depth", "downscale")
CLOSED = ("zero", "insert", "last_layer", "already_closed")  # actions after which a branch contributes nothing


@dataclasses.dataclass(frozen=True, slots=True)
class Branch:
    """One residual branch: ``skip + branch``, and what is done with it.

    Args:
        name: Unique, stable name: the block, or the sub-module that computes the branch.
        block: Dotted name of the module that runs the addition.
        skip: ``identity`` or ``projection``.
        gates: One gate for each summand of the branch.
        action: What :func:`apply_` does with it.
        source: ``file.py:line`` of the addition.
        address: Where the addition runs, the same in every forward.
        skip_input: Which tensor argument of the addition is the skip.
        branch_input: Which tensor argument is the branch; None where the operation fuses it.
        stacked: The dimension, where the operation sums up what was stacked along it; both inputs count along it then.
        previous: Name of the branch before it on the same residual stream.
        between: What the stream passes between the previous branch and this one (module names, else operations).
        factor: What multiplies the skip (parameter names, else the operation), empty when nothing does.
        units: For each of these the value at which the skip is multiplied by one; None for an operation.
        norms: Affine parameters of the block's norms, the evidence of training.
        length: Number of branches on its stream.
        graded: Whether it ran with gradients, in the trace; a teacher or a target runs without.
        reason: Why the branch has no gate, with the line, when it has none.
        culprit: Module that runs the operation behind ``reason``.
        overwritten_by: Operation of the block that writes over the stream before the skip is read; empty where none.
        overwritten_in: The module that runs it.
        overwritten_at: ``file.py:line`` of it.
    """

    __module__ = "lit_resinit"

    name: str
    block: str
    skip: Literal["identity", "projection"]
    gates: tuple[Gate, ...]
    action: Action
    source: str
    address: Address
    skip_input: int
    branch_input: int | None
    previous: str | None = None
    between: tuple[str, ...] = ()
    factor: tuple[str, ...] = ()
    units: tuple[float | None, ...] = ()
    norms: tuple[str, ...] = ()
    length: int = 1
    graded: bool = True
    reason: str = ""
    culprit: str = ""
    stacked: int | None = None
    overwritten_by: str = ""
    overwritten_in: str = ""
    overwritten_at: str = ""

    def __repr__(self) -> str:
        gates = f", gate {_gates_of(self)}" if self.gates else ""
        return f"<Branch {self.name}: {self.skip} skip, {self.action}{gates}>"


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """A chain of branches, each of which goes on with the sum of the one before.

    Args:
        branches: Names of its branches, in the order of execution.
        between: For each what the stream passes before it (module names, else operations).
        after: What its block still does to the last sum.
        parts_from: The branch after which it parted from another stream; None where it starts on its own.
    """

    __module__ = "lit_resinit"

    branches: tuple[str, ...]
    between: tuple[tuple[str, ...], ...]
    after: tuple[str, ...] = ()
    parts_from: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ResidualPlan(Shown):
    """What would be done to a model; a plain value, nothing is written until :func:`apply_`.

    Args:
        scheme: The scheme the plan was made with.
        branches: Every residual branch, in the order of execution.
        zero_layers: All-zero weights of layers that are no gates (a zero head): judged, never written.
        streams: The streams that the branches form.
        unread: Names of residual additions from which no output of the network is computed: never touched, nor judged.
        idle: Modules with parameters that the traced forward did not run; their branches are not known.
    """

    __module__ = "lit_resinit"

    scheme: Scheme
    branches: tuple[Branch, ...]
    zero_layers: tuple[str, ...] = ()
    streams: tuple[Stream, ...] = ()
    unread: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.branches)

    @property
    def active(self) -> tuple[Branch, ...]:
        """The branches that were not excluded."""
        return tuple(b for b in self.branches if b.action != "excluded")

    @property
    def gates(self) -> tuple[Gate, ...]:
        """The gates of all branches that were not excluded, each once; none where a constant is used instead."""
        if self.scheme in CONSTANT_SCHEMES:
            return ()
        unique = {(g.parameter, g.index): g for b in self.active for g in b.gates}
        return tuple(unique.values())

    @property
    def after_last(self) -> dict[str, tuple[str, ...]]:
        """What every stream passes after its last addition, by the name of its last branch."""
        return {s.branches[-1]: s.after for s in self.streams}

    def __str__(self) -> str:
        return format_plan(self)

    def __repr__(self) -> str:
        return Shown.__repr__(self)  # or else it would be that of a dataclass

    def _title(self) -> str:
        title = f"{len(self)} residual branches, scheme {self.scheme}"
        return title + (f"; zero layers outside: {', '.join(self.zero_layers)}" if self.zero_layers else "")

    def _cells(self) -> list[tuple[str, ...]]:
        return _grouped(self)

    def below(self, name: str) -> ResidualPlan:
        """The same plan as seen from a module that holds the model under ``name``."""
        return self if not name else _Prefixed(name).plan(self)

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain types only, so that it goes through JSON."""
        return {
            "scheme": self.scheme,
            "branches": [_plain(b) for b in self.branches],
            "zero_layers": list(self.zero_layers),
            "streams": [_plain_stream(s) for s in self.streams],
            "after_last": {k: list(v) for k, v in self.after_last.items()},
            "unread": list(self.unread),
            "idle": list(self.idle),
        }


def check_plan(model: object, plan: object) -> None:
    """Raise for what is no model, and for what is no plan."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected argument `model` to be a torch.nn.Module but got {type(model).__name__}")
    if not isinstance(plan, ResidualPlan):
        raise TypeError(
            f"Expected argument `plan` to be a ResidualPlan but got {type(plan).__name__}; make one with `make_plan`"
        )


def _plain(branch: Branch) -> dict[str, Any]:
    values = dataclasses.asdict(branch)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()} | {
        "gates": [{k: list(v) if isinstance(v, tuple) else v for k, v in g.items()} for g in values["gates"]]
    }


def _plain_stream(stream: Stream) -> dict[str, Any]:
    return dataclasses.asdict(stream) | {
        "branches": list(stream.branches),
        "between": [list(b) for b in stream.between],
        "after": list(stream.after),
    }


class _Prefixed:
    """Names of a plan, seen from a parent module."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def name(self, name: str) -> str:
        inner = name.removeprefix("(root)")
        return f"{self._prefix}{inner if inner.startswith(':') else '.' + inner if inner else ''}"

    def names(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(self.name(n) for n in names)

    def gate(self, gate: Gate) -> Gate:
        return dataclasses.replace(
            gate,
            parameter=self.name(gate.parameter),
            biases=self.names(gate.biases),
            module=self.name(gate.module) if gate.module else "",
            folds_into=self.names(gate.folds_into),
        )

    def branch(self, branch: Branch) -> Branch:
        return dataclasses.replace(
            branch,
            name=self.name(branch.name),
            block=self.name(branch.block),
            gates=tuple(self.gate(g) for g in branch.gates),
            address=dataclasses.replace(branch.address, block=self.name(branch.address.block)),
            previous=None if branch.previous is None else self.name(branch.previous),
            factor=tuple(n if u is None else self.name(n) for n, u in zip(branch.factor, branch.units, strict=True)),
            norms=self.names(branch.norms),
            culprit=self.name(branch.culprit) if branch.culprit else "",
            overwritten_in=self.name(branch.overwritten_in) if branch.overwritten_by else "",
        )

    def stream(self, stream: Stream) -> Stream:
        parts_from = None if stream.parts_from is None else self.name(stream.parts_from)
        return dataclasses.replace(stream, branches=self.names(stream.branches), parts_from=parts_from)

    def plan(self, plan: ResidualPlan) -> ResidualPlan:
        return dataclasses.replace(
            plan,
            branches=tuple(self.branch(b) for b in plan.branches),
            zero_layers=self.names(plan.zero_layers),
            streams=tuple(self.stream(s) for s in plan.streams),
            unread=self.names(plan.unread),
            idle=self.names(plan.idle),
        )


# -------------------------------------------------------------------- printing


def format_plan(plan: ResidualPlan) -> str:
    """The plan as a table; equal branches are one row."""
    return "\n".join([plan._title(), in_columns(_grouped(plan)), *_remarks(plan), *_keys_of_their_own(plan)])


def _grouped(plan: ResidualPlan) -> list[tuple[str, ...]]:
    groups: dict[tuple[str, ...], list[Branch]] = {}
    for b in plan.branches:
        kinds = "-" if b.action == "sqrt_depth" else "+".join(g.kind for g in b.gates) or "-"
        key = (b.skip, b.action, kinds, without_numbers(f"{b.name} {_gates_of(b)}"))
        groups.setdefault(key, []).append(b)
    table: list[tuple[str, ...]] = [("branch", "count", "skip", "action", "gate kind", "gate")]
    for (skip, action, kinds, _), branches in groups.items():
        names, gates = [b.name for b in branches], [_gates_of(b) for b in branches]
        table.append((together(names), str(len(names)), skip, action, kinds, in_common(gates)))
    for what, places in (("unread", plan.unread), ("did not run", plan.idle)):
        for names in _alike(places):
            table.append((together(names), str(len(names)), "-", what, "-", "-"))
    return table


def _alike(names: Iterable[str]) -> Iterable[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(without_numbers(name), []).append(name)
    return groups.values()


def _remarks(plan: ResidualPlan) -> Iterator[str]:
    """What the words of the table mean, where they are not those of a scheme."""
    without_gates = [b for b in plan.branches if b.action == "already_closed" and not b.gates]
    if without_gates:
        yield (
            f"{together([b.name for b in without_gates])}: the branch is zero whatever the batch, and a second zero "
            "would keep it so for good; left as it is."
        )
    overwritten = [b for b in plan.branches if b.overwritten_by]
    if overwritten:
        first = overwritten[0]
        yield (
            f"{together([b.name for b in overwritten])}: `{first.overwritten_by}` at {first.overwritten_at} writes "
            "over the stream, so that the block is not the identity of its input (inplace=False would keep it)."
        )
    if plan.unread:
        yield "unread: no output of the network is computed from that sum; left as it is, and not judged."
    if plan.idle:
        yield "did not run: this forward did not read their parameters; branches inside them are not known."


def _keys_of_their_own(plan: ResidualPlan) -> list[str]:
    """The scalars that do not fold into weights, so that state dicts keep them."""
    kept = [g.parameter for g in plan.gates if g.module and not g.folds_into]
    if not kept:
        return []
    who = "1 inserted scalar does not fold into weights and keeps a key of its own"
    several = f"{len(kept)} inserted scalars do not fold into weights and keep keys of their own"
    return [f"in the state dict {who if len(kept) == 1 else several}: {together(kept)}"]


def _gates_of(branch: Branch) -> str:
    shown = [g.parameter if g.index is None else f"{g.parameter}[{g.index}]" for g in branch.gates]
    if branch.action == "sqrt_depth":
        shown = [g.module for g in branch.gates]
    factor = f" times 1/sqrt({branch.length})" if branch.action in CONSTANT_SCHEMES else ""
    return ", ".join(f"{name}{factor}" for name in shown) or "-"
