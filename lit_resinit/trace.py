"""One forward as a graph of operations: what each reads and writes, which module and source line ran it."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import gc
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from lit_resinit import ops
from lit_resinit.errors import TraceError

TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_DRAWS = 12  # more forwards where one draws lots (layer drop), the fullest of which is kept
PACKAGE_FOLDER = os.path.dirname(__file__) + os.sep
# Frames between an operation and the mode that records it.
_MACHINERY = (
    PACKAGE_FOLDER,
    *(TORCH_FOLDER + name for name in ("_dynamo", "_compile", "_ops.py", "utils/_python_dispatch")),
)
COMPILED_PREFIX = "_orig_mod."
_DEVICE = torch.ops.prim.device.default

Run = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


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


def module_names(model: nn.Module) -> dict[int, str]:
    """Dotted name of every module by identity, without the prefix that ``torch.compile`` adds."""
    return {id(module): clean_name(name) for name, module in model.named_modules()}


def _aliases(model: nn.Module, names: dict[int, str]) -> dict[str, list[str]]:
    """The other names of modules that are registered in several places, by the first."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        first = names[id(module)]
        if clean_name(name) != first:
            found.setdefault(first, []).append(clean_name(name))
    return found


def clean_name(name: str) -> str:
    """A dotted name as the state dict of the uncompiled model has it."""
    return (name + ".").replace(COMPILED_PREFIX, "")[:-1] if "_orig_mod" in name else name


def locate(names: dict[int, str], depth: int) -> tuple[str, str]:
    """Module whose code is running, and the line of that code, found on the stack.

    Hooks are blind where a parent calls ``child.forward`` directly; the stack is not.
    """
    frame = sys._getframe(depth)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_MACHINERY):
        frame = frame.f_back
    line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    while frame is not None:
        code = frame.f_code
        if code.co_argcount:
            owner = names.get(id(frame.f_locals.get(code.co_varnames[0])))
            if owner is not None:
                return owner, f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "", line


def user_line(depth: int) -> str:
    """``file.py:line`` of the innermost frame outside torch and this package, else the innermost frame."""
    frame = sys._getframe(depth)
    first = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((TORCH_FOLDER, PACKAGE_FOLDER)):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return f"{first.f_code.co_filename}:{first.f_lineno}"


class _Measuring(threading.local):
    active = False


_measuring = _Measuring()


class measuring:  # noqa: N801 - used as a function
    """Operations inside are this package's own measurements: no gradient, and no mode of any kind sees them."""

    __slots__ = ("_before", "_grad", "_guard")

    def __enter__(self) -> None:
        self._before, _measuring.active = _measuring.active, True
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._guard = torch._C._DisableTorchDispatch()

    def __exit__(self, *exc: Any) -> None:
        del self._guard
        torch._C._set_grad_enabled(self._grad)
        _measuring.active = self._before


def is_sharded(tensor: Tensor) -> bool:
    """Whether several ranks hold a part of the tensor each (``DTensor``)."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """Of a sharded tensor the part that this rank holds; any other tensor as it is."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered from its ranks, which all have to call this; any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.full_tensor()  # type: ignore[attr-defined, no-any-return]


def is_not_forward(func: OpOverload) -> bool:
    """Whether an operation is none of the network's forward: a query, a backward pass, or a measurement of ours."""
    return func.namespace == "prim" or _measuring.active or torch._C._current_graph_task_id() != -1


def _holds_tensor(argument: Any) -> bool:
    return any(isinstance(t, Tensor) for t in tree_iter(argument))


class _Storage:
    """What is known about one piece of memory: the newest value, and the values of its views."""

    __slots__ = ("keep", "latest", "views")

    def __init__(self, keep: Any, latest: int) -> None:
        self.keep, self.latest = keep, latest
        self.views: dict[tuple[Any, ...], int] = {}


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


class Recorder(TorchDispatchMode):
    """Context manager that writes down every operation below it as a :class:`Graph`.

    Values are told apart by the memory they live in, not by Python object, so that views, ``detach`` and in-place
    operations are followed. Operations of a backward pass that runs inside are left out.

    Args:
        model: Module whose parameters, buffers and module names are used.
        inputs: Anything with tensors in it that counts as data.
        keep_storage: Whether to keep the memory of every value alive, which is free for fake tensors only.
        note_outputs: Whether to note what every call of a module returned.
    """

    def __init__(
        self, model: nn.Module, inputs: Any = (), *, keep_storage: bool = False, note_outputs: bool = False
    ) -> None:
        super().__init__()
        self.names = module_names(model)
        self.graph = Graph(aliases=_aliases(model, self.names))
        self._keep_storage = keep_storage
        self._memory: dict[int, _Storage] = {}
        self._objects: dict[int, tuple[Any, int]] = {}
        self._modules = {clean_name(name): module for name, module in model.named_modules()}
        self._noted = [m for m in model.modules() if not hasattr(m, "_orig_mod")] if note_outputs else []
        self._hooks: list[Any] = []
        for name, parameter in model.named_parameters():
            self._leaf(parameter, "parameter", clean_name(name), learned=True)
        for name, buffer in model.named_buffers():
            self._leaf(buffer, "buffer", clean_name(name))
        for tensor in tree_iter(inputs):
            if isinstance(tensor, Tensor):
                self._leaf(tensor, "input", "", data=True)

    def __enter__(self) -> Recorder:
        self._hooks = [m.register_forward_hook(self._note_output, prepend=True) for m in self._noted]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exc: Any) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        super().__exit__(*exc)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # asked for several times in every operation
        if is_not_forward(func):
            return func(*args, **kwargs)
        call = self._begin(func, args, kwargs)
        out = self._execute(call, func, args, kwargs)
        with measuring():
            self._finish(call, func, args, kwargs, out)
        return out

    def _execute(self, call: Call, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    # ---------------------------------------------------------------- values and memory

    def _leaf(
        self, tensor: Tensor, op: str, name: str, *, data: bool = False, learned: bool = False, anew: bool = False
    ) -> int:
        known = None if anew else self._find(tensor)
        if known is not None:
            return known
        index = self._add_node(op, (), -1, tuple(tensor.shape), name=name, data=data, learned=learned)
        self._remember(tensor, index, fresh=True)
        return index

    def _find(self, tensor: Tensor) -> int | None:
        try:
            record = self._memory.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:  # sparse and nested tensors have no storage
            found = self._objects.get(id(tensor))
            return None if found is None else found[1]
        if record is None:
            return None
        return record.views.get(_geometry(tensor), record.latest)

    def _remember(self, tensor: Tensor, index: int, *, fresh: bool) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            self._objects[id(tensor)] = (tensor, index)
            return
        key = storage._cdata
        record = self._memory.get(key)
        if record is None or fresh:
            keep = storage if self._keep_storage else torch.multiprocessing.reductions.StorageWeakRef(storage)
            record = self._memory[key] = _Storage(keep, index)
        record.views[_geometry(tensor)] = index

    def node_of(self, tensor: Tensor, owner: str = "") -> int:
        """Index of the node behind a tensor; an unknown one is a constant, or a parameter of the running module."""
        found = self._find(tensor)
        if isinstance(tensor, nn.Parameter) and (found is None or self.graph.nodes[found].op != "parameter"):
            name = self._gathered_name(tensor, owner)
            if name:
                return self._leaf(tensor, "parameter", name, learned=True, anew=True)
        return self._leaf(tensor, "constant", "") if found is None else found

    def _gathered_name(self, tensor: Tensor, owner: str) -> str:
        """A sharded module runs with gathered parameters, which nobody has seen before it runs."""
        module = self._modules.get(owner)
        for name, parameter in module._parameters.items() if module is not None else ():
            if parameter is tensor:
                return f"{owner}.{name}" if owner else name
        return ""

    def _add_node(
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
        nodes = self.graph.nodes
        for source in inputs:
            node = nodes[source]
            data, learned, noise = data or node.data, learned or node.learned, noise or node.noise
        index = len(nodes)
        nodes.append(Node(index, op, inputs, call, shape, name, data, learned, noise, region, number))
        return index

    # ---------------------------------------------------------------- one operation

    def _begin(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        owner, line = locate(self.names, 2)
        inputs = tuple(self.node_of(a, owner) for a in tree_iter((args, kwargs)) if isinstance(a, Tensor))
        numbers = tuple(None if _holds_tensor(a) else a for a in args)
        others = {k: v for k, v in kwargs.items() if not _holds_tensor(v)}
        return Call(func, numbers, others, owner, line, user_line(2), inputs)

    def _finish(self, call: Call, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        graph = self.graph
        index = len(graph.calls)
        graph.calls.append(call)
        graph.executed[call.owner] = graph.executed.get(call.owner, 0) + 1
        written = ops.written_arguments(func)
        results = [t for t in tree_iter(out) if isinstance(t, Tensor)]
        if ops.is_random(func) and any(t.numel() == 1 for t in results):
            graph.lots += 1
        if not results and not written:
            return
        nodes = _Spelling(self, index, call, args, kwargs).nodes(results)
        self._place(func, args, kwargs, results, nodes)
        call.outputs = tuple(n for n in nodes if graph.nodes[n].call == index)

    def _place(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: list[Tensor],
        nodes: Sequence[int],
    ) -> None:
        """Note in which memory the results of an operation lie, and what in-place ones overwrite."""
        written = ops.written_arguments(func)
        targets = [kwargs.get(w) if isinstance(w, str) else args[w] if w < len(args) else None for w in written]
        for position, (tensor, node) in enumerate(zip(results, nodes, strict=True)):
            overwrites = position < len(targets) and targets[position] is tensor
            if overwrites:
                self._overwrite(tensor, node)
            else:
                self._remember(
                    tensor, node, fresh=not any(tensor is t for t in targets) and not self._aliases(tensor, args)
                )

    def _aliases(self, tensor: Tensor, args: tuple[Any, ...]) -> bool:
        try:
            key = tensor.untyped_storage()._cdata
        except NotImplementedError:
            return False
        for value in tree_iter(args):
            if isinstance(value, Tensor):
                with contextlib.suppress(NotImplementedError):
                    if value.untyped_storage()._cdata == key:
                        return True
        return False

    def _overwrite(self, tensor: Tensor, node: int) -> None:
        """After an in-place operation every view of that memory shows the new value."""
        try:
            record = self._memory[tensor.untyped_storage()._cdata]
        except (NotImplementedError, KeyError):
            self._remember(tensor, node, fresh=True)
            return
        record.latest = node
        record.views = {_geometry(tensor): node}

    def _note_output(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self.names.get(id(module))
        if name is None or torch._C._current_graph_task_id() != -1:
            return
        nodes = [self._find(t) for t in tree_iter(output) if isinstance(t, Tensor)]
        self.graph.outputs.append(ModuleOutput(name, tuple(-1 if n is None else n for n in nodes)))


class _Spelling:
    """Writes one operation as its parts: product, addition, norm, and so on."""

    def __init__(
        self, recorder: Recorder, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._recorder, self._index, self._call = recorder, index, call
        schema = call.func._schema.arguments
        self._arguments = {schema[i].name: a for i, a in enumerate(args)} | kwargs
        self._base = ops.base_name(call.func)

    def nodes(self, results: list[Tensor]) -> list[int]:
        shapes = [tuple(r.shape) for r in results]
        if not results:
            return []
        method = getattr(self, f"_spell_{self._base}", None)
        first = method(shapes[0]) if method is not None else None
        if first is None and self._base in ops.NORMS:
            first = self._affine("norm", shapes[0])
        if first is None:
            return [self._generic(r, s) for r, s in zip(results, shapes, strict=True)]
        return [first, *(self._add("statistic", self._call.inputs, s) for s in shapes[1:])]

    def _node(self, name: str) -> int | None:
        value = self._arguments.get(name)
        return self._recorder.node_of(value) if isinstance(value, Tensor) else None

    def _add(self, op: str, inputs: tuple[int, ...], shape: tuple[int, ...], **more: Any) -> int:
        return self._recorder._add_node(op, inputs, self._index, shape, **more)

    def _generic(self, result: Tensor, shape: tuple[int, ...]) -> int:
        nodes = self._recorder.graph.nodes
        base, inputs = self._base, self._call.inputs
        region = None
        shown = None
        if base in ops.PARTIAL_VIEWS and inputs:
            shown = self._shown_operand(result)
            region = _geometry(result) if shape != nodes[inputs[0]].shape else None
            base = "part" if region is not None else "view"
        elif base in ("detach", "lift_fresh") and inputs:
            return inputs[0]
        elif self._call.func.is_view:
            base = "view"
        noise = ops.is_random(self._call.func) and base not in ops.ATTENTION and "dropout" not in base
        latent = base in ops.NORMAL_NOISE  # a network may be fed by noise
        if base in ops.FACTORIES:
            inputs = tuple(
                i for i in inputs[1:] if not isinstance(self._arguments.get("self"), Tensor) or base == "fill"
            )
        index = self._add(base, inputs, shape, data=latent, noise=noise, region=region)
        nodes[index].shown = shown
        return index

    def _shown_operand(self, result: Tensor) -> int | None:
        """The operand of a concatenation that a partial view of it shows again."""
        graph, whole = self._recorder.graph, self._arguments["self"]
        node = graph.nodes[self._call.inputs[0]]
        if node.op not in ("cat", "stack") or not whole.is_contiguous():
            return None
        call, shown = graph.calls[node.call], _geometry(result)
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

    def _spell_add(self, shape: tuple[int, ...]) -> int | None:
        left, right = self._node("self"), self._node("other")
        if left is None or right is None:
            other = self._arguments.get("other")
            if left is not None and isinstance(other, int | float):
                return self._add("shift", (left,), shape, number=float(other) * float(self._arguments.get("alpha", 1)))
            return None
        return self._sum(left, self._scaled(right, self._arguments.get("alpha", 1), shape), shape)

    def _spell_sub(self, shape: tuple[int, ...]) -> int | None:
        left, right = self._node("self"), self._node("other")
        if left is None or right is None:
            other = self._arguments.get("other")
            if left is not None and isinstance(other, int | float):
                return self._add("shift", (left,), shape, number=-float(other) * float(self._arguments.get("alpha", 1)))
            return None
        return self._sum(left, self._scaled(right, -float(self._arguments.get("alpha", 1)), shape), shape)

    def _spell_rsub(self, shape: tuple[int, ...]) -> int | None:
        node, other = (
            self._scaled(self._node("self"), -float(self._arguments.get("alpha", 1)), shape),
            self._node("other"),
        )
        if other is not None:
            return self._sum(other, node, shape)
        number = self._arguments.get("other")
        return None if node is None else self._add("shift", (node,), shape, number=float(number or 0.0))

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
            inverse = self._add("reciprocal", (right,), self._recorder.graph.nodes[right].shape)
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
        tensor = self._arguments["self"]
        try:
            whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        except NotImplementedError:
            whole = False
        return self._add("clone", (source,), shape) if whole else self._add("copy_into", (target, source), shape)

    def _accumulated(self, name: str, shape: tuple[int, ...]) -> int | None:
        """Values added at some places of a tensor of data: the addition of a tensor that is zero elsewhere."""
        target, source = self._node("self"), self._node(name)
        if target is None or source is None or not self._recorder.graph.nodes[target].data:
            return None
        placed = self._add("scatter", (source,), shape)
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


# -------------------------------------------------------------------- running the forward


def call_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The plain forward."""
    return model(*args, **kwargs)


def trace(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, *, run: Run = call_model
) -> Graph:
    """Record one training-mode forward as a graph, and leave no trace of it.

    Tried in order: a copy made of fake tensors, which computes nothing; a real forward of a copy that shares the
    parameters, where the code looks at values; a real forward of the model itself with its state put back.

    Args:
        model: Any module; it is not changed.
        args: Positional inputs.
        kwargs: Keyword inputs.
        run: What to run instead of the plain forward, given the copy, ``args`` and ``kwargs``.

    Returns:
        The graph of the forward.

    Raises:
        TraceError: If every attempt failed; the forward's own error is its cause.

    Example:
        >>> graph = trace(nn.Linear(2, 3), (torch.randn(4, 2),))
        >>> [node.op for node in graph.nodes]
        ['parameter', 'parameter', 'input', 'view', 'mm', 'add']
    """
    kwargs = kwargs or {}
    first: BaseException | None = None
    for attempt in (_trace_fake, _trace_copy, _trace_in_place):
        try:
            with keep_rng(), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
                return _fullest(functools.partial(attempt, model, args, kwargs, run))
        except Exception as error:  # the next attempt decides; the last error is the forward's own
            first = error
    shapes = ", ".join(str(tuple(t.shape)) for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)) or "no tensor"
    raise TraceError(
        f"tried to run one forward of {type(model).__name__} with inputs of shapes {shapes}; expected it to run, but "
        f"it raised {type(first).__name__}: {first}. Pass inputs that fit the forward: "
        "`make_plan(model, args, kwargs)`, or `ResidualInit(example_inputs=...)`."
    ) from first


def _fullest(attempt: Callable[[], Graph]) -> Graph:
    """The forward, repeated where it draws lots: layers that are skipped at random would be missed by a single one."""
    before = _host_random_state()
    graph = attempt()
    if not graph.lots and _host_random_state() == before:
        return graph
    for _ in range(_DRAWS):
        other = attempt()
        graph = max(graph, other, key=lambda g: len(g.calls))
    return graph


def _host_random_state() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), repr(numpy.random.get_state()) if numpy is not None else None


def _trace_fake(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Graph:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo = {id(t): mode.from_tensor(t.detach()) for t in _computed_attributes(model)}
    memo |= {id(t): mode.from_tensor(t) for t in (*model.parameters(), *model.buffers())}
    with FakeCopyMode(mode):
        twin = copy.deepcopy(model, memo)
    _train_like(twin)
    with mode, _quiet(logging.getLogger("torch._subclasses.fake_tensor")):
        args, kwargs = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
        recorder = Recorder(twin, (args, kwargs), keep_storage=True, note_outputs=True)
        with recorder:
            run(twin, args, kwargs)
    return recorder.graph


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """What fails on fake tensors is tried again with real ones, whose error is the one to show."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _trace_copy(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Graph:
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    memo |= {id(t): t.detach().clone() for t in _computed_attributes(model)}
    twin = copy.deepcopy(model, memo)
    _train_like(twin)
    return _record_real(twin, args, kwargs, run)


def _trace_in_place(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Graph:
    with keep_state(model):
        _train_like(model)
        return _record_real(model, args, kwargs, run)


def _record_real(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Graph:
    args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), (args, kwargs))
    recorder = Recorder(model, (args, kwargs), note_outputs=True)
    with recorder:
        run(model, args, kwargs)
    return recorder.graph


def _train_like(model: nn.Module) -> None:
    """Training mode everywhere: evaluation takes fused paths that hide operations."""
    model.train()


def _computed_attributes(model: nn.Module) -> list[Tensor]:
    """Tensors kept as plain attributes that were computed from parameters, which ``deepcopy`` refuses."""
    found = []
    for module in model.modules():
        found += [v for v in vars(module).values() if isinstance(v, Tensor) and not v.is_leaf]
    return found


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Leave garbage for later: a graph is many objects, none of it garbage, and looking takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def keep_rng() -> Iterator[None]:
    """Put every random number generator back afterwards: torch, Python and, where it is loaded, numpy."""
    state, python = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    array = numpy.random.get_state() if numpy is not None else None
    device = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(array)
        if device:
            torch.cuda.set_rng_state_all(device)


@contextlib.contextmanager
def keep_state(model: nn.Module) -> Iterator[None]:
    """Put buffers, gradients, training flags and attributes of every module back, with what is in their containers."""
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    grads = [(p, p.grad) for p in model.parameters()]
    attributes = [(vars(m), dict(vars(m))) for m in model.modules()]
    containers = {id(v): (v, v.copy()) for _, own in attributes for v in own.values() if type(v) in _CONTAINERS}
    try:
        yield
    finally:
        for current, own in attributes:
            current.clear()
            current.update(own)
        for current, content in containers.values():
            current.clear()
            current.extend(content) if isinstance(current, list) else current.update(content)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, grad in grads:
            parameter.grad = grad


# Parameters, buffers, sub-modules and hooks of a module lie in such containers too.
_CONTAINERS = (dict, collections.OrderedDict, list, set)
