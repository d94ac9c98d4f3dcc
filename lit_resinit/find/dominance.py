"""Dominance: which ways lead from a value to an output of the network, and past which sums."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from lit_resinit.graph.values import Graph


def live(graph: Graph, readers: Sequence[Sequence[int]]) -> list[bool]:
    """For every value whether an output of the network or a loss is computed from it."""
    found = [False] * len(graph.nodes)
    for index in outputs(graph, readers):
        found[index] = True
    for node in reversed(graph.nodes):
        if found[node.index]:
            for source in node.inputs:
                found[source] = True
    return found


def outputs(graph: Graph, readers: Sequence[Sequence[int]]) -> set[int]:
    """What the network returns, and every single number that is learned and that nobody reads: a loss.

    Where neither is known (results in an object of the user's own), every value that nobody reads counts.
    """
    unread = [n for n in graph.nodes if n.data and not readers[n.index] and n.op != "statistic"]
    losses = {n.index for n in unread if n.learned and math.prod(n.shape) == 1 and graph.calls[n.call].graded}
    found = losses | {n for output in graph.outputs if not output.module for n in (*output.nodes, *output.held)}
    return found or {n.index for n in unread}


class Dominance:
    """Answers for one graph whether every way from a value to an output passes certain sums.

    Args:
        graph: The traced forward.
        readers: For every node the nodes that read it.
    """

    def __init__(self, graph: Graph, readers: Sequence[Sequence[int]]) -> None:
        self._graph, self._readers = graph, readers
        self._outputs, self._live = outputs(graph, readers), live(graph, readers)

    def is_read(self, node: int) -> bool:
        """Whether an output of the network is computed from a value."""
        return self._live[node]

    def escapes(self, values: Iterable[int], sums: Mapping[int, int], inside: Collection[int] = ()) -> int | None:
        """Who reads one of these values on a way to an output that enters none of the sums; None where nobody does.

        Only what lies before the last of the sums is looked at: what is read after it has escaped.

        Args:
            values: Values of the network, or a parameter: it may meet the network ``inside`` only, or as a penalty.
            sums: The additions that are meant, each with the summand by which a way has to enter it.
            inside: The values on the way to them: the answer is the first one beside it.
        """
        nodes, last = self._graph.nodes, max(sums, default=-1)
        waiting = list(values)
        before: dict[int, int | None] = dict.fromkeys(waiting)
        while waiting:
            index = waiting.pop()
            if index in self._outputs or (index > last and nodes[index].data and nodes[index].op != "part"):
                return self._where_it_parts(index, before, inside)
            for reader in self._readers[index]:
                if reader in before or not self._live[reader] or self._is_penalty(index, reader):
                    continue
                if sums.get(reader) == index or self._is_joined(index, reader, sums):
                    continue
                if not nodes[index].data and nodes[reader].data and reader not in inside:
                    return reader
                before[reader] = index
                waiting.append(reader)
        return None

    def _is_joined(self, index: int, reader: int, sums: Mapping[int, int]) -> bool:
        """Whether the rest of a value goes on beside a sum of a part of it: written over, or a wider stream."""
        node = self._graph.nodes[reader]
        if node.op == "copy_into":
            return node.inputs[1] in sums
        return node.op == "cat" and self._graph.nodes[index].op == "part" and any(i in sums for i in node.inputs)

    def _is_penalty(self, index: int, reader: int) -> bool:
        nodes = self._graph.nodes
        return not nodes[index].data and nodes[reader].data and math.prod(nodes[reader].shape) == 1

    def _where_it_parts(self, index: int, before: dict[int, int | None], inside: Collection[int]) -> int:
        """The first value on a way that is computed from the batch and is none of those ``inside``."""
        source = before[index]
        while source is not None and self._graph.nodes[source].data and source not in inside and index not in inside:
            index, source = source, before[source]
        return index
