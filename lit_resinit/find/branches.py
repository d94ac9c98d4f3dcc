"""Residual additions in a graph: which sums are ``skip + branch``, and what their stream is."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterator

from lit_resinit.graph import ops
from lit_resinit.graph.tensors import are_apart
from lit_resinit.graph.values import Graph, Node

# What a stream may pass and still be the stream: nothing here changes a value that it keeps.
_STREAM_OPS = ops.MOVES | {"view", "part", "scale", "cat", "shift"}
_LINEAR_OPS = _STREAM_OPS | ops.PLACEMENTS | {"norm", "add", "mm", "conv", "statistic", "stack"}
_SELECTIONS = frozenset(["add", "maximum", "minimum", "where", "cat", "stack", "copy_into"])
_WALK_LIMIT = 64


@dataclasses.dataclass(slots=True, eq=False)
class Addition:
    """One residual addition of a graph.

    ``stream`` is the value on the residual stream that the branch reads, ``skip`` and ``branch`` are the two summands,
    ``interior`` are the nodes of the branch (everything between ``stream`` and ``branch``).
    """

    node: int
    skip: int
    branch: int
    stream: int
    projection: bool
    scales: tuple[int, ...]
    interior: frozenset[int]
    block: str
    address: Address
    previous: Addition | None = None
    between: tuple[int, ...] = ()
    root: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """Where an addition runs, the same in every forward: module, line, operation, and its count there."""

    block: str
    line: str
    op: str
    count: int


@dataclasses.dataclass(slots=True)
class _Link:
    """One step down a skip: a node, the factors passed so far, and which part of which value was taken."""

    node: int
    scales: tuple[int, ...] = ()
    region: tuple[object, ...] | None = None
    whole: int = -1
    layers: int = 0
    norms: int = 0


def find_additions(graph: Graph) -> list[Addition]:
    """Every residual addition of the graph, in the order of execution."""
    return _Finder(graph).run()


def addresses(graph: Graph) -> list[Address]:
    """Where every operation runs, in the order of execution."""
    found: list[Address] = []
    counts: dict[tuple[str, str, str], int] = {}
    for call in graph.calls:
        key = (call.owner, call.line, ops.base_name(call.func))
        counts[key] = counts.get(key, -1) + 1
        found.append(Address(*key, counts[key]))
    return found


def visible_sums(graph: Graph) -> list[Node]:
    """Every addition but the inner parts of an operation, which the model cannot see."""
    return [n for n in graph.nodes if n.op == "add" and n.call >= 0 and n.index in graph.calls[n.call].outputs]


class _Finder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes = graph.nodes
        self.found: dict[int, Addition] = {}
        self.readers = graph.consumers()
        self.uses = NetworkUses(graph, self.readers)
        self.lone_factors = False
        self.across_parts = False

    def run(self) -> list[Addition]:
        where = addresses(self.graph)
        sums = [n for n in visible_sums(self.graph) if math.prod(n.shape) > 1 and n.inputs[0] != n.inputs[1]]
        for node in sums:
            self._note(self._residual(node, where[node.call]))
        self._drop_summands()
        self._drop_inner_scaled()
        self._find_lone_factors(sums, where)
        self._drop_sums_of_streams()
        self._find_couplings(sums, where)
        self._drop_loss_terms()
        self.found = dict(sorted(self.found.items()))
        for addition in self.found.values():
            self._link(addition)
        return list(self.found.values())

    def _note(self, addition: Addition | None) -> None:
        if addition is not None:
            self._link(addition)
            self.found[addition.node] = addition

    def _find_lone_factors(self, sums: list[Node], where: list[Address]) -> None:
        """``x + scale * pool(x)`` on the stream is a branch; inside another branch it is that branch's arithmetic."""
        inside = set[int]().union(*(a.interior for a in self.found.values()))
        self.lone_factors = True
        for node in sums:
            if node.index not in self.found and node.index not in inside:
                self._note(self._residual(node, where[node.call]))

    def _find_couplings(self, sums: list[Node], where: list[Address]) -> None:
        """``part + f(other part)`` is a branch where a stream goes on from that part."""
        self.across_parts = True
        carried = set(self._carried())
        for node in sums:
            if node.index in carried and node.index not in self.found:
                self._note(self._residual(node, where[node.call]))

    def _carried(self) -> dict[int, set[int]]:
        """The values that additions show as their skip, with these additions."""
        skips: dict[int, set[int]] = {}
        for addition in self.found.values():
            for link in self._stream_chain(addition.skip):
                skips.setdefault(link.node, set()).add(addition.node)
        return skips

    def _residual(self, node: Node, address: Address) -> Addition | None:
        left, right = node.inputs
        pairs = [(s, b) for s, b in ((left, right), (right, left)) if self.nodes[s].shape == node.shape]
        for skip, branch in pairs:
            addition = self._identity(node, skip, branch, address)
            if addition is not None:
                return addition
        for skip, branch in pairs if len(pairs) == 2 else ():
            addition = self._projection(node, skip, branch, address)
            if addition is not None:
                return addition
        return None

    # ---------------------------------------------------------------- identity skip

    def _identity(self, node: Node, skip: int, branch: int, address: Address) -> Addition | None:
        chain = [link for link in self._stream_chain(skip) if not self._is_negated(link)]
        above = list(self._ancestors_among(chain, branch))
        starts = [(link, link) for link in above] + [
            (link, _Link(self.found[link.node].stream))
            for link in chain
            if link.node in self.found and link.region is None and link not in above
        ]
        if self._cancels(chain, branch):
            return None
        shared, mixed = {link.node for link in chain}, self._is_scaled_stream(branch)
        for link, start in starts:
            if self._is_rescaled(link) and (self.lone_factors or mixed):
                continue
            interior = self._interior(start, branch)
            pooled = math.prod(self.nodes[start.node].shape) > math.prod(node.shape)
            if interior is not None and self._is_branch(start.node, branch, interior, shared, address.block, pooled):
                if self._is_blend(node.index, start.node):
                    return None
                return Addition(
                    node.index, skip, branch, link.node, False, link.scales, interior, address.block, address
                )
        return None

    def _is_rescaled(self, link: _Link) -> bool:
        """A learned factor on both summands mixes two views of one value (the logits of graph attention)."""
        return any(self.nodes[i].op == "mul" and self.nodes[i].learned for i in link.scales)

    def _is_scaled_stream(self, summand: int) -> bool:
        """``a * x`` with a learned factor on the stream itself: beside ``b * y`` it is a mix, no branch."""
        return any(self._is_rescaled(link) for link in self._stream_chain(summand) if link.node in self.found)

    def _is_negated(self, link: _Link) -> bool:
        """A value that is subtracted from something is no stream that goes on."""
        return self._factor_of(link) < 0

    def _factor_of(self, link: _Link) -> float:
        numbers = (self.nodes[i].number for i in link.scales)
        return math.prod(n for n in numbers if n is not None)

    def _cancels(self, chain: list[_Link], branch: int) -> bool:
        """``x + (f(x) - x)`` is ``f(x)``: a straight-through estimator, no stream that goes on."""
        skip = {link.node: self._factor_of(link) for link in chain if link.region is None}
        return any(skip.get(node) == -factor for node, factor in self._summands(branch))

    def _stream_chain(self, start: int) -> list[_Link]:
        """The values a summand shows, from itself back through views, padding, pooling and factors."""
        chain = [_Link(start)]
        while len(chain) < _WALK_LIMIT:
            link = chain[-1]
            step = self._stream_step(link)
            if step is None:
                break
            chain.append(step)
        return chain

    def _stream_step(self, link: _Link) -> _Link | None:
        node = self.nodes[link.node]
        if node.shown is not None:
            return _Link(node.shown, link.scales, link.region, link.whole)
        if node.op == "cat":
            return self._through_concatenation(link, node)
        if node.op == "copy_into":
            return self._through_writing(link, node)
        if node.op == "shift" and node.number != 0:
            return None
        if node.op in _STREAM_OPS and node.inputs:
            scales = (*link.scales, node.index) if node.op == "scale" else link.scales
            region, whole = (node.region, node.inputs[0]) if node.op == "part" else (link.region, link.whole)
            return _Link(node.inputs[0], scales, region, whole)
        if node.op in ("mul", "add"):  # a learned or constant factor, or bias, of the stream
            factor = self._factor(node)
            if factor is not None:
                scales = (*link.scales, node.index) if node.op == "mul" else link.scales
                return _Link(factor[0], scales, link.region, link.whole)
        return None

    def _through_concatenation(self, link: _Link, node: Node) -> _Link | None:
        """A concatenation is the stream when all its moving parts are cut from the same value."""
        parts = [i for i in node.inputs if self.nodes[i].data or self.nodes[i].learned]
        if not parts:
            return None
        if len(parts) == 1:
            return _Link(parts[0], link.scales, link.region, link.whole)
        chains = [[step.node for step in self._stream_chain(part)] for part in parts]
        shared = set(chains[0]).intersection(*chains[1:])
        return _Link(max(shared), link.scales, None) if shared else None

    def _through_writing(self, link: _Link, node: Node) -> _Link | None:
        """What is written over a part: elsewhere and under constants the stream stays, an addition goes on with it."""
        whole, written = node.inputs
        if link.region is not None and link.region == node.region:
            return _Link(written, link.scales)
        elsewhere = link.region is not None and node.region is not None and are_apart(link.region, node.region)
        if elsewhere or not self._moves(written):
            return _Link(whole, link.scales, link.region, whole if link.region is not None else link.whole)
        shown = next((step.node for step in self._stream_chain(written) if step.node in self.found), None)
        return None if shown is None else _Link(shown, link.scales)

    def _factor(self, node: Node) -> tuple[int, int] | None:
        """(moving operand, constant or learned operand) of a product or sum with something that does not see the data.

        Where neither does (a stream of learned queries that has read nothing yet), the bare parameter is the factor.
        """
        left, right = node.inputs
        if not self._moves(left) and not self._moves(right):
            bare = [i for i in (left, right) if is_weight(self.graph, i)]
            return (left if bare == [right] else right, bare[0]) if len(bare) == 1 else None
        if self._moves(left) and not self._moves(right):
            return left, right
        if self._moves(right) and not self._moves(left):
            return right, left
        return None

    def _moves(self, index: int) -> bool:
        return self.nodes[index].data

    # ---------------------------------------------------------------- ancestors and interior

    def _ancestors_among(self, chain: list[_Link], start: int) -> Iterator[_Link]:
        """The links of the chain that ``start`` is computed from, nearest first; the search is local."""
        wanted = {link.node: link for link in chain if link.node < start}
        if not wanted:
            return
        lowest = min(wanted)
        own = self._streams_of(start)
        queue, seen = [-start], {start}
        while queue:
            current = -heapq.heappop(queue)
            if current in wanted:
                yield wanted[current]
            if current <= lowest:
                return
            earlier = self.found.get(current)
            apart = earlier is not None and earlier.root < lowest and not self._on_stream(lowest, earlier.root)
            if apart and not self._may_couple(lowest, current, own):
                continue
            for source in self.nodes[current].inputs:
                if source >= lowest and source not in seen:
                    seen.add(source)
                    heapq.heappush(queue, -source)

    def _on_stream(self, node: int, root: int) -> bool:
        known = self.found.get(node)
        return node == root or (known is not None and known.root == root)

    def _interior(self, link: _Link, end: int, *, inside: str = "", coupled: bool = True) -> frozenset[int] | None:
        """Nodes between a value and ``end`` that depend on it; None when ``end`` does not.

        Where the value only enters another stream as its branch (a bias or mask that layers share, a skip output, a
        second stream that reads this one), it is that stream's affair from there on.
        """
        start, seen, stack = link.node, {end}, [end]
        while stack:
            for source in self.nodes[stack.pop()].inputs:
                if source > start and source not in seen and self.graph.is_inside(source, inside):
                    seen.add(source)
                    stack.append(source)
        interior: set[int] = set()
        own = self._streams_of(end)
        for index in sorted(seen):
            node = self.nodes[index]
            other_part = link.region is not None and node.op == "part" and node.region != link.region
            sources = node.inputs
            if other_part and not self.across_parts:
                sources = tuple(i for i in sources if i != link.whole)
            elif node.shown is not None and start not in sources:
                sources = (node.shown,)
            other = self.found.get(index)
            apart = other is not None and other.skip != start and other.skip not in interior
            if apart and not (coupled and self._may_couple(start, index, own)):
                continue
            if any(i == start or i in interior for i in sources):
                interior.add(index)
        return frozenset(interior) if end in interior else None

    def _may_couple(self, start: int, total: int, own: set[int]) -> bool:
        """Whether a sum of another stream may carry a value on: two streams that update each other in turn (RevNet).

        Not the stream that the summand itself belongs to: a sum of two streams adds no function of either. Nor a stream
        that adds the value as it is, where this is no stream of its own: there it is the branch.
        """
        other = self.found[total]
        if self.nodes[start].shape != self.nodes[total].shape or other.root in own:
            return False
        return bool(self._streams_of(start)) or all(link.node != start for link in self._stream_chain(other.branch))

    def _streams_of(self, summand: int) -> set[int]:
        """Roots of the streams that a summand shows, be it through a norm or a layer."""
        return {self.found[link.node].root for link in self._projection_chain(summand) if link.node in self.found}

    # ---------------------------------------------------------------- what counts as a branch

    def _is_branch(
        self, start: int, end: int, interior: frozenset[int], shared: set[int], block: str, pooled: bool
    ) -> bool:
        return (
            self._learns(start, interior - shared)
            and not self._is_fused_kernel(start, end, interior, pooled)
            and not self._is_u_shaped(start, end, interior, block)
        )

    def _learns(self, start: int, interior: frozenset[int]) -> bool:
        """Whether a learned layer or norm lies between (or a factor, where these count); a lone bias is arithmetic."""
        return any(
            self.nodes[i].learned and not self.nodes[i].data and i != start and i not in interior
            for index in interior
            if self._is_learned_step(self.nodes[index])
            for i in self.nodes[index].inputs
        )

    def _is_learned_step(self, node: Node) -> bool:
        if node.op == "mul":
            return self.lone_factors or any(self.nodes[i].op == "norm" for i in node.inputs)
        return node.op not in _SELECTIONS

    def _is_blend(self, total: int, start: int) -> bool:
        """Whether the sum is only ever multiplied by something computed from the stream: a gated update, no stream."""
        stack, others = list(self.readers[total]), []
        while stack:
            node = self.nodes[stack.pop()]
            if node.op in ("view", "clone", "scale"):
                stack.extend(self.readers[node.index])
            elif node.op == "mul" and node.inputs[0] != node.inputs[1]:
                others.append(node)
            else:
                return False
        return bool(others) and all(self._gated_by_stream(node, total, start) for node in others)

    def _gated_by_stream(self, product: Node, total: int, start: int) -> bool:
        shown = {total, *(link.node for i in product.inputs for link in self._stream_chain(i) if link.node == total)}
        factors = [i for i in product.inputs if not shown & {link.node for link in self._stream_chain(i)}]
        return all(self._interior(_Link(start), i) and not self._interior(_Link(total), i) for i in factors)

    def _is_fused_kernel(self, start: int, end: int, interior: frozenset[int], pooled: bool) -> bool:
        """Parallel linear paths that could be one kernel: ``conv3(x) + conv1(x) + x``, or ``pool(x) + conv(x)``."""
        summands = self._summands(end)
        return (len(summands) > 1 or pooled) and all(
            _Depth(self, start, interior).of(s) == (1, False) for s, _ in summands if s in interior
        )

    def _summands(self, end: int) -> list[tuple[int, float]]:
        """The values that a sum adds up, with their constant factors."""
        stack, leaves = [(end, 1.0)], []
        while stack:
            index, factor = stack.pop()
            node = self.nodes[index]
            if node.op == "add" and all(self.nodes[i].data for i in node.inputs) and index not in self.found:
                stack += [(i, factor) for i in node.inputs]
            elif node.op in ("view", "scale", "clone") or (node.op == "shift" and node.number == 0):
                number = node.number if node.op == "scale" else 1.0
                stack.append((node.inputs[0], factor * (math.nan if number is None else number)))
            else:
                leaves.append((index, factor))
        return leaves

    def _is_u_shaped(self, start: int, end: int, interior: frozenset[int], block: str) -> bool:
        """Every path goes down in resolution and up again through several modules: a U-Net's skip, no branch."""
        if self.nodes[start].shape != self.nodes[end].shape:
            return False
        clean, children = {start}, set()
        for index in sorted(interior):
            node = self.nodes[index]
            sources = [i for i in node.inputs if i == start or i in interior]
            shrinks = self._shrinks(node)
            if shrinks:
                children.add(child_of(self.graph.owner(index), block))
            if not shrinks and any(i in clean for i in sources):
                clean.add(index)
        if end in clean:
            return False
        children |= {child_of(self.graph.owner(i), block) for i in interior if self._grows(self.nodes[i])}
        return len(children) > 1 or "" in children

    def _shrinks(self, node: Node) -> bool:
        return (node.op == "conv" or node.op in ops.DOWNSAMPLES) and self._growth(node) <= 0.6

    def _grows(self, node: Node) -> bool:
        return (node.op == "conv" or node.op.lstrip("_").startswith(("upsample", "pixel_shuffle"))) and self._growth(
            node
        ) >= 1.5

    def _growth(self, node: Node) -> float:
        before = math.prod(self.nodes[node.inputs[0]].shape[2:])
        return math.prod(node.shape[2:]) / before if before else 1.0

    # ---------------------------------------------------------------- projection skip

    def _projection(self, node: Node, skip: int, branch: int, address: Address) -> Addition | None:
        chain = self._projection_chain(skip)
        wanted = [link for link in chain if link.layers or link.norms]
        if self._is_scaled_stream(branch) and any(map(self._is_rescaled, self._stream_chain(skip))):
            return None
        for link in sorted(wanted, key=lambda item: -item.node):
            if link.node >= branch:
                continue
            interior = self._interior(link, branch, inside=address.block, coupled=False)
            if interior is None or not self._learns(link.node, interior):
                continue
            ends = {node.index, *(step.node for step in chain)}
            if not self.uses.feeds_layer(node.index) and not self._is_private(interior, branch, ends):
                return None
            layers, curved = _Depth(self, link.node, interior).of(branch)
            u_shaped = self._is_u_shaped(link.node, branch, interior, address.block)
            if layers and layers + curved > max(1, link.layers) and not self._samples_noise(interior) and not u_shaped:
                return Addition(
                    node.index, skip, branch, link.node, True, link.scales, interior, address.block, address
                )
            return None
        return None

    def _projection_chain(self, start: int) -> list[_Link]:
        """From a summand back through at most one layer, norms and pooling, without any activation."""
        chain = [_Link(start)]
        while len(chain) < _WALK_LIMIT:
            link = chain[-1]
            node = self.nodes[link.node]
            step: _Link | None = None
            if node.op == "norm":
                step = _Link(node.inputs[0], link.scales, layers=link.layers, norms=link.norms + 1)
            elif node.op in ("conv", "mm") and link.layers == 0:
                factor = self._factor(node)
                if factor is not None and self.nodes[factor[1]].learned:
                    step = _Link(factor[0], link.scales, layers=1, norms=link.norms)
            elif node.op in ("mul", "add"):
                factor = self._factor(node)
                if factor is not None:
                    step = _Link(factor[0], link.scales, layers=link.layers, norms=link.norms)
            elif node.op != "part" and node.op in _STREAM_OPS:
                passed = self._stream_step(link)
                if passed is not None:
                    step = _Link(passed.node, passed.scales, layers=link.layers, norms=link.norms)
            if step is None:
                return chain
            chain.append(step)
        return chain

    def _is_private(self, interior: frozenset[int], end: int, known: set[int]) -> bool:
        """Whether nobody but skip and sum reads what the branch computes on its way; else it is a head on a stream."""
        readers = (r for i in interior if i != end for r in self.readers[i] if self.nodes[r].op != "statistic")
        return all(r in interior or r in known for r in readers)

    def _samples_noise(self, interior: frozenset[int]) -> bool:
        """Whether the supposed branch is a random draw (``mean + eps * std``)."""
        return any(self.nodes[i].op in ops.NORMAL_NOISE for index in interior for i in self.nodes[index].inputs)

    # ---------------------------------------------------------------- streams and clean-up

    def _link(self, addition: Addition) -> None:
        """Follow the skip back to the addition before it on the same stream, noting what lies between."""
        addition.previous = None
        current, between = addition.skip, []
        for _ in range(_WALK_LIMIT):
            earlier = self.found.get(current)
            if earlier is not None:
                addition.previous, addition.root = earlier, earlier.root
                break
            node = self.nodes[current]
            moving = [i for i in node.inputs if self.nodes[i].data] or list(node.inputs[:1])
            if len(set(moving)) != 1:
                break
            if node.op != "view":
                between.append(current)
            current = moving[0]
        addition.between = tuple(reversed(between))
        if addition.previous is None:
            addition.root = addition.skip

    def _drop_loss_terms(self) -> None:
        for index in [i for i in self.found if not self.uses.has(i)]:
            del self.found[index]

    def _drop_summands(self) -> None:
        """``(conv(n) + mlp(n)) + x`` is one branch with two summands, not a projection inside a branch."""
        for addition in list(self.found.values()):
            if addition.projection or addition.node not in self.found:
                continue
            stack = [addition.branch]
            while stack:
                node = self.nodes[stack.pop()]
                inner = self.found.get(node.index)
                if inner is not None and inner.projection and inner.stream != addition.node:
                    del self.found[node.index]
                if inner is None or inner.projection:
                    if node.op == "add":
                        stack.extend(node.inputs)
                    elif node.op in ("view", "scale", "clone"):
                        stack.append(node.inputs[0])

    def _drop_sums_of_streams(self) -> None:
        """A summand that another addition carries on as its stream is no branch: a position is added for one reader."""
        carried = self._carried()
        for addition in list(self.found.values()):
            if carried.get(addition.branch, set()) - {addition.node}:
                del self.found[addition.node]

    def _drop_inner_scaled(self) -> None:
        """A learned factor on the skip of a sum inside a branch is that branch's own arithmetic (a D term, a mix)."""
        inside = {i for a in self.found.values() if not a.scales for i in a.interior if i in self.found}
        for index in inside:
            if any(self.nodes[i].op == "mul" for i in self.found[index].scales):
                del self.found[index]


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
        self._returned = {n for output in graph.outputs for n in output.nodes}

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
        node = self._nodes[reader]
        return math.prod(node.shape) == size or node.op in ops.PLACEMENTS


class _Depth:
    """For nodes of a branch: learned layers in series from its start, and whether the path is non-linear."""

    def __init__(self, finder: _Finder, start: int, interior: frozenset[int]) -> None:
        self.depth: dict[int, tuple[int, bool]] = {start: (0, False)}
        nodes = finder.nodes
        for index in sorted(interior):
            node = nodes[index]
            before = [self.depth[i] for i in node.inputs if i in self.depth]
            layers, curved = max(d[0] for d in before), any(d[1] for d in before)
            learned = any(nodes[i].learned and not nodes[i].data for i in node.inputs)
            if node.op in ops.LAYERS and learned:
                layers += 1
            product = node.op in ops.PRODUCTS and len(before) > 1
            curved = curved or product or not (node.op in _LINEAR_OPS or node.op in ops.PRODUCTS)
            self.depth[index] = (layers, curved)

    def of(self, node: int) -> tuple[int, bool]:
        return self.depth.get(node, (0, False))


def is_weight(graph: Graph, index: int) -> bool:
    """Whether a value is a parameter as it is, be it with a number added (``1 + w``)."""
    node = graph.nodes[index]
    while node.op in ops.MOVES or node.op in ("view", "shift"):
        node = graph.nodes[node.inputs[0]]
    return node.op == "parameter"


def child_of(owner: str, block: str) -> str:
    """First name below ``block`` on the way to ``owner``; empty for the block itself and for a module outside it."""
    if block and not owner.startswith(block + "."):
        return ""
    return owner[len(block) + 1 if block else 0 :].split(".")[0]
