"""Is a sum ``skip + branch``? One candidate after the other, against a table of reasons why it is not.

A candidate says which summand would be the skip, which the branch, and from which value of the stream the branch is
computed. Every rule has a name; a test has an example on which it decides, and one on which it does not.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Literal

from lit_resinit.find.reach import Depth, Reach
from lit_resinit.find.streams import Streams
from lit_resinit.find.sums import NetworkUses, terms
from lit_resinit.find.views import View, Views
from lit_resinit.graph import ops
from lit_resinit.graph.ops import Does
from lit_resinit.graph.values import Graph, Node
from lit_resinit.graph.where import child_of

# A stage of a network halves its resolution, or doubles it; odd sizes and paddings blur that a little.
_SHRUNK, _GROWN = 0.6, 1.5


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a graph before any of its sums is judged."""

    graph: Graph
    readers: list[list[int]]
    uses: NetworkUses


@dataclasses.dataclass(frozen=True)
class Reading:
    """How sums are read at one stage of the search.

    Args:
        facts: What is known of the graph.
        streams: The residual additions found so far.
        lone_factors: Whether a learned factor alone makes a branch (``x + scale * pool(x)``).
        across_parts: Whether a branch may be computed from another part of the value that the skip is a part of.
    """

    facts: Facts
    streams: Streams
    lone_factors: bool = False
    across_parts: bool = False

    @functools.cached_property
    def views(self) -> Views:
        """What values show."""
        return Views(self.facts.graph, self.streams)

    @functools.cached_property
    def reach(self) -> Reach:
        """What is computed from what."""
        return Reach(self.facts.graph, self.streams, self.views, across_parts=self.across_parts)


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to read a sum.

    Args:
        reading: How it is read.
        total: The sum.
        skip: The summand that would go on.
        branch: The other summand.
        view: The value of the stream that the skip shows.
        start: The value that the branch would be computed from: that of the view, or what the addition there reads.
        shown: All that the skip shows.
        block: Dotted name of the module that runs the sum.
        projection: Whether the skip is a projection of the stream.
    """

    reading: Reading
    total: Node
    skip: int
    branch: int
    view: View
    start: View
    shown: list[View]
    block: str
    projection: bool

    @property
    def graph(self) -> Graph:
        """The traced forward."""
        return self.reading.facts.graph

    @functools.cached_property
    def interior(self) -> frozenset[int] | None:
        """The nodes between start and branch; None where the branch does not depend on the start."""
        reach = self.reading.reach
        if self.projection:
            return reach.interior(self.start, self.branch, inside=self.block, coupled=False)
        return reach.interior(self.start, self.branch)

    @property
    def inside(self) -> frozenset[int]:
        """The interior, where there is one."""
        return self.interior or frozenset()

    @functools.cached_property
    def terms(self) -> list[tuple[int, float]]:
        """What the branch adds up."""
        return terms(self.graph, self.branch, self.reading.streams)

    @functools.cached_property
    def net_terms(self) -> list[tuple[int, float]]:
        """What is left of them where a value is added and taken away again."""
        net: dict[int, float] = {}
        for node, factor in self.terms:
            net[node] = net.get(node, 0.0) + factor
        return [(node, factor) for node, factor in net.items() if factor != 0.0]

    @functools.cached_property
    def depth(self) -> Depth:
        """Layers in series from the start."""
        return Depth(self.graph, self.start.value, self.inside)


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A reason why a candidate is no residual addition.

    Args:
        name: What the command line shows.
        when: Whether it holds.
        seen_in: A network that has such sums.
        skip: For which candidates it is asked.
    """

    name: str
    when: Callable[[Case], bool]
    seen_in: str
    skip: Literal["identity", "projection", "any"] = "any"


def refusal(case: Case) -> Rule | None:
    """The first rule by which a candidate is no residual addition; None when it is one."""
    kind = "projection" if case.projection else "identity"
    return next((rule for rule in RULES if rule.skip in ("any", kind) and rule.when(case)), None)


# -------------------------------------------------------------------- what the skip is


def _is_subtracted(case: Case) -> bool:
    return case.reading.views.factor_of(case.view) < 0


def _cancels(case: Case) -> bool:
    """The skip is taken away again by the branch, or all that is left of the branch is not computed from the stream."""
    views = case.reading.views
    skip = {v.value: views.factor_of(v) for v in case.shown if v.region is None and not v.layers and not v.norms}
    if any(skip.get(node) == -factor for node, factor in case.net_terms):
        return True
    if any(skip.get(node) == -factor for node, factor in _carried(case)):
        return True
    return len(case.terms) > len(case.net_terms) and not any(node in case.inside for node, _ in case.net_terms)


def _carried(case: Case) -> Iterator[tuple[int, float]]:
    """What the streams in the branch started from, with its factor: ``x - r`` after ``r = r - f(r)`` takes x away."""
    streams, views = case.reading.streams, case.reading.views
    for term, factor in case.net_terms:
        total = term
        while (addition := streams.at(total)) is not None:
            shown = views.shown(addition.skip)
            found = next((v for v in shown if v.value in streams), shown[-1])
            for view in shown:
                if view.value < total:
                    yield view.value, factor * views.factor_of(view)
            factor *= views.factor_of(found)
            if found.value not in streams:
                break
            total = found.value


def _is_projected_once(case: Case) -> bool:
    return any(view.value in case.inside for view in case.shown if view.value > case.view.value)


def _mixes(case: Case) -> bool:
    views, streams = case.reading.views, case.reading.streams
    shown = views.shown(case.skip) if case.projection else [case.view]
    return any(map(views.is_rescaled, shown)) and any(
        v.value in streams and (views.is_rescaled(v) or streams.is_on(case.view.value, streams.root(v.value)))
        for v in views.shown(case.branch)
    )


def _is_spread(case: Case) -> bool:
    """The skip is a mean, or another reduction, that was spread over many elements again: no stream goes on in it."""
    nodes, spread = case.graph.nodes, False
    for view in case.shown:
        node = nodes[view.value]
        spread = spread or (bool(node.inputs) and math.prod(node.shape) > math.prod(nodes[node.inputs[0]].shape))
        if spread and ops.does(node.op, Does.REDUCES):
            return True
        if view.value == case.view.value:
            return False
    return False


def _is_earlier_sum(case: Case) -> bool:
    """What the stream was before is added to it as it is; where it is scaled or transformed, that is a branch."""
    views, streams = case.reading.views, case.reading.streams
    earlier = case.start.value != case.view.value and not case.projection
    return earlier and any(v.value in streams and not views.is_rescaled(v) for v in views.shown(case.branch))


def _scales_both(case: Case) -> bool:
    return case.reading.lone_factors and case.reading.views.is_rescaled(case.view)


# -------------------------------------------------------------------- what the branch is


def _learns_nothing(case: Case) -> bool:
    """No learned layer or norm lies between (nor a factor, where these count); a lone bias is arithmetic."""
    nodes = case.graph.nodes
    shared = set[int]() if case.projection else {v.value for v in case.shown}
    own = case.inside - shared
    return not any(
        nodes[i].learned and not nodes[i].data and i != case.start.value and i not in own
        for index in own
        if _is_learned_step(case, nodes[index])
        for i in nodes[index].inputs
    )


def _is_learned_step(case: Case, node: Node) -> bool:
    if node.op == "mul":
        return case.reading.lone_factors or any(case.graph.nodes[i].op == "norm" for i in node.inputs)
    return not ops.does(node.op, Does.SELECTS)


def _is_one_kernel(case: Case) -> bool:
    nodes = case.graph.nodes
    pooled = math.prod(nodes[case.start.value].shape) > math.prod(case.total.shape)
    return (len(case.terms) > 1 or pooled) and all(
        case.depth.of(term) == (1, False) for term, _ in case.terms if term in case.inside
    )


def _goes_down_and_up(case: Case) -> bool:
    """Every path goes down in resolution and up again through several modules."""
    graph, start = case.graph, case.start.value
    if graph.nodes[start].shape[2:] != graph.nodes[case.branch].shape[2:]:
        return False
    flat, children = {start}, set()
    for index in sorted(case.inside):
        node = graph.nodes[index]
        if _shrinks(graph, node):
            children.add(child_of(graph.owner(index), case.block))
        elif any(i in flat for i in node.inputs):
            flat.add(index)
    if case.branch in flat:
        return False
    children |= {child_of(graph.owner(i), case.block) for i in case.inside if _grows(graph, graph.nodes[i])}
    return len(children) > 1 or (not case.block and "" in children)


def _shrinks(graph: Graph, node: Node) -> bool:
    return (node.op == "conv" or ops.does(node.op, Does.SHRINKS)) and _growth(graph, node) <= _SHRUNK


def _grows(graph: Graph, node: Node) -> bool:
    up = node.op == "conv" or node.op.lstrip("_").startswith(("upsample", "pixel_shuffle"))
    return up and _growth(graph, node) >= _GROWN


def _growth(graph: Graph, node: Node) -> float:
    before = math.prod(graph.nodes[node.inputs[0]].shape[2:])
    return math.prod(node.shape[2:]) / before if before else 1.0


def _is_private(case: Case) -> bool:
    """Whether nobody but skip and sum reads what the branch computes on its way."""
    nodes = case.graph.nodes
    known = {case.total.index, *(v.value for v in case.shown)}
    facts = case.reading.facts
    inner = (r for i in case.inside if i != case.branch for r in facts.readers[i])
    return all(r in case.inside or r in known or nodes[r].op == "statistic" or _is_kept_copy(facts, r) for r in inner)


def _is_kept_copy(facts: Facts, index: int) -> bool:
    """Whether a value is a copy that nobody reads: autograd keeps one before an operation in place."""
    copied = ops.does(facts.graph.nodes[index].op, Does.COPIES)
    return copied and not facts.readers[index] and not facts.uses.has(index)


def _adds_up_heads(case: Case) -> bool:
    return not case.reading.facts.uses.feeds_layer(case.total.index) and not _is_private(case)


def _is_no_deeper(case: Case) -> bool:
    layers, bent = case.depth.of(case.branch)
    return not layers or layers + bent <= max(1, case.view.layers)


def _draws(case: Case) -> bool:
    nodes = case.graph.nodes
    return any(ops.does(nodes[i].op, Does.DRAWS) for index in case.inside for i in nodes[index].inputs)


# -------------------------------------------------------------------- what becomes of the sum


def _is_gated(case: Case) -> bool:
    """The sum is only ever multiplied by something that is computed from the stream and not from the sum."""
    readers, nodes = case.reading.facts.readers, case.graph.nodes
    stack, products = list(readers[case.total.index]), []
    while stack:
        node = nodes[stack.pop()]
        if _only_moving(case.graph, node) is not None and node.op != "part":
            stack.extend(readers[node.index])
        elif node.op == "mul" and node.inputs[0] != node.inputs[1]:
            products.append(node)
        else:
            return False
    return bool(products) and all(_is_gated_by_stream(case, node) for node in products)


def _only_moving(graph: Graph, node: Node) -> int | None:
    """The one input of a function of one value, which nothing learned takes part in."""
    moving = [i for i in node.inputs if graph.nodes[i].data]
    alone = len(moving) == 1 and not any(graph.nodes[i].learned for i in node.inputs if i != moving[0])
    return moving[0] if alone and node.op != "norm" else None


def _is_gated_by_stream(case: Case, product: Node) -> bool:
    total, reach, start = case.total.index, case.reading.reach, case.start.value
    while (behind := _only_moving(case.graph, case.graph.nodes[start])) is not None:
        start = behind
    others = [i for i in product.inputs if i != total and not reach.interior(View(total), i)]
    return bool(others) and all(reach.interior(View(start), i) for i in others)


RULES: tuple[Rule, ...] = (
    Rule("subtracted skip", _is_subtracted, "y - x: what is subtracted does not go on"),
    Rule("cancels", _cancels, "x + (f(x) - x): a straight-through estimator"),
    Rule("one projection", _is_projected_once, "l(x) + l(x) ** 3: a GELU that is written out", "projection"),
    Rule("spread mean", _is_spread, "net((x - mean) / deviation) + mean: a statistic that is put back", "identity"),
    Rule("mix of streams", _mixes, "a * x + b * y with learned factors: a weighted mean of two streams"),
    Rule("an earlier sum again", _is_earlier_sum, "up(s) + s of an additive U-Net", "identity"),
    Rule("factor on both", _scales_both, "a * x + b * pool(x): the logits of graph attention", "identity"),
    Rule("nothing learned", _learns_nothing, "x + pool(x): arithmetic"),
    Rule("heads added up", _adds_up_heads, "two output heads on one stream", "projection"),
    Rule("one kernel", _is_one_kernel, "x + conv3(x) + conv1(x): parallel layers that are one", "identity"),
    Rule("no deeper than its skip", _is_no_deeper, "conv3(x) + conv1(x), MLP gates", "projection"),
    Rule("random draw", _draws, "mean + noise * deviation: the latent of an autoencoder", "projection"),
    Rule("down and up again", _goes_down_and_up, "an additive U-Net"),
    Rule("gated update", _is_gated, "(x + f(x)) * sigmoid(t(x)): a highway", "identity"),
)
