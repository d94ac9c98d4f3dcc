"""What arrives closed: the gates of such branches, and additions of something that the stream does not compute."""

from __future__ import annotations

from collections.abc import Iterator

from lit_resinit.find.branches import Found
from lit_resinit.find.closing import closing
from lit_resinit.find.gates import Gate, gate_at
from lit_resinit.find.streams import Addition
from lit_resinit.find.sums import visible_sums
from lit_resinit.find.views import copied
from lit_resinit.find.zeros import Zeros
from lit_resinit.graph.values import Graph, Node
from lit_resinit.graph.where import Address


def closed_gates(graph: Graph, zeros: Zeros, end: int) -> tuple[Gate, ...]:
    """The zero factors nearest the end of a branch that arrives closed, whatever lies between."""
    if not zeros.at(end):
        return ()
    nodes, gates = graph.nodes, dict[tuple[str, int | None], Gate]()
    waiting: list[tuple[int, tuple[str, ...]]] = [(end, ())]
    seen = {end}
    while waiting:
        index, biases = waiting.pop()
        factor = zeros.factor(index)
        if factor is not None:
            gate = gate_at(graph, nodes[index], factor.other, factor.closing, biases)
            gates.setdefault((gate.parameter, gate.index), gate)
            continue
        biases = (*biases, *_biases(graph, nodes[index]))
        for source in nodes[index].inputs:
            if source not in seen and zeros.at(source) and nodes[source].data:
                seen.add(source)
                waiting.append((source, biases))
    return tuple(gates.values())


def _biases(graph: Graph, node: Node) -> Iterator[str]:
    """What a sum adds that does not depend on the data."""
    for source in node.inputs if node.op == "add" else ():
        added = graph.nodes[source]
        found = closing(graph, source) if added.learned and not added.data else None
        if found is not None:
            yield found.parameter


def closed_injections(graph: Graph, found: Found, zeros: Zeros) -> list[Addition]:
    """``x + zero_layer(y)`` adds nothing now and may add anything later: a branch, wherever ``y`` comes from."""
    sums = (n for n in visible_sums(graph) if n.index not in found.streams)
    injections = (_injection(graph, node, found.addresses[node.call], zeros) for node in sums)
    return [
        a for a in injections if a is not None and _ends_in_zero_layer(graph, a, zeros) and found.facts.uses.has(a.node)
    ]


def _injection(graph: Graph, node: Node, address: Address, zeros: Zeros) -> Addition | None:
    nodes = graph.nodes
    left, right = node.inputs
    if not (nodes[left].data and nodes[right].data and nodes[left].shape == nodes[right].shape):
        return None
    for skip, branch in ((left, right), (right, left)):
        if zeros.at(branch) and not zeros.at(skip):
            return Addition(node.index, skip, branch, skip, False, (), frozenset(), address.block, address)
    return None


def _ends_in_zero_layer(graph: Graph, addition: Addition, zeros: Zeros) -> bool:
    """Whether a layer of its own makes the branch zero; a part of its output is a shift beside scales."""
    end = graph.nodes[copied(graph, addition.branch)]
    return end.op != "part" and any(g.kind == "layer" for g in closed_gates(graph, zeros, addition.branch))
