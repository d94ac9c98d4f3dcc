"""Operations of a block that write over the stream before its skip is read: the block is then no identity."""

from __future__ import annotations

from collections.abc import Container

from lit_resinit.find.streams import Addition
from lit_resinit.graph import ops
from lit_resinit.graph.values import Graph, Node
from lit_resinit.graph.where import is_below


def overwritten_by(graph: Graph, addition: Addition, sums: Container[int]) -> int | None:
    """The operation in an addition's block that writes a function of the stream into the stream's own memory.

    ``x + f(relu_(x))`` adds the branch to ``relu(x)``. What the block made itself it may write over, and so it may put
    a mask on the stream; a function that changes nothing any more (a second ReLU) is harmless.

    Args:
        graph: The traced forward.
        addition: The residual addition.
        sums: The residual additions, which may be in place.
    """
    nodes, current = graph.nodes, _behind_views(graph, addition.skip)
    while current.call >= 0 and current.index not in sums:
        call = graph.calls[current.call]
        if not ops.written_arguments(call.func) or not current.inputs or not is_below(call.owner, addition.block):
            return None
        source = _behind_views(graph, current.inputs[0])
        if any(nodes[i].data for i in current.inputs[1:]) or not source.data:
            return None
        if source.call < 0 or not is_below(graph.owner(source.index), addition.block):
            repeated = source.op == current.op and ops.is_idempotent(call.func, call.args, call.kwargs)
            return None if repeated else current.index
        current = source
    return None


def _behind_views(graph: Graph, index: int) -> Node:
    """The value behind views."""
    node = graph.nodes[index]
    while node.op == "view":
        node = graph.nodes[node.inputs[0]]
    return node
