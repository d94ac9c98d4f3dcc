"""What is measured while a forward runs: at the planned additions, and the size of every value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_iter

from lit_resinit.graph import ops
from lit_resinit.graph.record import Listener
from lit_resinit.graph.tensors import as_wide, in_parts, local, mean_and_variance, measuring, peak_of, to_host
from lit_resinit.graph.values import Call, Graph, Node
from lit_resinit.graph.where import Address, AddressBook
from lit_resinit.plan.values import Branch, ResidualPlan

# -------------------------------------------------------------------- at the additions


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Addition:
    """One run of a planned addition, before it.

    Args:
        index: Position of its branch in the plan.
        branch: Its branch.
        stream: The skip; of a sharded one the part that is here.
        value: The branch's output; None where the operation fuses it.
        writes: Whether the operation writes into one of its arguments.
    """

    index: int
    branch: Branch
    stream: Tensor
    value: Tensor | None
    writes: bool

    def kept_stream(self) -> Tensor:
        """The skip, as it will be after the addition."""
        return self.stream.detach().clone() if self.writes else self.stream.detach()


class Reader(Protocol):
    """Measures at planned additions, without anybody taking it for the network."""

    def before(self, addition: Addition) -> None:
        """The addition is about to run."""

    def after(self, addition: Addition, out: Tensor) -> None:
        """It has run."""


class AtAdditions(Listener):
    """Finds the planned additions among the operations of a forward, and lets readers measure there.

    Used by a recorder, and by a mode that records nothing (:class:`lit_resinit.judge.tap.Tap`).

    Args:
        plan: The plan.
        readers: Who measures.

    Attributes:
        kinds: Base names of the operations that planned additions are.
        calls: Position of every addition's last run among the calls of the graph, by branch name.
    """

    def __init__(self, plan: ResidualPlan, readers: Sequence[Reader]) -> None:
        self.kinds = frozenset(b.address.op for b in plan.branches)
        self.calls: dict[str, int] = {}
        self._planned = {_place(b.address): (i, b) for i, b in enumerate(plan.branches)}
        self._readers = readers
        self._book = AddressBook()
        self._graph = Graph()
        self._running: Addition | None = None

    def start(self, graph: Graph) -> None:
        """Count from the first one on."""
        self._graph = graph
        self._book = AddressBook()

    def before(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Measure before an addition."""
        self.begin(call.owner, call.line, call.func, args, kwargs)

    def after(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Measure after it."""
        if self._running is not None:
            self.calls[self._running.branch.name] = len(self._graph.calls) - 1
        self.end(out)

    def begin(self, owner: str, line: str, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operation is about to run."""
        op = ops.base_name(func)
        found = self._planned.get((owner, line, op, self._book.count(owner, line, op)))
        if found is None:
            self._running = None
            return
        index, branch = found
        flat = all(isinstance(a, _FLAT) for a in args) and not kwargs
        tensors = [local(a) for a in (args if flat else tree_iter((args, kwargs))) if isinstance(a, Tensor)]
        if branch.stacked is not None:
            with measuring():
                tensors = list(tensors[0].unbind(branch.stacked))
        value = None if branch.branch_input is None else tensors[branch.branch_input]
        stream, writes = tensors[branch.skip_input], bool(ops.written_arguments(func))
        self._running = Addition(index, branch, stream, value, writes)
        with measuring():
            for reader in self._readers:
                reader.before(self._running)

    def end(self, out: Any) -> None:
        """It has run."""
        running, self._running = self._running, None
        if running is not None:
            with measuring():
                for reader in self._readers:
                    reader.after(running, local(out).detach())


_FLAT = (Tensor, int, float)  # arguments that hold no other ones: looking into each costs more than these checks


def _place(address: Address) -> tuple[str, str, str, int]:
    return address.block, address.line, address.op, address.count


class Comparison:
    """Compares every planned addition with its skip, and every stream's end with its start.

    Nothing is read from the device before :meth:`numbers`.
    """

    def __init__(self, plan: ResidualPlan) -> None:
        self.stack_of, self.first, self.last = _stacks(plan)
        self._skip: Tensor | None = None
        self._compared: dict[str, Tensor] = {}
        self._entering: dict[str, tuple[Tensor, Tensor]] = {}
        self._stack_values: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def before(self, addition: Addition) -> None:
        """Keep the skip."""
        judged = addition.branch.name in self.stack_of
        self._skip = addition.kept_stream() if judged else None

    def after(self, addition: Addition, out: Tensor) -> None:
        """Compare it with the sum."""
        skip, self._skip, name = self._skip, None, addition.branch.name
        if skip is None:
            return
        self._compared[name] = _gap(out, skip)  # zero exactly when they are equal
        stack = self.stack_of[name]
        if self.first[stack] == name:
            kept = skip if self.last[stack] == name else skip.clone()
            self._entering[stack] = kept, mean_and_variance(skip)[1]
        if self.last[stack] == name and stack in self._entering:
            start, variance = self._entering.pop(stack)
            same = start.shape == out.shape
            gap = _gap(out, start) if same else torch.full((), math.nan, device=out.device)
            self._stack_values[stack] = gap, variance, mean_and_variance(out)[1]

    def numbers(self) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
        """Deviation by branch, and (deviation, variance before, variance after) by stack, in one transfer."""
        names, stacks = list(self._compared), list(self._stack_values)
        numbers = to_host([self._compared[n] for n in names] + [v for s in stacks for v in self._stack_values[s]])
        rest = numbers[len(names) :]
        measured = dict(zip(names, numbers, strict=False))
        return measured, {s: tuple(rest[3 * i : 3 * i + 3]) for i, s in enumerate(stacks)}

    def forget(self) -> None:
        """Let go of the streams that have not come to their end."""
        self._entering.clear()


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
    if out.numel() == 0 or (out.is_cpu and torch.equal(out, start)):  # elsewhere it would wait for the device
        return torch.zeros((), device=out.device)
    pairs = zip(*map(in_parts, torch.broadcast_tensors(out, start)), strict=True)
    extremes = [x for pair in pairs for x in torch.aminmax(as_wide(pair[0]) - as_wide(pair[1]))]
    return torch.stack(extremes).abs().amax()


# -------------------------------------------------------------------- everywhere


class Peaks(Listener):
    """The largest absolute value of every node, left on the device until :meth:`numbers`.

    Parameters are left out: who wants them measures them when they are read, for nothing changes them until then.
    """

    def __init__(self) -> None:
        self._graph = Graph()
        self._peaks: list[Tensor] = []
        self._peak_of: dict[int, int] = {}

    def start(self, graph: Graph) -> None:
        """Measure the nodes of this graph."""
        self._graph = graph

    def leaf(self, node: Node, tensor: Tensor, *, anew: bool) -> None:
        """Measure what comes from outside."""
        if anew or node.op in ("input", "constant", "buffer"):
            self._note(node.index, tensor)

    def after(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Measure what an operation returned; a view shows what was measured already."""
        tensors = [t for t in tree_iter(out) if isinstance(t, Tensor)]
        for tensor, node in zip(tensors, call.outputs, strict=False):
            if self._graph.nodes[node].op != "view":
                self._note(node, tensor)
            elif call.inputs[0] in self._peak_of:
                self._peak_of[node] = self._peak_of[call.inputs[0]]

    def _note(self, node: int, tensor: Tensor) -> None:
        peak = peak_of(tensor)
        if peak is not None:
            self._peak_of[node] = len(self._peaks)
            self._peaks.append(peak)

    def numbers(self) -> dict[int, float]:
        """Largest absolute value by node; NaN where a value is not finite."""
        values = to_host(self._peaks)
        return {node: values[position] for node, position in self._peak_of.items()}
