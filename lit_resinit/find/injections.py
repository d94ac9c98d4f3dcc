"""Additions that arrive closed, of something that the stream itself does not compute."""

from __future__ import annotations

from lit_resinit.find.branches import addresses
from lit_resinit.find.gates import GateFinder
from lit_resinit.find.streams import Addition
from lit_resinit.find.sums import NetworkUses, visible_sums
from lit_resinit.find.views import copied
from lit_resinit.graph.values import Graph, Node
from lit_resinit.graph.where import Address


def closed_injections(graph: Graph, known: list[Addition], finder: GateFinder) -> list[Addition]:
    """``x + zero_layer(y)`` adds nothing now and may add anything later: a branch, wherever ``y`` comes from."""
    others = {n.index: n for n in visible_sums(graph)}
    for addition in known:
        others.pop(addition.node, None)
    where, uses = addresses(graph), NetworkUses(graph, finder.readers)
    found = [_injection(node, where[node.call], finder) for node in others.values()]
    return [a for a in found if a is not None and _ends_in_zero_layer(a, finder) and uses.has(a.node)]


def _injection(node: Node, address: Address, finder: GateFinder) -> Addition | None:
    nodes = finder.nodes
    left, right = node.inputs
    if not (nodes[left].data and nodes[right].data and nodes[left].shape == nodes[right].shape):
        return None
    for skip, branch in ((left, right), (right, left)):
        if finder.is_zero(branch) and not finder.is_zero(skip):
            return Addition(node.index, skip, branch, skip, False, (), frozenset(), address.block, address)
    return None


def _ends_in_zero_layer(addition: Addition, finder: GateFinder) -> bool:
    """Whether a layer of its own makes the branch zero; a part of its output is a shift beside scales."""
    end = finder.nodes[copied(finder.graph, addition.branch)]
    return end.op != "part" and any(g.kind == "layer" for g in finder.closed_gates(addition))
