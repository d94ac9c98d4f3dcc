"""One operation as its parts: ATen fuses and shortens, the graph does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lit_resinit.graph import ops
from lit_resinit.graph.ops import Does
from lit_resinit.graph.tensors import covers_memory, geometry
from lit_resinit.graph.values import Call, Graph


class Spelling:
    """Writes one operation as its parts: product, addition, norm, and so on.

    Args:
        graph: Where the parts are written.
        index: Position of the call.
        call: The operation.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        node_of: Finds the node behind a tensor.
    """

    def __init__(
        self,
        graph: Graph,
        index: int,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        node_of: Callable[[Tensor], int],
    ) -> None:
        self._graph, self._index, self._call, self._node_of = graph, index, call, node_of
        schema = call.func._schema.arguments
        self._arguments = {schema[i].name: a for i, a in enumerate(args)} | kwargs
        self._base = ops.base_name(call.func)

    def nodes(self, results: list[Tensor]) -> list[int]:
        """The nodes of what the operation returned, written with all that leads to them."""
        shapes = [tuple(r.shape) for r in results]
        if not results:
            return []
        method = getattr(self, f"_spell_{self._base}", None)
        first = method(shapes[0]) if method is not None else None
        if first is None and ops.does(self._base, Does.NORMALISES):
            first = self._affine("norm", shapes[0])
        if first is None:
            return [self._generic(r, s) for r, s in zip(results, shapes, strict=True)]
        return [first, *(self._add("statistic", self._call.inputs, s) for s in shapes[1:])]

    def _node(self, name: str) -> int | None:
        value = self._arguments.get(name)
        return self._node_of(value) if isinstance(value, Tensor) else None

    def _add(self, op: str, inputs: tuple[int, ...], shape: tuple[int, ...], **more: Any) -> int:
        return self._graph.add(op, inputs, self._index, shape, **more)

    def _generic(self, result: Tensor, shape: tuple[int, ...]) -> int:
        nodes = self._graph.nodes
        base, inputs = self._base, self._call.inputs
        region = None
        shown = None
        if base == "norm":
            base = "linalg_vector_norm"  # the name is taken by what normalises
        if ops.does(base, Does.CUTS) and inputs:
            shown = self._shown_operand(result)
            region = geometry(result) if shape != nodes[inputs[0]].shape else None
            base = "part" if region is not None else "view"
        elif base in ("detach", "lift_fresh") and inputs:
            return inputs[0]
        elif self._call.func.is_view:
            base = "view"
        noise = ops.is_random(self._call.func) and not ops.does(base, Does.ATTENDS) and "dropout" not in base
        latent = ops.does(base, Does.DRAWS)  # a network may be fed by noise
        if ops.does(base, Does.CREATES):
            inputs = tuple(
                i for i in inputs[1:] if not isinstance(self._arguments.get("self"), Tensor) or base == "fill"
            )
        index = self._add(base, inputs, shape, data=latent, noise=noise, region=region)
        nodes[index].shown = shown
        return index

    def _shown_operand(self, result: Tensor) -> int | None:
        """The operand of a concatenation, or what was written into a part, that a partial view shows again."""
        graph, whole = self._graph, self._arguments["self"]
        node = graph.nodes[self._call.inputs[0]]
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

    def _sum(self, left: int | None, right: int | None, shape: tuple[int, ...]) -> int | None:
        if left is None or right is None:
            return None
        return self._add("add", (left, right), shape)

    def _scaled(self, node: int | None, factor: Any, shape: tuple[int, ...]) -> int | None:
        return node if isinstance(factor, Tensor) or factor == 1 else self._times(node, factor, shape)

    def _times(self, node: int | None, factor: Any, shape: tuple[int, ...]) -> int | None:
        if node is None or not isinstance(factor, int | float | complex):
            return None
        return self._add("scale", (node,), shape, number=float(factor) if not isinstance(factor, complex) else None)

    def _shifted(self, node: int | None, amount: Any, shape: tuple[int, ...]) -> int | None:
        """A number added to every element."""
        if node is None or not isinstance(amount, int | float | complex):
            return None
        return self._add("shift", (node,), shape, number=None if isinstance(amount, complex) else float(amount))

    def _added(self, left: str, right: str, sign: float, shape: tuple[int, ...]) -> int | None:
        """``left + sign * alpha * right``, where the right one may be a number."""
        start, end, factor = self._node(left), self._node(right), sign * self._arguments.get("alpha", 1)
        if end is None:
            other = self._arguments.get(right)
            return self._shifted(start, None if other is None else other * factor, shape)
        end = self._scaled(end, factor, shape)
        if start is None:  # a number minus a tensor
            return self._shifted(end, self._arguments.get(left), shape)
        return self._sum(start, end, shape)

    def _spell_add(self, shape: tuple[int, ...]) -> int | None:
        return self._added("self", "other", 1.0, shape)

    def _spell_sub(self, shape: tuple[int, ...]) -> int | None:
        return self._added("self", "other", -1.0, shape)

    def _spell_rsub(self, shape: tuple[int, ...]) -> int | None:
        return self._added("other", "self", -1.0, shape)

    def _spell_mul(self, shape: tuple[int, ...]) -> int | None:
        left, right = self._node("self"), self._node("other")
        if left is not None and right is not None:
            return self._add("mul", (left, right), shape)
        return self._times(left, self._arguments.get("other"), shape)

    def _spell_div(self, shape: tuple[int, ...]) -> int | None:
        left, right = self._node("self"), self._node("other")
        if "rounding_mode" in self._arguments and self._arguments["rounding_mode"] is not None:
            return None
        if left is not None and right is not None:
            inverse = self._add("reciprocal", (right,), self._graph.nodes[right].shape)
            return self._add("mul", (left, inverse), shape)
        divisor = self._arguments.get("other")
        return self._times(left, 1.0 / divisor, shape) if divisor and not isinstance(divisor, Tensor) else None

    def _spell_neg(self, shape: tuple[int, ...]) -> int | None:
        return self._times(self._node("self"), -1.0, shape)

    def _product_sum(self, first: str, second: str, op: str, shape: tuple[int, ...]) -> int | None:
        left, right, start = self._node(first), self._node(second), self._node("self")
        if left is None or right is None or start is None:
            return None
        product = self._add(op, (left, right), shape)
        product = self._scaled(product, self._arguments.get("alpha", self._arguments.get("value", 1)), shape) or product
        if self._arguments.get("beta", 1) == 0:
            return product
        return self._add("add", (start, product), shape)

    def _spell_addmm(self, shape: tuple[int, ...]) -> int | None:
        return self._product_sum("mat1", "mat2", "mm", shape)

    def _spell_addmv(self, shape: tuple[int, ...]) -> int | None:
        return self._product_sum("mat", "vec", "mm", shape)

    def _spell_baddbmm(self, shape: tuple[int, ...]) -> int | None:
        return self._product_sum("batch1", "batch2", "bmm", shape)

    def _spell_addbmm(self, shape: tuple[int, ...]) -> int | None:
        return self._product_sum("batch1", "batch2", "bmm", shape)

    def _spell_addcmul(self, shape: tuple[int, ...]) -> int | None:
        return self._product_sum("tensor1", "tensor2", "mul", shape)

    def _spell_lerp(self, shape: tuple[int, ...]) -> int | None:
        start, end = self._node("self"), self._node("end")
        if start is None or end is None:
            return None
        minus = self._add("scale", (start,), shape, number=-1.0)
        difference = self._add("add", (end, minus), shape)
        weight = self._node("weight")
        if weight is None:
            step = self._scaled(difference, self._arguments["weight"], shape) or difference
        else:
            step = self._add("mul", (difference, weight), shape)
        return self._add("add", (start, step), shape)

    def _affine(self, op: str, shape: tuple[int, ...], source: str = "input") -> int | None:
        node, weight, bias = self._node(source), self._node("weight"), self._node("bias")
        if node is None:
            return None
        if op == "norm":
            node = self._add("norm", (node,), shape)
            if weight is not None:
                node = self._add("mul", (node, weight), shape)
        elif weight is not None:
            node = self._add(op, (node, weight), shape)
        return node if bias is None else self._add("add", (node, bias), shape)

    def _spell_convolution(self, shape: tuple[int, ...]) -> int | None:
        return self._affine("conv", shape)

    _spell__convolution = _spell_conv2d = _spell_conv1d = _spell_conv3d = _spell_convolution

    def _spell_linear(self, shape: tuple[int, ...]) -> int | None:
        return self._affine("mm", shape)

    def _spell_copy(self, shape: tuple[int, ...]) -> int | None:
        target, source = self._node("self"), self._node("src")
        if target is None or source is None:
            return None
        if target == source:  # ``x[i] += y`` writes the part, and then once more over itself
            return source
        if covers_memory(self._arguments["self"]):
            return self._add("clone", (source,), shape)
        return self._add("copy_into", (target, source), shape)

    def _accumulated(self, name: str, shape: tuple[int, ...]) -> int | None:
        """Values added at some places of a tensor of data: the addition of a tensor that is zero elsewhere."""
        target, source = self._node("self"), self._node(name)
        if target is None or source is None or not self._graph.nodes[target].data:
            return None
        placed = self._add("placed", (source,), shape)
        return self._sum(target, self._scaled(placed, self._arguments.get("alpha", 1), shape), shape)

    def _spell_index_add(self, shape: tuple[int, ...]) -> int | None:
        return self._accumulated("source", shape)

    def _spell_scatter_add(self, shape: tuple[int, ...]) -> int | None:
        return self._accumulated("src", shape)

    def _spell_scatter_reduce(self, shape: tuple[int, ...]) -> int | None:
        adds = self._arguments.get("reduce") == "sum" and self._arguments.get("include_self", True)
        return self._accumulated("src", shape) if adds else None

    def _spell_index_put(self, shape: tuple[int, ...]) -> int | None:
        return self._accumulated("values", shape) if self._arguments.get("accumulate") else None

    _spell__index_put_impl = _spell_index_put
