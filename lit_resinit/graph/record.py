"""Writes down every operation that runs below it as a graph.

One class, for a dispatch mode is one object; what lies in which memory, and the parts of an operation, are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lit_resinit.graph import ops
from lit_resinit.graph.faults import Faults
from lit_resinit.graph.lower import lower
from lit_resinit.graph.memory import Memory
from lit_resinit.graph.tensors import is_not_forward, measuring
from lit_resinit.graph.values import Call, Graph, ModuleOutput, Node
from lit_resinit.graph.where import aliases, clean_name, locate, module_names, user_line

_ORIGINAL = "the original runs, not its copy"
_LOTS = 1000  # lots that are set at most: a loop may wait for another one
_DEVICE = torch.ops.prim.device.default


def takes_hooks(module: nn.Module) -> bool:
    """Whether hooks can be registered on a module; scripted ones take none, and run as one piece."""
    return not isinstance(module, torch.jit.ScriptModule)


def _holds_tensor(argument: Any) -> bool:
    return any(isinstance(t, Tensor) for t in tree_iter(argument))


def announce(
    before_write: Callable[[Tensor], None], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Say which tensors an operation is about to write."""
    for tensor in tree_iter(ops.written(func, args, kwargs)):
        if isinstance(tensor, Tensor):
            before_write(tensor)


class _NotACopyError(Exception):
    """A copied network runs code of the original: a function kept as an attribute, which remembers the module."""


class Listener:
    """Hears of what a :class:`Recorder` writes down; a subclass says what it wants to hear."""

    def start(self, graph: Graph) -> None:
        """A recording begins, into this graph."""

    def leaf(self, node: Node, tensor: Tensor, *, anew: bool) -> None:
        """A parameter, buffer, input or constant is met for the first time, or ``anew`` after it was gathered."""

    def before(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operation is about to run; its inputs are in the graph."""

    def after(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """It has run, and is the newest call of the graph; no mode sees what is measured here."""


class Recorder(TorchDispatchMode):
    """Context manager that writes down every operation below it as a :class:`Graph`.

    Values are told apart by the memory they live in, not by Python object, so that views, ``detach`` and in-place
    operations are followed. Operations of a backward pass that runs inside are left out.

    Args:
        model: Module whose parameters, buffers and module names are used.
        inputs: Anything with tensors in it that counts as data.
        keep_storage: Whether to keep the memory of every value alive, which is free for fake tensors only.
        note_outputs: Whether to note what every call of a module returned.
        lot: What takes the place of single numbers that are drawn.
        original: The module that ``model`` is a copy of; where it runs instead, recording stops with an error.
        listeners: Who hears of every operation, in this order.
        strange_is_data: Whether a tensor that is no parameter, no buffer and was not made here counts as data too.
        before_write: Called with every tensor that an operation is about to write.
        faults: What becomes of an exception of ours; it passes on when None. From the first one kept on nothing is
            written down.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any = (),
        *,
        keep_storage: bool = False,
        note_outputs: bool = False,
        lot: float | None = None,
        original: nn.Module | None = None,
        listeners: Sequence[Listener] = (),
        strange_is_data: bool = False,
        before_write: Callable[[Tensor], None] | None = None,
        faults: Faults | None = None,
    ) -> None:
        super().__init__()
        self._before_write = before_write
        self.faults = Faults(strict=True) if faults is None else faults
        self._strange_is_data = strange_is_data
        self.listeners = list(listeners)
        self._lot = lot
        self.names = module_names(model)
        self.graph = Graph(aliases=aliases(model, self.names))
        for listener in self.listeners:
            listener.start(self.graph)
        self.memory = Memory(self.graph, keep_storage=keep_storage)
        self._modules = {clean_name(name): module for name, module in model.named_modules()}
        noted = (m for m in model.modules() if not hasattr(m, "_orig_mod") and takes_hooks(m))
        self._noted = list(noted) if note_outputs else []
        self._hooks: list[Any] = []
        self._strangers: set[int] = set()
        if original is not None:
            self.names |= {id(m): _ORIGINAL for m in original.modules() if id(m) not in self.names}
            self._strangers = {id(p) for p in original.parameters()} - {id(p) for p in model.parameters()}
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
        if self._before_write is not None and ops.written_arguments(func):
            announce(self._before_write, func, args, kwargs)
        if is_not_forward(func) or self.faults.first is not None:
            return func(*args, **kwargs)
        call = None
        with self.faults:
            call = self.begin(func, args, kwargs)
            for listener in self.listeners:
                listener.before(call, args, kwargs)
        out = func(*args, **kwargs)
        if call is not None and self.faults.first is None:
            with self.faults, measuring():
                self._finish(call, func, args, kwargs, out)
                for listener in self.listeners:
                    listener.after(call, args, kwargs, out)
        return out

    def forget(self) -> None:
        """Let go of every tensor and listener; the graph stays."""
        self.memory.clear()
        self.listeners.clear()

    # ---------------------------------------------------------------- values and memory

    def _leaf(
        self, tensor: Tensor, op: str, name: str, *, data: bool = False, learned: bool = False, anew: bool = False
    ) -> int:
        known = None if anew else self.memory.find(tensor)
        if known is not None:
            return known
        index = self.graph.add(op, (), -1, tuple(tensor.shape), name=name, data=data, learned=learned)
        self.memory.remember(tensor, index, fresh=True)
        for listener in self.listeners:
            listener.leaf(self.graph.nodes[index], tensor, anew=anew)
        return index

    def node_of(self, tensor: Tensor, owner: str = "", *, made: bool = False) -> int:
        """Index of the node behind a tensor; an unknown one is a constant, or a parameter of the running module."""
        found = self.memory.find(tensor)
        if isinstance(tensor, nn.Parameter) and (found is None or self.graph.nodes[found].op != "parameter"):
            name = self._gathered_name(tensor, owner)
            if name:
                return self._leaf(tensor, "parameter", name, learned=True, anew=True)
        if found is None and id(tensor) in self._strangers:
            raise _NotACopyError(_ORIGINAL)
        if found is not None:
            return found
        if self._strange_is_data and not made:
            return self._leaf(tensor, "input", "", data=True)
        return self._leaf(tensor, "constant", "")

    def _gathered_name(self, tensor: Tensor, owner: str) -> str:
        """A sharded module runs with gathered parameters, which nobody has seen before it runs."""
        module = self._modules.get(owner)
        for name, parameter in module._parameters.items() if module is not None else ():
            if parameter is tensor:
                return f"{owner}.{name}" if owner else name
        return ""

    # ---------------------------------------------------------------- one operation

    def begin(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """An operation that is about to run, with the nodes of its inputs, the module and the line that run it."""
        owner, line = locate(self.names, 2)
        if owner == _ORIGINAL:
            raise _NotACopyError(_ORIGINAL)
        made = ops.base_name(func).startswith("lift_fresh")  # what `torch.tensor` makes
        inputs = tuple(self.node_of(a, owner, made=made) for a in tree_iter((args, kwargs)) if isinstance(a, Tensor))
        numbers = tuple(None if _holds_tensor(a) else a for a in args)
        others = {k: v for k, v in kwargs.items() if not _holds_tensor(v)}
        return Call(func, numbers, others, owner, line, user_line(2), inputs, graded=torch.is_grad_enabled())

    def _finish(self, call: Call, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        graph = self.graph
        index = len(graph.calls)
        graph.calls.append(call)
        graph.executed[call.owner] = graph.executed.get(call.owner, 0) + 1
        written = ops.written_arguments(func)
        results = [t for t in tree_iter(out) if isinstance(t, Tensor)]
        if ops.is_random(func):
            self._draw([t for t in results if t.numel() == 1])
        if not results and not written:
            return
        nodes = lower(graph, index, call, args, kwargs, results, self.node_of)
        self.memory.place(func, args, kwargs, results, nodes)
        call.outputs = tuple(n for n in nodes if graph.nodes[n].call == index)

    def _draw(self, lots: list[Tensor]) -> None:
        """Count single numbers drawn, by which a forward may choose its way, and put the given lot in their place."""
        self.graph.lots += bool(lots)
        if self._lot is not None and self.graph.lots <= _LOTS:
            for tensor in lots:
                if not isinstance(tensor, FakeTensor):  # which has no memory, and no value to look at
                    tensor.fill_(self._lot)

    def _note_output(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self.names.get(id(module))
        if name is None or torch._C._current_graph_task_id() != -1:
            return
        leaves = list(tree_iter(output))
        nodes = [self.memory.find(t) for t in leaves if isinstance(t, Tensor)]
        held = [self.memory.find(t) for t in _held_by(leaves)]
        self.graph.outputs.append(
            ModuleOutput(name, *(tuple(-1 if n is None else n for n in ns) for ns in (nodes, held)))
        )


def _held_by(leaves: list[Any], depth: int = 2) -> list[Tensor]:
    """Tensors that plain objects hold as attributes, some objects in objects deep."""
    objects = [x for x in leaves if hasattr(x, "__dict__") and not isinstance(x, Tensor | nn.Module | type)]
    inner = [value for x in objects for value in tree_iter(vars(x))]
    return [t for t in inner if isinstance(t, Tensor)] + (_held_by(inner, depth - 1) if objects and depth else [])
