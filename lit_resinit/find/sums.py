"""The sums of a graph: which the model can see, what each adds up, and whether the network itself uses it."""

from __future__ import annotations

import math
from collections.abc import Container

from lit_resinit.graph import ops
from lit_resinit.graph.ops import Does
from lit_resinit.graph.values import Graph, Node


def visible_sums(graph: Graph) -> list[Node]:
    """Every addition but the inner parts of an operation, which the model cannot see."""
    return [n for n in graph.nodes if n.op == "add" and n.call >= 0 and n.index in graph.calls[n.call].outputs]


def terms(graph: Graph, total: int, streams: Container[int]) -> list[tuple[int, float]]:
    """The values that a sum adds up, each with its constant factor, NaN where that is unknown.

    Sums of ``streams`` are values of their own.
    """
    stack, found = [(total, 1.0)], []
    while stack:
        index, factor = stack.pop()
        node = graph.nodes[index]
        if node.op == "add" and all(graph.nodes[i].data for i in node.inputs) and index not in streams:
            stack += [(i, factor) for i in node.inputs]
        elif ops.does(node.op, Does.COPIES) or node.op == "scale" or (node.op == "shift" and node.number == 0):
            number = node.number if node.op == "scale" else 1.0
            stack.append((node.inputs[0], factor * (math.nan if number is None else number)))
        else:
            found.append((index, factor))
    return found


class NetworkUses:
    """Which values a learned layer reads or a module returns; any other sum is arithmetic of the loss, no stream."""

    def __init__(self, graph: Graph, readers: list[list[int]]) -> None:
        self._nodes, self._readers = graph.nodes, readers
        self._learned = [False] * len(graph.nodes)
        for node in reversed(graph.nodes):
            reads = any(graph.nodes[i].learned and not graph.nodes[i].data for i in node.inputs)
            for source in node.inputs:
                below = self._learned[node.index] or (reads and graph.nodes[source].data)
                self._learned[source] = self._learned[source] or below
        returned = {n for output in graph.outputs for n in (*output.nodes, *output.held)}
        self._returned = {n for n in returned if math.prod(graph.nodes[n].shape) > 1}  # a single number is a loss

    def feeds_layer(self, index: int) -> bool:
        """Whether a learned layer reads a value, or something computed from it."""
        return self._learned[index]

    def has(self, index: int) -> bool:
        """Whether the network itself uses a value."""
        if self._learned[index]:
            return True
        size = math.prod(self._nodes[index].shape)
        stack, seen = [index], {index}
        while stack:
            current = stack.pop()
            if current in self._returned:
                return True
            fresh = [r for r in self._readers[current] if r not in seen and self._shows(r, size)]
            seen.update(fresh)
            stack += fresh
        return False

    def _shows(self, reader: int, size: int) -> bool:
        """Whether what is returned still shows the value: moved, pooled, beside others, or element by element."""
        node = self._nodes[reader]
        merged = ops.does(node.op, Does.MERGES) and ops.does(node.op, Does.STRAIGHT)
        return merged or ops.does(node.op, Does.MOVES) or math.prod(node.shape) == size
