"""The data flow of one forward, in a written language: values, operations, and what modules returned.

Operations that ATen fuses or shortens are written as their parts, so that one rule fits every spelling. These are the
words of the language; everything else is an operation of ATen under its base name, with its tensor arguments as inputs.

| op | inputs | field | value |
|---|---|---|---|
| ``parameter`` | - | ``name``, learned | a parameter of the model |
| ``buffer`` | - | ``name`` | a buffer |
| ``input`` | - | data | a tensor of the batch |
| ``constant`` | - | | any other tensor |
| ``add`` | left, right | | their sum |
| ``mul`` | left, right | | their product, element by element |
| ``mm`` | left, right | | matrix product (``linear``, ``addmm``, ``addmv``) |
| ``conv`` | value, weight | | convolution |
| ``scale`` | value | ``number`` | times a number; None where it is complex |
| ``shift`` | value | ``number`` | plus a number; None where it is complex |
| ``reciprocal`` | value | | one over it; a quotient is a product with one |
| ``norm`` | value | | normalised, without weight and bias |
| ``statistic`` | of its call | | what a fused operation returns beside its result (mean, deviation) |
| ``view`` | value | ``shown`` | all of a value, with another shape |
| ``part`` | value | ``region``, ``shown`` | a view of a part of a value |
| ``copy_into`` | whole, written | ``region`` | a value, a part of which was written over |
| ``placed`` | written | | values placed by index in a tensor of zeros |

``data``: depends on the batch. ``learned``: depends on a parameter. ``noise``: depends on random numbers. Each holds
for a value when it holds for one of its inputs. ``shown`` names the operand of a concatenation, or what was written
over a part, where a view shows exactly that. :func:`check` holds a graph against this page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch._ops import OpOverload


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One value of the graph: a leaf, or the output of an operation; see the words above.

    Args:
        index: Its place in the graph, after that of its inputs.
        op: What made it.
        inputs: What it was made of.
        call: The executed operation that it is (a part of); -1 for a leaf.
        shape: Its shape.
        name: Dotted name of a parameter or buffer.
        data: Whether it depends on the batch.
        learned: Whether it depends on a parameter.
        noise: Whether it depends on random numbers.
        region: The part of memory that is shown, or was written (see :func:`lit_resinit.graph.tensors.geometry`).
        number: The number of a scale or shift.
        shown: The value that a view shows again.
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
    """What one call of a module returned.

    Args:
        module: Its dotted name.
        nodes: The node of every tensor in the output, in order.
        held: Those of the tensors that plain objects in it hold as attributes, which no hook can replace.
    """

    module: str
    nodes: tuple[int, ...]
    held: tuple[int, ...] = ()


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


# -------------------------------------------------------------------- the language, checked

LEAVES = ("parameter", "buffer", "input", "constant")
_INPUTS = {
    **dict.fromkeys(LEAVES, 0),
    **dict.fromkeys(("add", "mul", "mm", "conv", "copy_into"), 2),
    **dict.fromkeys(("scale", "shift", "reciprocal", "norm", "view", "part", "placed"), 1),
}
_FIELDS = {
    "name": ("parameter", "buffer"),
    "number": ("scale", "shift"),
    "region": ("part", "copy_into"),
    "shown": ("view", "part"),
}


def check(graph: Graph) -> list[str]:
    """Every way in which a graph is not written in the language; empty for one that is.

    Example:
        >>> graph = Graph()
        >>> check(graph) if graph.add("add", (graph.add("input", (), -1, (2,), data=True),), -1, (2,)) else None
        ['1 (add): 1 inputs, not 2', '1 (add): no leaf, and yet of no call']
    """
    return [f"{n.index} ({n.op}): {fault}" for n in graph.nodes for fault in _faults(graph, n)]


def _faults(graph: Graph, node: Node) -> Iterator[str]:
    leaf, wanted = node.op in LEAVES, _INPUTS.get(node.op)
    if graph.nodes[node.index] is not node:
        yield "not at its place"
    if wanted is not None and len(node.inputs) != wanted:
        yield f"{len(node.inputs)} inputs, not {wanted}"
    if any(not 0 <= i < node.index for i in (*node.inputs, *(() if node.shown is None else (node.shown,)))):
        yield "made of a later value"
    if leaf != (node.call < 0):
        yield "a leaf of a call" if leaf else "no leaf, and yet of no call"
    elif node.call >= len(graph.calls):
        yield "of a call that is not in the graph"
    for field, ops in _FIELDS.items():
        if getattr(node, field) not in (None, "") and node.op not in ops:
            yield f"has a {field}"
    if node.op in ("parameter", "part") and not (node.name or node.region):
        yield "without a name" if leaf else "without a region"
    for flag in ("data", "learned", "noise"):
        if not getattr(node, flag) and any(getattr(graph.nodes[i], flag) for i in node.inputs if i < node.index):
            yield f"made of {flag} values, and yet not {flag}"
