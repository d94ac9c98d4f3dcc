"""Residual additions of a graph: candidates for every sum, judged in stages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from lit_resinit.find import rules
from lit_resinit.find.rules import Case, Facts, Reading
from lit_resinit.find.streams import Addition, Streams
from lit_resinit.find.sums import NetworkUses, visible_sums
from lit_resinit.find.views import View, copied
from lit_resinit.graph import ops
from lit_resinit.graph.ops import Does
from lit_resinit.graph.values import Graph, Node
from lit_resinit.graph.where import Address, AddressBook, common_parent

_LIMIT = 64  # values looked at behind one operand: where it is a part, that shows within a few sums


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a graph holds.

    Args:
        streams: The residual additions.
        refused: For every other sum the rules by which it is none; where no rule is named, no summand is computed from
            the other, nor both from one value.
        facts: What was known before any sum was judged.
        addresses: Where every operation runs, in the order of execution.
    """

    streams: Streams
    refused: dict[int, tuple[str, ...]]
    facts: Facts
    addresses: list[Address]

    def skip(self, total: int) -> Literal["identity", "projection"] | None:
        """The kind of skip of a residual sum; None for any other."""
        addition = self.streams.at(total)
        return None if addition is None else "projection" if addition.projection else "identity"


def find_additions(graph: Graph) -> list[Addition]:
    """Every residual addition of the graph, in the order of execution."""
    return list(find(graph).streams)


def find(graph: Graph) -> Found:
    """Judge every sum of a graph."""
    return _Search(graph).run()


def addresses(graph: Graph) -> list[Address]:
    """Where every operation runs, in the order of execution."""
    book = AddressBook()
    return [book.next(call.owner, call.line, ops.base_name(call.func)) for call in graph.calls]


class _Search:
    """The stages: each takes what was found, adds to it or leaves out of it, and says why."""

    def __init__(self, graph: Graph) -> None:
        readers = graph.consumers()
        self.graph, self.nodes = graph, graph.nodes
        self.facts = Facts(graph, readers, NetworkUses(graph, readers))
        self.where = addresses(graph)
        self.refused: dict[int, dict[str, None]] = {}  # names in the order in which they were given
        self.sums = [n for n in visible_sums(graph) if self._may_be_residual(n)]

    def run(self) -> Found:
        streams = Streams(self.graph)
        for stage in STAGES:
            streams = stage(self, streams)
        refused = {node: tuple(names) for node, names in self.refused.items() if node not in streams}
        return Found(streams, refused, self.facts, self.where)

    def _may_be_residual(self, node: Node) -> bool:
        why = (
            "a single number"
            if math.prod(node.shape) <= 1
            else "twice the same"
            if node.inputs[0] == node.inputs[1]
            else "arithmetic of the loss"
            if not self.facts.uses.has(node.index)
            else ""
        )
        if why:
            self.refused[node.index] = {why: None}
        return not why

    def judge(self, reading: Reading, sums: Iterable[Node]) -> Streams:
        """Judge sums in the order of execution; each may go on with what was found before."""
        for node in sums:
            addition = self._judge_sum(reading, node)
            if addition is not None:
                reading.streams.add(addition)
        return Streams(self.graph, reading.streams)

    def _judge_sum(self, reading: Reading, node: Node) -> Addition | None:
        refused = self.refused.setdefault(node.index, {})
        for case in candidates(reading, node, self.where[node.call].block):
            if case.interior is None:
                continue
            rule = rules.refusal(case)
            if rule is None:
                return self._addition(case)
            refused[rule.name] = None
        return None

    def _addition(self, case: Case) -> Addition:
        address = self.where[case.total.call]
        return Addition(
            case.total.index,
            case.skip,
            case.branch,
            case.view.value,
            case.projection,
            case.view.scales,
            case.inside,
            address.block,
            address,
        )

    def leave_out(self, streams: Streams, nodes: Iterable[int], why: str) -> Streams:
        """The streams without some of their additions."""
        dropped = dict.fromkeys(nodes)
        for node in dropped:
            self.refused[node][why] = None
        return Streams(self.graph, streams.without(dropped.keys())) if dropped else streams


# -------------------------------------------------------------------- candidates


def candidates(reading: Reading, total: Node, block: str) -> Iterator[Case]:
    """Every way to read a sum: first with either summand as the stream itself, then as its projection."""
    nodes = reading.facts.graph.nodes
    left, right = total.inputs
    pairs = [(s, b) for s, b in ((left, right), (right, left)) if nodes[s].shape == total.shape]
    for skip, branch in pairs:
        yield from _as_identity(reading, total, skip, branch, block)
    for skip, branch in pairs if len(pairs) == 2 else ():
        yield from _as_projection(reading, total, skip, branch, block)


def _as_identity(reading: Reading, total: Node, skip: int, branch: int, block: str) -> Iterator[Case]:
    """The branch is computed from a value that the skip shows, or from what the addition there reads itself."""
    shown = reading.views.shown(skip)
    above = list(reading.reach.ancestors_among(shown, branch))
    for view in above:
        yield Case(reading, total, skip, branch, view, view, shown, block, projection=False)
    for operand in _operands(reading, shown[-1].value):
        if next(reading.reach.ancestors_among([View(operand)], branch), None) is not None:
            yield Case(reading, total, skip, branch, shown[-1], View(operand), shown, block, projection=False)
    for view, addition in _goes_on_from(reading, skip, shown):
        if next(reading.reach.ancestors_among([View(addition)], branch), None) is None:
            for start in _earlier(reading, addition):
                yield Case(reading, total, skip, branch, view, View(start), shown, block, projection=False)


def _operands(reading: Reading, value: int) -> list[int]:
    """What a concatenation joins, where that is no one value: the branch may be computed from these."""
    nodes = reading.facts.graph.nodes
    return [i for i in nodes[value].inputs if nodes[i].data] if nodes[value].op == "cat" else []


def _goes_on_from(reading: Reading, skip: int, shown: list[View]) -> Iterator[tuple[View, int]]:
    """The additions whose sum the skip shows, or has normalised."""
    for view in shown:
        if view.value in reading.streams and view.region is None:
            yield view, view.value
    for view in reading.views.projected(skip):
        if view.norms and not view.layers and view.value in reading.streams:
            yield View(skip), view.value


def _earlier(reading: Reading, addition: int) -> Iterator[int]:
    """What the stream was before an addition: what that one reads, and where the stream starts."""
    found = reading.streams.at(addition)
    assert found is not None
    yield from dict.fromkeys((found.stream, reading.streams.root(addition)))


def _as_projection(reading: Reading, total: Node, skip: int, branch: int, block: str) -> Iterator[Case]:
    """Both are computed from one value, the skip by at most one layer and norms."""
    graph, shown = reading.facts.graph, reading.views.projected(skip)
    block = common_parent((block, graph.owner(skip), graph.owner(branch)))
    wanted = [view for view in shown if (view.layers or view.norms) and view.value < branch]
    for view in sorted(wanted, key=lambda v: -v.value):
        yield Case(reading, total, skip, branch, view, view, shown, block, projection=True)


# -------------------------------------------------------------------- stages


def _alone(search: _Search, streams: Streams) -> Streams:
    """Every sum for itself."""
    return search.judge(Reading(search.facts, streams), search.sums)


def _without_summands(search: _Search, streams: Streams) -> Streams:
    """``(conv(n) + mlp(n)) + x`` is one branch with two summands, not a projection inside a branch."""
    dropped: set[int] = set()
    for addition in streams:
        if not addition.projection and addition.node not in dropped:
            dropped |= _projections_added_up(search.graph, streams, addition, dropped)
    return search.leave_out(streams, dropped, "summand of a branch")


def _projections_added_up(graph: Graph, streams: Streams, addition: Addition, dropped: set[int]) -> set[int]:
    found, stack = set[int](), [addition.branch]
    while stack:
        node = graph.nodes[stack.pop()]
        inner = streams.at(node.index) if node.index not in dropped else None
        if inner is not None and inner.projection and inner.stream != addition.node:
            found.add(node.index)
        if inner is None or inner.projection:
            if node.op == "add":
                stack.extend(node.inputs)
            elif ops.does(node.op, Does.COPIES) or node.op == "scale":
                stack.append(node.inputs[0])
    return found


def _without_inner_arithmetic(search: _Search, streams: Streams) -> Streams:
    """A learned factor on the skip of a sum inside a branch is that branch's own arithmetic (a D term, a mix)."""
    inside = {i for a in streams if not a.scales for i in a.interior}
    dropped = [a.node for a in streams if a.node in inside and any(search.nodes[i].op == "mul" for i in a.scales)]
    return search.leave_out(streams, dropped, "arithmetic of a branch")


def _factors_on_a_stream(search: _Search, streams: Streams) -> Streams:
    """``x + scale * pool(x)`` on the stream is a branch; inside another branch it is that branch's arithmetic."""
    inside = set[int]().union(*(a.interior for a in streams))
    left = [n for n in search.sums if n.index not in streams and n.index not in inside]
    return search.judge(Reading(search.facts, streams, lone_factors=True), left)


def _without_sums_of_streams(search: _Search, streams: Streams) -> Streams:
    """A summand that another sum carries on as its stream is no branch: a position is added for one reader.

    Without such sums that other one may be found at last, which read what they made.
    """
    carried = _carried(search, streams)
    ahead = {a.node: _goes_on_in(search, streams, a) for a in streams}
    dropped = [a.node for a in streams if carried.get(a.branch, set()) - {a.node} or ahead[a.node]]
    left = search.leave_out(streams, dropped, "sum of two streams")
    others = sorted({node for node in ahead.values() if node is not None and node not in left})
    return search.judge(Reading(search.facts, left), [search.nodes[i] for i in others]) if others else left


def _goes_on_in(search: _Search, streams: Streams, addition: Addition) -> int | None:
    """The sum in which the branch goes on, the other summand of which is computed from this addition."""
    reach = Reading(search.facts, streams).reach
    for reader in search.facts.readers[addition.branch]:
        node = search.nodes[reader]
        if node.op == "add" and reader != addition.node:
            other = next((i for i in node.inputs if i != addition.branch), addition.branch)
            if other > addition.node and reach.interior(View(addition.node), other):
                return reader
    return None


def _couplings(search: _Search, streams: Streams) -> Streams:
    """``part + f(other part)`` is a branch where a stream goes on from that part, or the parts are joined again."""
    carried = _carried(search, streams).keys() | _joined(search, streams)
    left = [n for n in search.sums if n.index in carried and n.index not in streams]
    return search.judge(Reading(search.facts, streams, lone_factors=True, across_parts=True), left)


def _joined(search: _Search, streams: Streams) -> set[int]:
    """The sums of a part of a value that a concatenation joins with another part of it."""
    found: set[int] = set()
    reading = Reading(search.facts, streams)
    for node in search.nodes:
        if node.op == "cat":
            operands = {copied(search.graph, i): _wholes(reading, copied(search.graph, i)) for i in node.inputs}
            for operand, wholes in operands.items():
                others = set[int]().union(*(w for o, w in operands.items() if o != operand))
                if wholes & others:
                    found.add(operand)
    return found


def _wholes(reading: Reading, value: int) -> set[int]:
    """The values that a value, or one of the summands that it was before, is a part of."""
    nodes, found, stack, seen = reading.facts.graph.nodes, set[int](), [value], {value}
    while stack and len(seen) < _LIMIT:
        shown = reading.views.shown(stack.pop())
        found |= {view.whole for view in shown if view.region is not None}
        end = nodes[shown[-1].value]
        fresh = set(end.inputs) - seen if end.op == "add" else set[int]()
        seen |= fresh
        stack += fresh
    return found


def _carried(search: _Search, streams: Streams) -> dict[int, set[int]]:
    """The values that additions show as their skip, with these additions."""
    views = Reading(search.facts, streams).views
    skips: dict[int, set[int]] = {}
    for addition in streams:
        for view in views.shown(addition.skip):
            skips.setdefault(view.value, set()).add(addition.node)
    return skips


Stage = Callable[[_Search, Streams], Streams]
STAGES: tuple[Stage, ...] = (
    _alone,
    _without_summands,
    _without_inner_arithmetic,
    _factors_on_a_stream,
    _without_sums_of_streams,
    _couplings,
)
