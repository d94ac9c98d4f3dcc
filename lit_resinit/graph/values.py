"""The data flow of one forward: values, operations, and what modules returned."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch._ops import OpOverload


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One value of the graph: a leaf (parameter, buffer, input, constant) or the output of an operation.

    ``region`` is the part of its input that a partial view shows, ``shown`` the operand where that is a concatenation.

    An operation that ATen fuses is written as its parts (``addmm`` is a product and an addition, a norm with affine
    weights is a norm, a product and an addition), so that one rule fits all spellings.
    """

    index: int
    op: str
    inputs: tuple[int, ...]
    call: int
    shape: tuple[int, ...]
    name: str = ""
    data: bool = False
    learned: bool = False
    noise: bool = False
    region: tuple[Any, ...] | None = None
    number: float | None = None
    shown: int | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """One executed operation, with the module and the source line that ran it."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    owner: str
    line: str
    source: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    graded: bool = True


@dataclasses.dataclass(slots=True, eq=False)
class ModuleOutput:
    """What one call of a module returned: the node of every tensor in it, in order."""

    module: str
    nodes: tuple[int, ...]


@dataclasses.dataclass(slots=True, eq=False)
class Graph:
    """The data flow of one forward, in the order of execution (inputs come before what reads them)."""

    nodes: list[Node] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    outputs: list[ModuleOutput] = dataclasses.field(default_factory=list)
    executed: dict[str, int] = dataclasses.field(default_factory=dict)
    aliases: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    lots: int = 0

    def add(
        self,
        op: str,
        inputs: tuple[int, ...],
        call: int,
        shape: tuple[int, ...],
        *,
        name: str = "",
        data: bool = False,
        learned: bool = False,
        noise: bool = False,
        region: tuple[Any, ...] | None = None,
        number: float | None = None,
    ) -> int:
        """Append a node, which is data, learned or noise where one of its inputs is; returns its index."""
        for source in inputs:
            node = self.nodes[source]
            data, learned, noise = data or node.data, learned or node.learned, noise or node.noise
        index = len(self.nodes)
        self.nodes.append(Node(index, op, inputs, call, shape, name, data, learned, noise, region, number))
        return index

    def owner(self, node: int) -> str:
        """Dotted name of the module that ran the node's operation."""
        call = self.nodes[node].call
        return self.calls[call].owner if call >= 0 else ""

    def is_inside(self, node: int, block: str) -> bool:
        """Whether a module below ``block`` ran the node's operation, under whichever of its names."""
        owner = self.owner(node)
        return not block or any(n == block or n.startswith(block + ".") for n in (owner, *self.aliases.get(owner, ())))

    def source(self, node: int) -> str:
        """``file.py:line`` of the node's operation, empty for a leaf."""
        call = self.nodes[node].call
        return self.calls[call].source if call >= 0 else ""

    def consumers(self) -> list[list[int]]:
        """For every node the nodes that read it."""
        readers: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            for source in node.inputs:
                readers[source].append(node.index)
        return readers
