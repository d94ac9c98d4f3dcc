"""Residual additions, and the streams that they form."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator

from lit_resinit.graph.values import Graph
from lit_resinit.graph.where import Address

_LIMIT = 64  # operations between two additions of a stream, as for any other view of a value


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Addition:
    """One residual addition of a graph.

    Args:
        node: The sum.
        skip: The summand that goes on.
        branch: The other summand.
        stream: The value on the residual stream that the branch reads.
        projection: Whether the skip is a projection of it.
        scales: The products between ``stream`` and ``skip``.
        interior: The nodes of the branch, everything between ``stream`` and ``branch``.
        block: Dotted name of the module that runs the addition.
        address: Where it runs, the same in every forward.
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


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """How an addition hangs on its stream.

    Args:
        root: The value that the stream starts with.
        previous: The addition before it; None for the first.
        between: The operations between that one and the skip, in the order of execution, without views.
    """

    root: int
    previous: int | None
    between: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """A chain of additions, each of which goes on with the sum of the one before."""

    root: int
    additions: tuple[Addition, ...]


class Streams:
    """The additions of one graph with their links; a collection of the sums that are residual."""

    def __init__(self, graph: Graph, additions: Iterable[Addition] = ()) -> None:
        self._nodes = graph.nodes
        self._additions: dict[int, Addition] = {}
        self._links: dict[int, Link] = {}
        self._on: dict[int, int] = {}  # values that lie on a stream: its root
        for addition in sorted(additions, key=lambda a: a.node):
            self.add(addition)

    def __contains__(self, node: object) -> bool:
        return node in self._additions

    def __iter__(self) -> Iterator[Addition]:
        return iter(self._additions.values())

    def __len__(self) -> int:
        return len(self._additions)

    def at(self, node: int) -> Addition | None:
        """The residual addition that makes this value, if one does."""
        return self._additions.get(node)

    def link(self, node: int) -> Link:
        """How the addition that makes this value hangs on its stream."""
        return self._links[node]

    def root(self, node: int) -> int:
        """The value that the addition's stream starts with."""
        return self._links[node].root

    def is_on(self, node: int, root: int) -> bool:
        """Whether a value is the start of a stream, a sum of it, or what it passes on its way to the next."""
        return node == root or self._on.get(node) == root

    def add(self, addition: Addition) -> None:
        """Take in one more addition, whose predecessors are known."""
        self._additions[addition.node] = addition
        self._links[addition.node] = self._follow(addition)

    def without(self, nodes: Collection[int]) -> list[Addition]:
        """The additions but these."""
        return [a for a in self if a.node not in nodes]

    def streams(self) -> list[Stream]:
        """The additions by stream, in the order of their first ones."""
        members: dict[int, list[Addition]] = {}
        first: dict[int, int] = {}
        for addition in self:
            previous = self._links[addition.node].previous
            first[addition.node] = addition.node if previous is None else first[previous]
            members.setdefault(first[addition.node], []).append(addition)
        return [Stream(self.root(start), tuple(chain)) for start, chain in members.items()]

    def _follow(self, addition: Addition) -> Link:
        """From the skip back to the addition before it on the same stream."""
        current, between, passed = addition.skip, list[int](), list[int]()
        previous = None
        for _ in range(_LIMIT):
            if current in self._additions:
                previous = current
                break
            node = self._nodes[current]
            moving = [i for i in node.inputs if self._nodes[i].data] or list(node.inputs[:1])
            if len(set(moving)) != 1:
                break
            passed.append(current)
            if node.op != "view":
                between.append(current)
            current = moving[0]
        root = addition.skip if previous is None else self._links[previous].root
        self._on |= dict.fromkeys([addition.node, *(passed if previous is not None else ())], root)
        return Link(root, previous, tuple(reversed(between)))
