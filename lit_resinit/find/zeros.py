"""What is zero, given what is: forwards from parameters at their closing values, backwards to the reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from torch import Tensor

from lit_resinit.find.closing import Closing, closing, probe
from lit_resinit.find.gates import holds
from lit_resinit.graph import ops
from lit_resinit.graph.ops import Does, Zero
from lit_resinit.graph.values import Graph, Node

IsZero = Callable[[int], bool]
_FACTORS = Does.MULTIPLIES | Does.APPLIES_WEIGHT


def stays_zero(graph: Graph, node: Node, is_zero: IsZero) -> bool:
    """Whether an operation's output is zero everywhere, by itself or because of the inputs that are."""
    return ops.kind(node.op).zero is Zero.ALWAYS or bool(zero_sources(graph, node, is_zero))


def zero_sources(graph: Graph, node: Node, is_zero: IsZero) -> tuple[int, ...]:
    """The inputs that make an operation's output zero; none where it is not zero for such a reason.

    This is the one reading of the column ``Zero`` of the table of operations. Of the inputs that have to be zero,
    constants do not count: what they hold is not known.
    """
    when = ops.kind(node.op).zero
    if when in (Zero.NEVER, Zero.ALWAYS):
        return ()
    if when is Zero.ANY:
        return () if _divides_by_zero(graph, node, is_zero) else tuple(i for i in node.inputs if is_zero(i))
    wanted = ops.values_of(node.op, node.inputs) if when is Zero.VALUES else node.inputs
    nodes = graph.nodes
    moving = tuple(i for i in wanted if nodes[i].data or nodes[i].learned)
    if not all(map(is_zero, moving)):
        return ()
    if when is Zero.SHIFT and node.number != 0:
        return ()
    return moving if when is not Zero.ASK or _is_zero_at_zero(graph, node) else ()


def _divides_by_zero(graph: Graph, product: Node, is_zero: IsZero) -> bool:
    """Whether a factor is one over a zero, so that the product is no zero whatever the other is."""
    factors = [graph.nodes[i] for i in product.inputs]
    return any(factor.op == "reciprocal" and is_zero(factor.inputs[0]) for factor in factors)


def _is_zero_at_zero(graph: Graph, node: Node) -> bool:
    """What cannot be called with zeros is taken for zero there: a mask, an index, a sum of squares."""
    if node.call < 0 or graph.calls[node.call].inputs != node.inputs:
        return True
    measured = probe(graph, node)
    return measured is None or measured[0] == 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Factor:
    """A product that is zero because a learned factor is at its closing value; ``other`` is the other operand."""

    other: int
    closing: Closing


class Zeros:
    """What is zero for every input in a model as it is, and the closed factors behind that.

    Args:
        graph: The traced forward.
        parameters: The model's parameters by name, for their values now.
    """

    def __init__(self, graph: Graph, parameters: Mapping[str, Tensor]) -> None:
        self._graph, self._parameters = graph, parameters
        self._all_zero: dict[str, bool] = {}
        self._zero: list[bool] = []
        self._factors: dict[int, Factor] = {}
        for node in graph.nodes:
            self._zero.append(self._judge(node))

    def at(self, node: int) -> bool:
        """Whether a value is zero, whatever the input."""
        return self._zero[node]

    def factor(self, node: int) -> Factor | None:
        """The closed factor of a product, if it has one."""
        return self._factors.get(node)

    def holds(self, name: str, value: float = 0.0, index: int | None = None) -> bool:
        """Whether a parameter (or its element) has a value everywhere."""
        parameter = self._parameters[name]
        if index is not None or value != 0.0:
            return holds(parameter if index is None else parameter[index], value)
        if name not in self._all_zero:
            self._all_zero[name] = holds(parameter, 0.0)
        return self._all_zero[name]

    def _judge(self, node: Node) -> bool:
        if node.op == "parameter":
            return self.holds(node.name)
        if ops.does(node.op, _FACTORS) and not _divides_by_zero(self._graph, node, self._zero.__getitem__):
            factor = self._closed_factor(node)
            if factor is not None:
                self._factors[node.index] = factor
                return True
        return stays_zero(self._graph, node, self._zero.__getitem__)

    def _closed_factor(self, product: Node) -> Factor | None:
        left, right = product.inputs[:2]
        for factor, other in ((left, right), (right, left)):
            known = self._graph.nodes[factor]
            if not known.learned or known.data:
                continue
            found = closing(self._graph, factor)
            if found is not None and self.holds(found.parameter, found.value, found.index):
                return Factor(other, found)
            own = product.op == "mul" or ops.does(product.op, Does.APPLIES_WEIGHT)
            if found is None and own and self._zero[factor]:
                return Factor(other, Closing(self._zero_parameter(factor), 0.0, None, linear=False))
        return None

    def _zero_parameter(self, expression: int) -> str:
        """A zero parameter behind an expression that is zero, however it is written (``a ** 2``, ``relu(a)``)."""
        waiting = [expression]
        while True:
            node = self._graph.nodes[waiting.pop()]
            if node.op == "parameter" and self.holds(node.name):
                return node.name
            waiting += [i for i in node.inputs if self._graph.nodes[i].learned]
