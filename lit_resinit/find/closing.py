"""Which parameter, at which value, makes an expression without data equal to a number."""

from __future__ import annotations

import dataclasses
import math

from lit_resinit.graph import ops
from lit_resinit.graph.ops import Does
from lit_resinit.graph.values import Graph, Node


@dataclasses.dataclass(frozen=True, slots=True)
class Closing:
    """A parameter (or one element of it) and its value; ``linear`` where the expression is linear in it."""

    parameter: str
    value: float
    index: int | None
    linear: bool = True


def closing(graph: Graph, expression: int, target: float = 0.0) -> Closing | None:
    """The parameter, and its value, that makes a data-free expression equal to ``target`` everywhere.

    Read backwards, a number added or multiplied moves the target (``2 * w + 3`` is zero at ``w = -1.5``); any other
    function is passed where it has the target as its value at zero, with a slope there.
    """
    index, linear = None, True
    while True:
        node = graph.nodes[expression]
        if node.op == "parameter":
            return Closing(node.name, target, index, linear)
        if ops.does(node.op, Does.MULTIPLIES) and target == 0.0:
            return _closing_of_product(graph, node)
        if node.op == "part":
            position = element(graph, node)
            if position is None or index is not None:
                return None
            index = position
        elif node.op == "shift" and node.number is not None:
            target -= node.number
        elif node.op == "scale" and node.number:
            target /= node.number
        elif node.op.startswith("_weight_norm") and target == 0.0:
            expression = node.inputs[1]  # the gain, not the direction
            continue
        elif not _shows_every_element(node):
            if not _passes_through(graph, node, target):
                return None
            target, linear = 0.0, False
        expression = node.inputs[0]


def _shows_every_element(node: Node) -> bool:
    return ops.does(node.op, Does.COPIES) or node.op == "repeat"


def _passes_through(graph: Graph, node: Node, target: float) -> bool:
    measured = probe(graph, node) if len(node.inputs) == 1 else None
    return measured is not None and measured[0] == target and measured[1] != 0.0 and math.isfinite(measured[1])


def probe(graph: Graph, node: Node) -> tuple[float, float] | None:
    """Value and slope at zero of a function of one tensor; None for anything else."""
    call = graph.calls[node.call]
    if len(call.inputs) != 1 or len(call.outputs) != 1:
        return None
    return ops.at_zero(call.func, call.args, call.kwargs)


def _closing_of_product(graph: Graph, product: Node) -> Closing | None:
    left, right = product.inputs
    for chosen, other in ((left, right), (right, left)):
        if graph.nodes[chosen].learned:
            found = closing(graph, chosen)
            if found is not None and not depends_on(graph, other, found.parameter):
                return found
    return None


def depends_on(graph: Graph, expression: int, parameter: str) -> bool:
    """Whether an expression is computed from a parameter."""
    waiting, seen = [expression], {expression}
    while waiting:
        node = graph.nodes[waiting.pop()]
        if node.name == parameter and node.op == "parameter":
            return True
        new = [i for i in node.inputs if i not in seen]
        seen.update(new)
        waiting += new
    return False


def element(graph: Graph, part: Node) -> int | None:
    """Which element along the first axis a partial view shows; None for anything else."""
    call = graph.calls[part.call]
    base, length = ops.base_name(call.func), graph.nodes[part.inputs[0]].shape[0]
    if base == "select" and call.args[1] == 0:
        return int(call.args[2]) % length
    if base == "unbind" and (len(call.args) < 2 or call.args[1] == 0):
        return call.outputs.index(part.index)
    if base == "slice" and call.args[1] == 0 and part.shape[0] == 1:
        return int(call.args[2]) % length
    return None
