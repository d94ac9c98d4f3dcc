"""The end of a branch: a walk back from its addition to the first learned factor of every summand."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

from lit_resinit.find.closing import closing, probe
from lit_resinit.find.gates import Gate, gate_at
from lit_resinit.find.streams import Addition
from lit_resinit.find.views import is_nothing
from lit_resinit.find.zeros import stays_zero
from lit_resinit.graph import ops
from lit_resinit.graph.ops import Does, Zero
from lit_resinit.graph.values import Graph, Node

_FACTORS, _PARTNERS = Does.MULTIPLIES | Does.APPLIES_WEIGHT, Does.MULTIPLIES | Does.ATTENDS


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """The end of a branch (or of one summand): what it passes, and the gate or the reason why there is none.

    Args:
        passed: The values on the way, the branch's end first.
        insertable: Those that a scalar could multiply.
        nonlinear: The functions on the way that are not linear: a scalar after one could not be folded before it.
        gates: The gate that closes it; none where it forks, or stops before one.
        gated_at: The product in which the gate meets the branch.
        forks: The tails of its summands.
        stopped_by: Where the walk stopped without a gate.
        reason: Why it did.
    """

    passed: tuple[int, ...] = ()
    insertable: tuple[int, ...] = ()
    nonlinear: tuple[int, ...] = ()
    gates: tuple[Gate, ...] = ()
    gated_at: int | None = None
    forks: tuple[Tail, ...] = ()
    stopped_by: int | None = None
    reason: str = ""

    def summands(self) -> Iterator[Tail]:
        """Every summand: the tail itself, or those of its forks."""
        if self.forks:
            for fork in self.forks:
                yield from fork.summands()
        else:
            yield self

    @property
    def closable(self) -> bool:
        """Whether every summand has a gate."""
        return all(tail.gates for tail in self.summands())

    @property
    def every_gate(self) -> tuple[Gate, ...]:
        """The gates of all summands, where each has one; else none."""
        return tuple(g for tail in self.summands() for g in tail.gates) if self.closable else ()


def change_summands(tail: Tail, change: Callable[[Tail], Tail]) -> Tail:
    """The tail with every summand changed."""
    if not tail.forks:
        return change(tail)
    return dataclasses.replace(tail, forks=tuple(change_summands(fork, change) for fork in tail.forks))


class Tails:
    """Walks back from the ends of branches of one graph.

    Args:
        graph: The traced forward.
        readers: For every node the nodes that read it.
        additions: The residual additions; a branch that ends in one of them has no factor of its own.
    """

    def __init__(self, graph: Graph, readers: Sequence[Sequence[int]], additions: Container[int]) -> None:
        self.graph, self.readers, self.additions = graph, readers, additions

    @functools.cached_property
    def nothing(self) -> set[int]:
        """Values that are zero whatever is learned: made so, or multiplied by the number zero."""
        found = set[int]()
        for node in self.graph.nodes:
            values = ops.values_of(node.op, node.inputs) if ops.kind(node.op).zero is Zero.VALUES else ()
            shows_none = bool(values) and found.issuperset(values)
            if is_nothing(node) or shows_none or stays_zero(self.graph, node, found.__contains__):
                found.add(node.index)
        return found

    def of(self, addition: Addition, *, any_slope: bool = False) -> Tail:
        """The tail of a branch, with the learned factor nearest its end.

        With ``any_slope`` a function that is zero at zero is passed whatever its slope: good enough to name what should
        be zero in a branch that is judged as it is, not to close one.
        """
        tail = self.walk(addition.branch, addition, any_slope)

        def without(summand: Tail) -> Tail:
            after = () if summand is tail else tail.passed
            return self._without_double_zeros(summand, after, addition.branch)

        return change_summands(tail, without)

    def walk(self, start: int, addition: Addition, any_slope: bool) -> Tail:
        """The tail that ends in a value, as far as the walk alone can tell; sums of sums are one fork."""
        trunk = _Walk(self, addition, any_slope, _Passed())
        end = trunk.run(start)
        if isinstance(end, Tail):
            return end
        summands: list[Tail] = []
        waiting = [(source, trunk) for source in reversed(end.sources)]
        while waiting:
            source, before = waiting.pop()
            walk = _Walk(self, addition, any_slope, before.so_far())
            end = walk.run(source)
            if isinstance(end, Tail):
                summands.append(change_summands(end, walk.after.before))
            else:
                waiting += [(source, walk) for source in reversed(end.sources)]
        return trunk.tail(forks=tuple(summands))

    # ---------------------------------------------------------------- two zeros in one product

    def _without_double_zeros(self, tail: Tail, after: tuple[int, ...], end: int) -> Tail:
        """Take back a gate, and places for a scalar, that would make both factors of a product zero."""
        place = {node: position for position, node in enumerate(tail.passed, start=1)}
        gated = len(tail.passed) if tail.gates else 0
        wanted = {place[i] for i in tail.insertable} | ({gated} if gated else set())
        blind = {n: self._double_zero((*after, *tail.passed[:n]), end) for n in wanted}
        if not any(product is not None for product in blind.values()):
            return tail
        tail = dataclasses.replace(tail, insertable=tuple(i for i in tail.insertable if blind[place[i]] is None))
        product = blind.get(gated)
        if product is None:
            return tail
        reason = f"`{self.graph.nodes[product].op}` multiplies two values that are zero together"
        return dataclasses.replace(tail, gates=(), stopped_by=product, reason=reason)

    def _double_zero(self, zeros: Iterable[int], end: int) -> int | None:
        """The first product up to ``end`` both factors of which are zero when these values are: neither has a slope."""
        nodes, zero = self.graph.nodes, set(zeros)
        for index in self.zero_with(zero, end):
            zero.add(index)
            factors = nodes[index].inputs[:2] if ops.does(nodes[index].op, _PARTNERS) else ()
            if factors and all(i in zero and nodes[i].data for i in factors):
                return index
        return None

    def zero_with(self, zeros: Iterable[int], end: int) -> Iterator[int]:
        """The values up to ``end`` that read these, in order, and are zero when they are."""
        zero = defaultdict(bool, dict.fromkeys(zeros, True))
        queue = sorted({r for node in zero for r in self.readers[node] if r <= end})
        seen = set(queue)
        while queue:
            node = self.graph.nodes[heapq.heappop(queue)]
            if not zero[node.index] and not stays_zero(self.graph, node, zero.__getitem__):
                continue
            zero[node.index] = True
            yield node.index
            new = [r for r in self.readers[node.index] if r <= end and r not in seen]
            seen.update(new)
            for reader in new:
                heapq.heappush(queue, reader)


@dataclasses.dataclass(frozen=True, slots=True)
class _Fork:
    """Where a walk parts: the summands."""

    sources: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Passed:
    """What lies between a summand and the branch's end."""

    biases: tuple[str, ...] = ()
    nonlinear: tuple[int, ...] = ()
    transformed: bool = False

    def before(self, summand: Tail) -> Tail:
        """A summand, given what comes after it."""
        return dataclasses.replace(
            self.closed_with(summand),
            insertable=() if self.biases else summand.insertable,
            nonlinear=(*self.nonlinear, *summand.nonlinear),
        )

    def closed_with(self, summand: Tail) -> Tail:
        """A summand whose gates close what is added after it too, and fold into that as well."""
        if not self.biases:
            return summand
        gates = (
            dataclasses.replace(
                gate,
                biases=(*self.biases, *gate.biases),
                folds_into=(*gate.folds_into, *self.biases) if gate.folds_into else (),
            )
            for gate in summand.gates
        )
        return dataclasses.replace(summand, gates=tuple(gates))


class _Walk:
    """One walk back, from a value to the first factor, fork or obstacle."""

    def __init__(self, tails: Tails, addition: Addition, any_slope: bool, after: _Passed) -> None:
        self.tails, self.addition, self.any_slope, self.after = tails, addition, any_slope, after
        self.graph, self.nodes = tails.graph, tails.graph.nodes
        self.passed: list[int] = []
        self.insertable: list[int] = []
        self.biases: list[str] = []
        self.nonlinear: list[int] = []
        self.transformed = after.transformed

    def run(self, start: int) -> Tail | _Fork:
        """Every step names the value to go on with, or the end."""
        step: _Step = start
        while isinstance(step, int):
            step = self._visit(self.nodes[step])
        return step

    def so_far(self) -> _Passed:
        """What a summand has after it, at the end of this walk."""
        biases, nonlinear = (*self.after.biases, *self.biases), (*self.after.nonlinear, *self.nonlinear)
        return _Passed(biases, nonlinear, self.transformed)

    def tail(self, **end: Any) -> Tail:
        """The tail that ends here."""
        return Tail(tuple(self.passed), tuple(self.insertable), tuple(self.nonlinear), **end)

    def _visit(self, node: Node) -> _Step:
        self.passed.append(node.index)
        if not self.biases:
            self.insertable.append(node.index)
        if not node.inputs:
            return self._stop(node, "no layer")
        if node.index in self.tails.additions or node.index == self.addition.stream:
            return self._stop(node, "the stream itself is part of this sum")
        return self._step(node)

    def _step(self, node: Node) -> _Step:
        self.transformed |= ops.does(node.op, Does.TRANSFORMS)
        if ops.does(node.op, Does.LARGEST):
            self.nonlinear.append(node.index)
        if ops.does(node.op, Does.MOVES | Does.TRANSFORMS) and node.number != 0:
            return node.inputs[0]
        if node.op == "shift" and node.number == 0:
            return node.inputs[0]
        if node.op == "add":
            return self._through_sum(node)
        if ops.does(node.op, Does.MERGES):
            return self._fork(node, [i for i in ops.values_of(node.op, node.inputs) if self.nodes[i].data])
        if ops.does(node.op, Does.ATTENDS):
            return ops.values_of(node.op, node.inputs)[0]
        if ops.does(node.op, _FACTORS):
            return self._through_product(node)
        if node.op == "norm":
            return self._stop(node, "a norm without weights")
        return self._through_function(node)

    # ---------------------------------------------------------------- sums

    def _through_sum(self, node: Node) -> _Step:
        sources = [i for i in node.inputs if i not in self.tails.nothing]
        if len(sources) == 1:
            return sources[0]
        moving = [i for i in node.inputs if self._moves(i)]
        if len(moving) == 2:
            return self._fork(node, moving)
        fixed = next((i for i in node.inputs if i not in moving), None)
        if not moving or fixed is None:
            return self._stop(node, "a sum of constants")
        bias = closing(self.graph, fixed) if self.nodes[fixed].learned else None
        if bias is None or bias.value != 0.0:
            return self._stop(node, "a constant is added")
        self.biases.append(bias.parameter)
        return moving[0]

    def _fork(self, node: Node, sources: list[int]) -> _Step:
        sources = list(dict.fromkeys(sources))
        if not sources:
            return self._stop(node, "a sum of constants")
        return sources[0] if len(sources) == 1 else _Fork(tuple(sources))

    # ---------------------------------------------------------------- products and functions

    def _through_product(self, node: Node) -> _Step:
        moving = [i for i in node.inputs if self._moves(i)]
        fixed = [i for i in node.inputs if i not in moving]
        if len(moving) == 2:
            return self._through_data_product(node.index, moving)
        if len(moving) != 1 or not fixed:
            return self._stop(node, "no layer")
        if not self.nodes[fixed[0]].learned:
            return moving[0]
        found = closing(self.graph, fixed[0])
        if found is not None:
            gate = gate_at(self.graph, node, moving[0], found, self.biases, transformed=self.transformed)
            return self.tail(gates=(gate,), gated_at=node.index)
        if ops.does(node.op, Does.APPLIES_WEIGHT):
            return self._stop(node, "its weight is computed in a way whose closing value is not known")
        return moving[0]

    def _through_data_product(self, product: int, moving: list[int]) -> Tail:
        """A product of two moving tensors is closed by closing either: a factor of the branch's own comes first.

        Then a norm or scale before a layer, then the one that is computed from the stream.
        """
        order = sorted(dict.fromkeys(moving), key=lambda i: i not in self.addition.interior)
        tails = [self.tails.walk(source, self.addition, self.any_slope) for source in order]
        closable = [t for t in tails if t.closable]
        own = [t for t in closable if len(closable) == 1 or not self._is_shared(t, product)]
        chosen = min(own or closable or tails, key=_closes_a_layer)
        others = [source for source, tail in zip(order, tails, strict=True) if tail is not chosen]
        if any(self._is_computed_from(source, chosen) for source in others):
            self.nonlinear.append(product)  # what scales one factor scales the other too
        after = _Passed(tuple(self.biases))
        return dataclasses.replace(
            change_summands(chosen, after.closed_with),
            passed=(*self.passed, *chosen.passed),
            insertable=(*self.insertable, *(() if self.biases else chosen.insertable)),
            nonlinear=(*self.nonlinear, *chosen.nonlinear),
        )

    def _is_computed_from(self, source: int, factor: Tail) -> bool:
        """Whether a factor of a product is computed from what the gate of the other one makes."""
        ends = {s.gated_at for s in factor.summands() if s.gated_at is not None}
        stack, seen, first = [source], {source}, min(ends, default=source)
        while stack:
            node = stack.pop()
            if node in ends:
                return True
            fresh = {i for i in self.nodes[node].inputs if i >= first} - seen
            seen |= fresh
            stack += fresh
        return False

    def _is_shared(self, factor: Tail, product: int) -> bool:
        """Whether others than a product read what its factor's gate makes, as one layer makes shifts and scales."""
        ends = [s.gated_at for s in factor.summands() if s.gated_at is not None]
        shown = {*factor.passed, *ends}.union(*(s.passed for s in factor.summands()))
        readers = (r for n in shown for r in self.tails.readers[n] if self.nodes[r].op != "statistic")
        return any(r != product and r not in shown for r in readers)

    def _through_function(self, node: Node) -> _Step:
        moving = [i for i in node.inputs if self.nodes[i].data or self.nodes[i].learned]
        measured = probe(self.graph, node) if moving else None
        if measured is None:
            return self._stop(node, f"`{node.op}` is no factor")
        value, slope = measured
        if value != 0.0:
            return self._stop(node, f"`{node.op}` is not zero at zero")
        if not self.any_slope and (slope == 0.0 or not math.isfinite(slope)):
            return self._stop(node, f"`{node.op}` has slope {slope:g} at zero")
        self.nonlinear.append(node.index)
        return moving[0]

    # ---------------------------------------------------------------- tails

    def _moves(self, index: int) -> bool:
        return self.nodes[index].data or index in self.addition.interior

    def _stop(self, node: Node, reason: str) -> Tail:
        return self.tail(stopped_by=node.index, reason=reason)


_Step = int | Tail | _Fork


def _closes_a_layer(tail: Tail) -> bool:
    return any(g.kind == "layer" for summand in tail.summands() for g in summand.gates)
