"""Which values are computed from which, given that a stream which reads another keeps what it read to itself."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from lit_resinit.find.streams import Streams
from lit_resinit.find.views import View, Views
from lit_resinit.graph import ops
from lit_resinit.graph.ops import Does
from lit_resinit.graph.values import Graph


class Reach:
    """Questions of reachability in one graph.

    Args:
        graph: The traced forward.
        streams: The residual additions known so far.
        views: What values show, given these.
        across_parts: Whether one part of a value may be computed from another part of it.
    """

    def __init__(self, graph: Graph, streams: Streams, views: Views, *, across_parts: bool = False) -> None:
        self._graph, self._nodes = graph, graph.nodes
        self._streams, self._views = streams, views
        self._across_parts = across_parts

    def ancestors_among(self, views: Sequence[View], start: int) -> Iterator[View]:
        """The views that ``start`` is computed from, nearest first; the search is local."""
        wanted = {view.value: view for view in views if view.value < start}
        if not wanted:
            return
        lowest = min(wanted)
        own = self.streams_of(start)
        queue, seen = [-start], {start}
        while queue:
            current = -heapq.heappop(queue)
            if current in wanted:
                yield wanted[current]
            if current <= lowest:
                return
            before = self._starts_before(current, lowest)
            if before and not any(self._may_couple(value, current, own) for value in wanted):
                continue
            for source in self._nodes[current].inputs:
                if source >= lowest and source not in seen:
                    seen.add(source)
                    heapq.heappush(queue, -source)

    def _starts_before(self, total: int, lowest: int) -> bool:
        """Whether a sum belongs to a stream that starts before a value, and on which that value does not lie."""
        if total not in self._streams:
            return False
        root = self._streams.root(total)
        return root < lowest and not self._streams.is_on(lowest, root)

    def interior(self, view: View, end: int, *, inside: str = "", coupled: bool = True) -> frozenset[int] | None:
        """Nodes between a value and ``end`` that depend on it; None when ``end`` does not.

        Where the value only enters another stream as its branch (a bias or mask that layers share, a skip output, a
        second stream that reads this one), it is that stream's affair from there on.
        """
        start, found = view.value, set[int]()
        own = self.streams_of(end)
        for index in sorted(self._above(end, start, inside)):
            if self._is_read_by_other(index, start, found) and not (coupled and self._may_couple(start, index, own)):
                continue
            if any(i == start or i in found for i in self._sources(index, view)):
                found.add(index)
        return frozenset(found) if end in found else None

    def _above(self, end: int, start: int, inside: str) -> set[int]:
        seen, stack = {end}, [end]
        while stack:
            for source in self._nodes[stack.pop()].inputs:
                if source > start and source not in seen and self._graph.is_inside(source, inside):
                    seen.add(source)
                    stack.append(source)
        return seen

    def _is_read_by_other(self, index: int, start: int, interior: set[int]) -> bool:
        """Whether a sum goes on with another stream, into which the value enters at most as the branch."""
        other = self._streams.at(index)
        return other is not None and other.skip != start and other.skip not in interior

    def _sources(self, index: int, view: View) -> tuple[int, ...]:
        """What a value is computed from, so that an error can flow back: of a part, only what is in that part."""
        node = self._nodes[index]
        if ops.does(node.op, Does.PICKS):
            return ops.values_of(node.op, node.inputs)
        if view.region is not None and node.op == "part" and node.region != view.region and not self._across_parts:
            return tuple(i for i in node.inputs if i != view.whole)
        if node.shown is not None and view.value not in node.inputs:
            return (node.shown,)
        return node.inputs

    def _may_couple(self, start: int, total: int, own: set[int]) -> bool:
        """Whether a sum of another stream may carry a value on: two streams that update each other in turn (RevNet).

        Not the stream that the summand itself belongs to: a sum of two streams adds no function of either. Nor a stream
        that adds the value as it is, where this is no stream of its own: there it is the branch.
        """
        other = self._streams.at(total)
        assert other is not None
        if self._nodes[start].shape != self._nodes[total].shape or self._streams.root(total) in own:
            return False
        return bool(self.streams_of(start)) or all(v.value != start for v in self._views.shown(other.branch))

    def streams_of(self, summand: int) -> set[int]:
        """Roots of the streams that a summand shows, be it through a norm or a layer."""
        return {self._streams.root(v.value) for v in self._views.projected(summand) if v.value in self._streams}


class Depth:
    """For nodes of a branch: learned layers in series from its start, and whether something bends the way."""

    def __init__(self, graph: Graph, start: int, interior: frozenset[int]) -> None:
        self._depth: dict[int, tuple[int, bool]] = {start: (0, False)}
        nodes = graph.nodes
        for index in sorted(interior):
            node = nodes[index]
            before = [self._depth[i] for i in node.inputs if i in self._depth]
            layers, bent = max(d[0] for d in before), any(d[1] for d in before)
            if ops.does(node.op, Does.APPLIES_WEIGHT) and any(
                nodes[i].learned and not nodes[i].data for i in node.inputs
            ):
                layers += 1
            product = ops.does(node.op, Does.MULTIPLIES)
            bent = bent or (product and len(before) > 1) or not (product or ops.does(node.op, Does.STRAIGHT))
            self._depth[index] = layers, bent

    def of(self, node: int) -> tuple[int, bool]:
        """(layers in series, whether the way is bent) from the start to a node."""
        return self._depth.get(node, (0, False))
