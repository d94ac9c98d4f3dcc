"""One operation as its parts: ATen fuses and shortens, the graph does not (see :mod:`lit_resinit.graph.values`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lit_resinit.graph import ops
from lit_resinit.graph.ops import Does
from lit_resinit.graph.tensors import covers_memory, geometry
from lit_resinit.graph.values import Call, Graph

Shape = tuple[int, ...]


def lower(
    graph: Graph,
    index: int,
    call: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    results: list[Tensor],
    node_of: Callable[[Tensor], int],
) -> list[int]:
    """Write one operation as its parts.

    Args:
        graph: Where they are written.
        index: Position of the call.
        call: The operation.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        results: What it returned.
        node_of: Finds the node behind a tensor.

    Returns:
        The nodes of the results.
    """
    if not results:
        return []
    parts, base = _Parts(graph, index, call, args, kwargs, node_of), ops.base_name(call.func)
    shapes = [tuple(r.shape) for r in results]
    spell = _SPELLINGS.get(base, _affine_norm if ops.does(base, Does.NORMALISES) else None)
    first = None if spell is None else spell(parts, shapes[0])
    if first is None:
        return [_generic(parts, base, r, s) for r, s in zip(results, shapes, strict=True)]
    return [first, *(parts.add("statistic", call.inputs, s) for s in shapes[1:])]


class _Parts:
    """The arguments of one call by name, and the parts that all spellings are made of."""

    def __init__(
        self,
        graph: Graph,
        index: int,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        node_of: Callable[[Tensor], int],
    ) -> None:
        self.graph, self.call = graph, call
        self._index, self._node_of = index, node_of
        schema = call.func._schema.arguments
        self.arguments = {schema[i].name: a for i, a in enumerate(args)} | kwargs

    def node(self, name: str) -> int | None:
        """The node of a tensor argument; None where it is no tensor."""
        value = self.arguments.get(name)
        return self._node_of(value) if isinstance(value, Tensor) else None

    def add(self, op: str, inputs: tuple[int, ...], shape: Shape, **more: Any) -> int:
        """A node of this call."""
        return self.graph.add(op, inputs, self._index, shape, **more)

    def sum(self, left: int | None, right: int | None, shape: Shape) -> int | None:
        """Left plus right."""
        return None if left is None or right is None else self.add("add", (left, right), shape)

    def times(self, node: int | None, factor: Any, shape: Shape) -> int | None:
        """Every element times a number."""
        if node is None or not isinstance(factor, int | float | complex):
            return None
        return self.add("scale", (node,), shape, number=float(factor) if not isinstance(factor, complex) else None)

    def scaled(self, node: int | None, factor: Any, shape: Shape) -> int | None:
        """The same, written only where the number is not one."""
        return node if isinstance(factor, Tensor) or factor == 1 else self.times(node, factor, shape)

    def shifted(self, node: int | None, amount: Any, shape: Shape) -> int | None:
        """Every element plus a number."""
        if node is None or not isinstance(amount, int | float | complex):
            return None
        return self.add("shift", (node,), shape, number=None if isinstance(amount, complex) else float(amount))


# -------------------------------------------------------------------- an operation under its own name


def _generic(parts: _Parts, base: str, result: Tensor, shape: Shape) -> int:
    inputs, region, shown = parts.call.inputs, None, None
    if base == "norm":
        base = "linalg_vector_norm"  # the name is taken by what normalises
    if ops.does(base, Does.CUTS) and inputs:
        shown = _shown_operand(parts, result)
        region = geometry(result) if shape != parts.graph.nodes[inputs[0]].shape else None
        base = "part" if region is not None else "view"
    elif base in ("detach", "lift_fresh") and inputs:
        return inputs[0]
    elif parts.call.func.is_view:
        base = "view"
    noise = ops.is_random(parts.call.func) and not ops.does(base, Does.ATTENDS) and "dropout" not in base
    latent = ops.does(base, Does.DRAWS)  # a network may be fed by noise
    if ops.does(base, Does.CREATES):
        own = isinstance(parts.arguments.get("self"), Tensor) and base != "fill"
        inputs = () if own else inputs[1:]
    index = parts.add(base, inputs, shape, data=latent, noise=noise, region=region)
    parts.graph.nodes[index].shown = shown
    return index


def _shown_operand(parts: _Parts, result: Tensor) -> int | None:
    """The operand of a concatenation, or what was written into a part, that a partial view shows again."""
    graph, whole = parts.graph, parts.arguments["self"]
    node = graph.nodes[parts.call.inputs[0]]
    if node.op == "copy_into" and node.region == geometry(result):
        return node.inputs[1]
    if node.op not in ("cat", "stack") or not whole.is_contiguous():
        return None
    call, shown = graph.calls[node.call], geometry(result)
    dim = (call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)) % whole.dim()
    offset, strides = whole.storage_offset(), list(whole.stride())
    step = strides.pop(dim) if node.op == "stack" else strides[dim]
    for operand in node.inputs:
        shape = graph.nodes[operand].shape
        if shown == (offset, shape, tuple(strides)):
            return operand
        offset += step * (shape[dim] if node.op == "cat" and len(shape) > dim else 1)
    return None


# -------------------------------------------------------------------- spellings: None where one does not fit


def _added(left: str, right: str, sign: float) -> Callable[[_Parts, Shape], int | None]:
    """``left + sign * alpha * right``, where the right one may be a number."""

    def spell(parts: _Parts, shape: Shape) -> int | None:
        start, end, factor = parts.node(left), parts.node(right), sign * parts.arguments.get("alpha", 1)
        if end is None:
            other = parts.arguments.get(right)
            return parts.shifted(start, None if other is None else other * factor, shape)
        end = parts.scaled(end, factor, shape)
        if start is None:  # a number minus a tensor
            return parts.shifted(end, parts.arguments.get(left), shape)
        return parts.sum(start, end, shape)

    return spell


def _product(parts: _Parts, shape: Shape) -> int | None:
    left, right = parts.node("self"), parts.node("other")
    if left is not None and right is not None:
        return parts.add("mul", (left, right), shape)
    return parts.times(left, parts.arguments.get("other"), shape)


def _quotient(parts: _Parts, shape: Shape) -> int | None:
    left, right = parts.node("self"), parts.node("other")
    if parts.arguments.get("rounding_mode") is not None:
        return None
    if left is not None and right is not None:
        inverse = parts.add("reciprocal", (right,), parts.graph.nodes[right].shape)
        return parts.add("mul", (left, inverse), shape)
    divisor = parts.arguments.get("other")
    return parts.times(left, 1.0 / divisor, shape) if divisor and not isinstance(divisor, Tensor) else None


def _negative(parts: _Parts, shape: Shape) -> int | None:
    return parts.times(parts.node("self"), -1.0, shape)


def _product_sum(first: str, second: str, op: str) -> Callable[[_Parts, Shape], int | None]:
    """``self + alpha * first * second``."""

    def spell(parts: _Parts, shape: Shape) -> int | None:
        left, right, start = parts.node(first), parts.node(second), parts.node("self")
        if left is None or right is None or start is None:
            return None
        product = parts.add(op, (left, right), shape)
        factor = parts.arguments.get("alpha", parts.arguments.get("value", 1))
        product = parts.scaled(product, factor, shape) or product
        return product if parts.arguments.get("beta", 1) == 0 else parts.add("add", (start, product), shape)

    return spell


def _interpolation(parts: _Parts, shape: Shape) -> int | None:
    """``self + weight * (end - self)``."""
    start, end = parts.node("self"), parts.node("end")
    if start is None or end is None:
        return None
    minus = parts.add("scale", (start,), shape, number=-1.0)
    difference = parts.add("add", (end, minus), shape)
    weight = parts.node("weight")
    if weight is None:
        step = parts.scaled(difference, parts.arguments["weight"], shape) or difference
    else:
        step = parts.add("mul", (difference, weight), shape)
    return parts.add("add", (start, step), shape)


def _affine_norm(parts: _Parts, shape: Shape) -> int | None:
    node, weight, bias = parts.node("input"), parts.node("weight"), parts.node("bias")
    if node is None:
        return None
    node = parts.add("norm", (node,), shape)
    if weight is not None:
        node = parts.add("mul", (node, weight), shape)
    return node if bias is None else parts.add("add", (node, bias), shape)


def _layer(op: str) -> Callable[[_Parts, Shape], int | None]:
    """A weight, and a bias where there is one."""

    def spell(parts: _Parts, shape: Shape) -> int | None:
        node, weight, bias = parts.node("input"), parts.node("weight"), parts.node("bias")
        if node is None:
            return None
        if weight is not None:
            node = parts.add(op, (node, weight), shape)
        return node if bias is None else parts.add("add", (node, bias), shape)

    return spell


def _gated_unit(parts: _Parts, shape: Shape) -> int | None:
    """``a * sigmoid(b)`` of the two halves of a tensor."""
    node, whole = parts.node("self"), parts.arguments["self"]
    if node is None:
        return None
    dim, strides = parts.arguments.get("dim", -1) % whole.dim(), whole.stride()
    starts = (whole.storage_offset() + half * shape[dim] * strides[dim] for half in (0, 1))
    first, second = (parts.add("part", (node,), shape, region=(start, shape, strides)) for start in starts)
    return parts.add("mul", (first, parts.add("sigmoid", (second,), shape)), shape)


def _copy(parts: _Parts, shape: Shape) -> int | None:
    target, source = parts.node("self"), parts.node("src")
    if target is None or source is None:
        return None
    if target == source:  # ``x[i] += y`` writes the part, and then once more over itself
        return source
    if covers_memory(parts.arguments["self"]):
        return parts.add("clone", (source,), shape)
    return parts.add("copy_into", (target, source), shape)


def _accumulated(name: str, when: Callable[[dict[str, Any]], bool]) -> Callable[[_Parts, Shape], int | None]:
    """Values added at some places of a tensor of data: the addition of a tensor that is zero elsewhere."""

    def spell(parts: _Parts, shape: Shape) -> int | None:
        if not when(parts.arguments):
            return None
        target, source = parts.node("self"), parts.node(name)
        if target is None or source is None or not parts.graph.nodes[target].data:
            return None
        placed = parts.add("placed", (source,), shape)
        return parts.sum(target, parts.scaled(placed, parts.arguments.get("alpha", 1), shape), shape)

    return spell


def _stacked_sum(parts: _Parts, shape: Shape) -> int | None:
    """Two values stacked and summed up again along the same dimension."""
    whole, dims = parts.node("self"), parts.arguments.get("dim")
    stack = None if whole is None else stacking(parts.graph, whole)
    if stack is None or not dims or parts.arguments.get("keepdim") or parts.arguments.get("dtype") is not None:
        return None
    dim, operands = stack
    fits = len(operands) == 2 and [d % (len(shape) + 1) for d in dims] == [dim]
    return parts.sum(operands[0], operands[1], shape) if fits else None


def stacking(graph: Graph, whole: int) -> tuple[int, tuple[int, ...]] | None:
    """Along which dimension a value was stacked, and from what; None for any other value."""
    node = graph.nodes[whole]
    if node.op != "stack":
        return None
    call = graph.calls[node.call]
    dim: int = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    return dim % len(node.shape), node.inputs


def _always(arguments: dict[str, Any]) -> bool:
    return True


def _sums_up(arguments: dict[str, Any]) -> bool:
    return arguments.get("reduce") == "sum" and bool(arguments.get("include_self", True))


def _accumulates(arguments: dict[str, Any]) -> bool:
    return bool(arguments.get("accumulate"))


_SPELLINGS: dict[str, Callable[[_Parts, Shape], int | None]] = {
    "add": _added("self", "other", 1.0),
    "sub": _added("self", "other", -1.0),
    "rsub": _added("other", "self", -1.0),
    "mul": _product,
    "div": _quotient,
    "neg": _negative,
    "addmm": _product_sum("mat1", "mat2", "mm"),
    "addmv": _product_sum("mat", "vec", "mm"),
    "baddbmm": _product_sum("batch1", "batch2", "bmm"),
    "addbmm": _product_sum("batch1", "batch2", "bmm"),
    "addcmul": _product_sum("tensor1", "tensor2", "mul"),
    "lerp": _interpolation,
    "sum": _stacked_sum,
    "linear": _layer("mm"),
    "glu": _gated_unit,
    **dict.fromkeys(("convolution", "_convolution", "conv1d", "conv2d", "conv3d"), _layer("conv")),
    "copy": _copy,
    "index_add": _accumulated("source", _always),
    "scatter_add": _accumulated("src", _always),
    "scatter_reduce": _accumulated("src", _sums_up),
    **dict.fromkeys(("index_put", "_index_put_impl"), _accumulated("values", _accumulates)),
}
