"""A gate: the one parameter that closes a branch, and how it is read, closed and named."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from lit_resinit.find.closing import Closing, element
from lit_resinit.find.norms import is_normalised
from lit_resinit.graph.values import Graph, Node

GateKind = Literal["norm", "scale", "layer", "inserted"]
INSERTED_NAME = "residual_gate"


@dataclasses.dataclass(frozen=True, slots=True)
class Gate:
    """The one parameter whose closing value makes a branch output exactly zero.

    Args:
        kind: ``norm`` (affine weight of a trailing norm), ``scale`` (LayerScale, ReZero and the like), ``layer`` (last
            linear or convolution weight) or ``inserted`` (a scalar of ours).
        parameter: Dotted name in ``model.named_parameters()``; for ``inserted`` the name after :func:`apply_`.
        value: Closing value: 0, or -1 where the code multiplies by ``1 + w``.
        index: Which element along the first axis, when one parameter holds the gates of several blocks.
        biases: Dotted names of what is added after the gate and is closed with it.
        module: For ``inserted``: the module whose output is multiplied.
        leaf: For ``inserted``: which tensor of that output.
        folds_into: Parameters in which the branch is linear, so that a factor after them can be folded exactly.
    """

    __module__ = "lit_resinit"  # a pickle names no room

    kind: GateKind
    parameter: str
    value: float = 0.0
    index: int | None = None
    biases: tuple[str, ...] = ()
    module: str = ""
    leaf: int = 0
    folds_into: tuple[str, ...] = ()

    def __repr__(self) -> str:
        which = self.parameter if self.index is None else f"{self.parameter}[{self.index}]"
        biases = f" with {', '.join(self.biases)}" if self.biases else ""
        return f"<Gate {which}: {self.kind}, closed at {self.value:g}{biases}>"

    def of(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The gate's own part of its parameter: all of it, or one element."""
        value = parameters[self.parameter]
        return value if self.index is None else value[self.index]

    @torch.no_grad()
    def close_(self, parameters: Mapping[str, Tensor]) -> None:
        """Set the gate to its closing value, in place, and what is added after it to zero."""
        self.of(parameters).fill_(self.value)
        for name in self.biases:
            parameters[name].zero_()


def gate_at(
    graph: Graph, product: Node, moving: int, closing: Closing, biases: Sequence[str], *, transformed: bool = False
) -> Gate:
    """The gate that a learned factor of a product is, given what comes after it.

    Args:
        graph: The graph.
        product: The product.
        moving: Its other factor.
        closing: The learned factor, and how it is closed.
        biases: What is added after it.
        transformed: Whether a Fourier transform comes after it, so that it is the kernel of a convolution.
    """
    layer = product.op != "mul" or transformed
    kind: GateKind = "layer" if layer else "norm" if is_normalised(graph, moving) else "scale"
    if closing.parameter.rpartition(".")[2].startswith(INSERTED_NAME):
        kind = "inserted"
    folds = (closing.parameter, *biases) if closing.linear and closing.index is None else ()
    return Gate(kind, closing.parameter, closing.value, closing.index, tuple(biases), folds_into=folds)


def shows_element(graph: Graph, reader: int, index: int) -> bool:
    """Whether what reads a parameter reads this element of it: a part of another one does not."""
    node = graph.nodes[reader]
    return node.op != "part" or element(graph, node) in (index, None)


def inserted_name(leaf: int) -> str:
    """Name of an inserted scalar on its module: one for each tensor that the module returns."""
    return INSERTED_NAME if leaf == 0 else f"{INSERTED_NAME}_{leaf}"


def holds(tensor: Tensor, value: float) -> bool:
    """Whether every element of a tensor equals ``value``; False for a tensor without values (meta)."""
    with torch.no_grad():
        return tensor.numel() > 0 and not tensor.is_meta and bool((tensor.detach() == value).all())
