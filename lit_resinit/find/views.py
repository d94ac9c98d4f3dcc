"""What a value shows: itself, and behind moves, factors and biases the values before it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container

from lit_resinit.graph import ops
from lit_resinit.graph.ops import Does
from lit_resinit.graph.tensors import are_apart
from lit_resinit.graph.values import Graph, Node

_LIMIT = 64  # steps: between two sums of a stream there are a few, and the walk is taken for every sum


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """A value that another one shows, and what lies between the two.

    Args:
        value: The node that is shown.
        scales: The products passed on the way, nearest first.
        region: Which part of ``whole`` was taken, as memory; None where all of it.
        whole: The value that the part was cut from.
        layers: Number of layers passed.
        norms: Number of norms passed.
    """

    value: int
    scales: tuple[int, ...] = ()
    region: tuple[object, ...] | None = None
    whole: int = -1
    layers: int = 0
    norms: int = 0


class Views:
    """Walks back from values of one graph.

    Args:
        graph: The traced forward.
        sums: The residual additions known so far, for what they write into a part is the stream.
    """

    def __init__(self, graph: Graph, sums: Container[int]) -> None:
        self._graph, self._nodes, self._sums = graph, graph.nodes, sums

    def shown(self, value: int) -> list[View]:
        """What a stream passes: moves, factors and biases; nearest first, the value itself before all."""
        return self._walk(value, self._stream_step)

    def projected(self, value: int) -> list[View]:
        """What a projection of a stream passes: norms and one layer too, but no activation and no cut."""
        return self._walk(value, self._projection_step)

    def factor_of(self, view: View) -> float:
        """The product of the numbers that a view is multiplied with."""
        numbers = (self._nodes[i].number for i in view.scales)
        return math.prod(n for n in numbers if n is not None)

    def is_rescaled(self, view: View) -> bool:
        """Whether a learned factor lies between, so that the two are views of one value and not one value."""
        return any(self._nodes[i].op == "mul" and self._nodes[i].learned for i in view.scales)

    def _walk(self, value: int, step: Callable[[View], View | None]) -> list[View]:
        views = [View(value)]
        while len(views) < _LIMIT and not is_nothing(self._nodes[views[-1].value]):
            found = step(views[-1])
            if found is None:
                break
            views.append(found)
        return views

    # ---------------------------------------------------------------- one step of a stream

    def _stream_step(self, view: View) -> View | None:
        node = self._nodes[view.value]
        if node.shown is not None:
            return View(node.shown, view.scales, view.region, view.whole)
        if node.op == "cat":
            return self._through_concatenation(view, node)
        if node.op == "copy_into":
            return self._through_writing(view, node)
        if ops.does(node.op, Does.MOVES) and node.inputs:
            scales = (*view.scales, node.index) if node.op == "scale" else view.scales
            region, whole = (node.region, node.inputs[0]) if node.op == "part" else (view.region, view.whole)
            return View(node.inputs[0], scales, region, whole)
        if node.op == "shift" and node.number == 0:
            return View(node.inputs[0], view.scales, view.region, view.whole)
        if node.op in ("mul", "add"):
            factor = self.factor(node)
            if factor is not None:
                scales = (*view.scales, node.index) if node.op == "mul" else view.scales
                return View(factor[0], scales, view.region, view.whole)
        return None

    def _through_concatenation(self, view: View, node: Node) -> View | None:
        """A concatenation is the stream when all its moving parts are cut from the same value."""
        parts = [i for i in node.inputs if self._nodes[i].data or self._nodes[i].learned]
        if not parts:
            return None
        if len(parts) == 1:
            return View(parts[0], view.scales, view.region, view.whole)
        chains = [[step.value for step in self.shown(part)] for part in parts]
        shared = set(chains[0]).intersection(*chains[1:])
        return View(max(shared), view.scales) if shared else None

    def _through_writing(self, view: View, node: Node) -> View | None:
        """What is written over a part: elsewhere and under constants the stream stays, an addition goes on with it."""
        whole, written = node.inputs
        if view.region is not None and view.region == node.region:
            return View(written, view.scales)
        elsewhere = view.region is not None and node.region is not None and are_apart(view.region, node.region)
        if elsewhere or not self._nodes[written].data:
            return View(whole, view.scales, view.region, whole if view.region is not None else view.whole)
        shown = next((step.value for step in self.shown(written) if step.value in self._sums), None)
        return None if shown is None else View(shown, view.scales)

    def factor(self, node: Node) -> tuple[int, int] | None:
        """(moving operand, constant or learned operand) of a product or sum with something that does not see the data.

        Where neither does (a stream of learned queries that has read nothing yet), the bare parameter is the factor.
        """
        left, right = node.inputs
        moves, other = self._nodes[left].data, self._nodes[right].data
        if moves and other:
            return None
        if moves != other:
            return (left, right) if moves else (right, left)
        bare = [i for i in (left, right) if is_weight(self._graph, i)]
        return (left if bare == [right] else right, bare[0]) if len(bare) == 1 else None

    # ---------------------------------------------------------------- one step of a projection

    def _projection_step(self, view: View) -> View | None:
        node = self._nodes[view.value]
        if node.op == "norm":
            return View(node.inputs[0], view.scales, layers=view.layers, norms=view.norms + 1)
        if node.op in ("conv", "mm"):
            factor = self.factor(node) if view.layers == 0 else None
            learned = factor is not None and self._nodes[factor[1]].learned
            return View(factor[0], view.scales, layers=1, norms=view.norms) if factor and learned else None
        if node.op in ("mul", "add"):
            factor = self.factor(node)
            return None if factor is None else View(factor[0], view.scales, layers=view.layers, norms=view.norms)
        if node.op == "part" or not (ops.does(node.op, Does.MOVES) or node.op in ("cat", "shift")):
            return None
        passed = self._stream_step(view)
        return passed and View(passed.value, passed.scales, layers=view.layers, norms=view.norms)


def is_nothing(node: Node) -> bool:
    """Whether a value is multiplied by the number zero, which keeps parameters in use and shows none of it."""
    return node.op == "scale" and node.number == 0


def is_weight(graph: Graph, index: int) -> bool:
    """Whether a value is a parameter as it is, be it with a number added (``1 + w``)."""
    node = graph.nodes[index]
    while node.op in ("shift", "view") or (ops.does(node.op, Does.MOVES) and node.op not in ("part", "scale")):
        node = graph.nodes[node.inputs[0]]
    return node.op == "parameter"


def copied(graph: Graph, index: int) -> int:
    """The value behind views, casts and copies of it."""
    while ops.does(graph.nodes[index].op, Does.COPIES):
        index = graph.nodes[index].inputs[0]
    return index
