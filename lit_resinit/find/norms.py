"""Which values are normalised: outputs of norms, also of norms written out in Python."""

from __future__ import annotations

from lit_resinit.find.views import copied
from lit_resinit.graph import ops
from lit_resinit.graph.ops import Does
from lit_resinit.graph.values import Graph

# Operations of a norm written out, from a statistic to the product or to its input. Asked of every product of a
# network, a walk without an end would go back through all of it.
_STEPS = 16


def is_normalised(graph: Graph, index: int) -> bool:
    """Whether a value is a norm's output, or a value times a statistic of itself."""
    node = graph.nodes[copied(graph, index)]
    if node.op == "norm":
        return True
    if node.op != "mul":
        return False
    left, right = node.inputs
    return _is_statistic(graph, left, right) or _is_statistic(graph, right, left)


def is_divided_by_its_size(graph: Graph, index: int) -> bool:
    """Whether a value is divided by a statistic of itself, so that what makes it small makes its slope large."""
    node = graph.nodes[index]
    if node.op != "mul":
        return False
    left, right = node.inputs
    return any(_divides(graph, a) and _is_statistic(graph, a, b) for a, b in ((left, right), (right, left)))


def _divides(graph: Graph, factor: int) -> bool:
    for _ in range(_STEPS):
        node = graph.nodes[factor]
        if node.op in ("reciprocal", "rsqrt") or (node.op == "pow" and _is_negative(graph.calls[node.call].args[-1])):
            return True
        if not node.inputs or ops.does(node.op, Does.REDUCES):
            return False
        factor = node.inputs[0]
    return False


def _is_negative(exponent: object) -> bool:
    return isinstance(exponent, int | float) and exponent < 0


def _is_statistic(graph: Graph, factor: int, base: int) -> bool:
    for _ in range(_STEPS):
        node = graph.nodes[factor]
        if not node.inputs:
            return False
        if ops.does(node.op, Does.REDUCES):
            return _is_computed_from(graph, node.inputs[0], base)
        factor = node.inputs[0]
    return False


def _is_computed_from(graph: Graph, index: int, base: int) -> bool:
    """Whether a value shows ``base`` or something beside it, going back by first inputs."""
    source = graph.nodes[base].inputs[:1]
    for _ in range(_STEPS):
        inputs = graph.nodes[index].inputs
        if index == base or (source and inputs[:1] == source):
            return True
        if not inputs:
            return False
        index = inputs[0]
    return False
