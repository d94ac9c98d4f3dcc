"""The error of one backward, on both sides of every operation: hooks on the autograd graph.

One file, for the hooks and the window on a backward written in Python note the same errors in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lit_resinit.graph import ops
from lit_resinit.graph.eager import eager
from lit_resinit.graph.ops import Does
from lit_resinit.graph.record import Listener, Recorder
from lit_resinit.graph.tensors import local, measuring, peak_of, to_host
from lit_resinit.graph.values import Call, Graph, Node
from lit_resinit.graph.where import clean_name, user_line
from lit_resinit.judge.hooked import HookedParameters
from lit_resinit.judge.seen import Hooked

_LEAVES_OUT = Does.MERGES | Does.PICKS | Does.CUTS | Does.MULTIPLIES


class Errors(Listener):
    """Hooks the autograd graph of a recorded forward, to see the error on both sides of every operation.

    Args:
        model: The model.
        recorder: Who records the forward, and has this among its listeners.
    """

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self.recorder, self.faults = recorder, recorder.faults
        self.written: dict[tuple[int, int | str], str] = {}
        self.applied: dict[int, str] = {}
        self.python: dict[int, str] = {}
        self.hooked = HookedParameters(self.push, self.keep, self.faults)
        self._functions: dict[int, tuple[Any, int]] = {}
        self._windows: dict[int, _Window] = {}
        self._eager = contextlib.ExitStack()
        self._known = _Known(recorder.graph)
        self._handles: list[Any] = []
        self._fresh: list[Tensor] = []
        self._errors: list[Tensor] = []
        self._arriving: dict[int, int] = {}
        self._edges: list[tuple[int, int | str, int]] = []
        self._sent: dict[int, list[int]] = {}
        self._received: list[tuple[int, list[int], int]] = []
        self._everywhere: dict[int, int] = {}
        self._halved: set[tuple[int, int | str]] = set()
        self._parameters = {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
        self._parameter_names = {id(p): clean_name(n) for n, p in model.named_parameters()}

    # ---------------------------------------------------------------- the forward

    def leaf(self, node: Node, tensor: Tensor, *, anew: bool) -> None:
        """A gathered parameter has a name too."""
        if anew:
            self._parameter_names[id(tensor)] = node.name

    def before(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook what made the inputs."""
        self.link_fresh()
        for value in (*args, *kwargs.values()):
            for tensor in _tensors(value):
                self.link(tensor)

    def after(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """The outputs have their autograd function only later."""
        if not call.graded:
            self.applied[len(self.recorder.graph.calls) - 1] = _applied_at()
        self._fresh = _tensors(out)

    def run_again(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        """An operation of a forward that the backward runs again: its autograd function is that of the first run."""
        first, results = self._known.find(call), [t for t in tree_iter(out) if isinstance(t, Tensor)]
        if first is not None and len(first.outputs) == len(results):
            self.recorder.memory.place(func, args, kwargs, results, first.outputs)
        self._fresh = _tensors(out)

    def link(self, tensor: Tensor) -> None:
        """Note which operation the autograd function behind a tensor belongs to, and hook it."""
        function = tensor.grad_fn
        if function is None or id(function) in self._functions:
            return
        call = self._call_behind(tensor)
        if call < 0:
            return
        self._functions[id(function)] = function, call
        for window in list(self._windows.values())[-1:]:
            window.runs_again = True
        if isinstance(function, BackwardCFunction):
            self.keep(function.register_prehook(functools.partial(self._on_python, id(function))))
        self.keep(function.register_hook(functools.partial(self._on_backward, function, call)))

    def link_fresh(self) -> None:
        """Link what the last operation returned, which has its autograd function only now."""
        for tensor in self._fresh:
            self.link(tensor)

    def _call_behind(self, tensor: Tensor) -> int:
        node = self.recorder.memory.find(tensor)
        return self.recorder.graph.nodes[node].call if node is not None else -1

    # ---------------------------------------------------------------- the backward

    def _on_python(self, function: int, grad_outputs: Any) -> None:
        """The backward of a function written in Python begins, which may run a forward (activation checkpointing)."""
        if self.faults.first is not None or torch.is_grad_enabled():
            return  # in the second case every backward is recorded for a second one, and no forward is meant
        with self.faults:
            if not self._windows:
                self._eager.enter_context(eager())
            self._windows[function] = _Window(self)

    def _on_backward(self, function: Any, call: int, grad_inputs: Any, grad_outputs: Any) -> None:
        window = self._windows.pop(id(function), None)
        if window is not None:
            window.close()
            if not self._windows:
                self._eager.close()
            if not window.runs_again:
                self.python[call] = type(function).__name__.removesuffix("Backward")
            if window.reached:  # the operations inside have sent these errors already
                grad_inputs = ()
        if self.faults.first is None:
            with self.faults, measuring():
                self._note_arriving(function, call, grad_outputs)
                self._note_sent(function, call, grad_inputs, window)

    def _note_arriving(self, function: Any, call: int, grad_outputs: Any) -> None:
        arriving = [p for p in (peak_of(g) for g in grad_outputs if g is not None) if p is not None]
        if arriving:
            self._arriving[call] = self.push(functools.reduce(torch.maximum, arriving))
            if ops.does(ops.base_name(self.recorder.graph.calls[call].func), _LEAVES_OUT):
                self._everywhere[call] = self.push(_is_everywhere(next(g for g in grad_outputs if g is not None)))
            self._received.append((call, self._sent.pop(id(function), []), self._arriving[call]))

    def _note_sent(self, function: Any, call: int, grad_inputs: Any, window: _Window | None) -> None:
        for grad, (target, _) in zip(grad_inputs, function.next_functions, strict=False):
            peak = peak_of(grad) if grad is not None and target is not None else None
            key = self._key_of(target, grad) if peak is not None else None
            if peak is None or key is None or key == call:  # a tensor subclass: two functions of one operation
                continue
            self._edges.append((call, key, self.push(peak)))
            if grad.dtype == torch.float16:
                self._halved.add((call, key))
            self._sent.setdefault(id(target), []).append(self._edges[-1][2])
            line = window.made_from_nothing(grad) if window is not None else None
            if line is not None:
                self.written[call, key] = line

    def _key_of(self, target: Any, grad: Tensor) -> int | str | None:
        """The parameter or the operation that an error goes to, if it is known."""
        variable, known = getattr(target, "variable", None), self._functions.get(id(target))
        name = self._parameter_names.get(id(variable)) if variable is not None else None
        if name is not None:
            own = self._parameters.get(name)
            if own is not None and id(own) == id(variable):
                self.hooked.watch(name, own, target, grad)
            return name
        if known is not None:
            return known[1]
        return self._behind(variable) if self._windows and variable is not None else None

    def _behind(self, leaf: Tensor) -> int | None:
        """The operation whose output, detached, entered a forward that is run again."""
        call = self._call_behind(leaf)
        if call < 0:
            return None
        next(reversed(self._windows.values())).reached = True
        return call

    def push(self, peak: Tensor) -> int:
        """Remember the size of an error, on the device."""
        self._errors.append(peak)
        return len(self._errors) - 1

    def keep(self, handle: Any) -> None:
        """A hook, to be removed at the end."""
        self._handles.append(handle)

    # ---------------------------------------------------------------- after it

    @property
    def seen(self) -> bool:
        """Whether an error arrived anywhere yet."""
        return bool(self._arriving)

    def numbers(self) -> Arrived:
        """Everything that arrived and was sent, in one transfer from the device."""
        errors = to_host(self._errors)
        edges: dict[int | str, list[tuple[int, float]]] = {}
        for consumer, target, i in self._edges:
            edges.setdefault(target, []).append((consumer, errors[i]))
        replaced = {c for c, sent, i in self._received if _is_replaced([errors[j] for j in sent], errors[i])}
        arriving = {call: errors[i] for call, i in self._arriving.items()}
        full = frozenset(call for call, i in self._everywhere.items() if errors[i] == 1.0)
        return Arrived(arriving, edges, replaced, self.hooked.numbers(errors), full, frozenset(self._halved))

    def close_windows(self) -> None:
        """Forget those of a backward that raised; autograd has put the stacks of modes back."""
        self._windows.clear()
        self._eager.close()

    def release(self) -> list[Any]:
        """Remove every hook and let go of every tensor.

        Returns:
            The functions of the autograd graph that Python has seen, in the order of the forward. Such functions take
            along what lies before them, one inside the other, so that a deep graph that goes at once ends the process:
            hold the list until the loss is gone, and it goes one by one, the last first.
        """
        for handle in self._handles:
            handle.remove()
        self._handles, self._fresh = [], []
        self.hooked.forget()
        functions = [function for function, _ in self._functions.values()]
        self._functions.clear()
        return functions


@dataclasses.dataclass(frozen=True, slots=True)
class Arrived:
    """The errors of a backward as numbers, as :class:`~lit_resinit.judge.flow.Flow` describes them."""

    arriving: dict[int, float]
    edges: dict[int | str, list[tuple[int, float]]]
    replaced: set[int]
    hooked: dict[str, Hooked]
    full: frozenset[int]
    halved: frozenset[tuple[int, int | str]]


class _Window(TorchDispatchMode):
    """Sees what the backward of one function written in Python runs.

    Not entered with ``with``, whose bookkeeping would be left where the backward raises: autograd puts both stacks of
    modes back by itself.
    """

    supports_higher_order_operators = True  # they are passed on as they are

    def __init__(self, errors: Errors) -> None:
        super().__init__()
        self._errors, self._task = errors, torch._C._current_graph_task_id()
        self.reached = self.runs_again = False
        self._made: dict[int, tuple[Tensor, str]] = {}
        linking = _Linking(errors)
        torch._C._push_on_torch_dispatch_stack(self)
        torch._C._push_on_torch_function_stack(linking)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        ours = isinstance(func, OpOverload) and func.namespace != "prim"
        faults = self._errors.faults
        if not ours or faults.first is not None or torch._C._current_graph_task_id() != self._task:
            return func(*args, **kwargs)
        call = None
        with faults:
            call = self._errors.recorder.begin(func, args, kwargs)
            self._errors.before(call, args, kwargs)
        out = func(*args, **kwargs)
        if call is not None and faults.first is None:
            with faults, measuring():
                self._errors.run_again(func, args, kwargs, out, call)
                self._note_makers(func, args, kwargs, out, call.source)
        return out

    def _note_makers(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, line: str
    ) -> None:
        """Which memory holds what was made from nothing: from no tensor, or from such tensors only."""
        base = ops.base_name(func)
        read = [] if ops.does(base, Does.CREATES) else [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        made = not base.startswith(("empty", "new_empty")) and all(_memory_of(t) in self._made for t in read)
        given = dict(enumerate(args)) | kwargs
        targets = [given.get(w) for w in ops.written_arguments(func)]
        for tensor in (t for t in tree_iter((out, targets)) if isinstance(t, Tensor)):
            if made:
                self._made.setdefault(_memory_of(tensor), (tensor, line))
            else:
                self._made.pop(_memory_of(tensor), None)

    def made_from_nothing(self, tensor: Tensor) -> str | None:
        """The line that made a gradient without looking at any error, if one did."""
        return self._made.get(_memory_of(tensor), (tensor, None))[1]

    def close(self) -> None:
        torch._C._pop_torch_function_stack()
        torch._C._pop_torch_dispatch_stack(None)


class _Linking(TorchFunctionMode):
    """Links the last operation too, behind which only the backward comes."""

    def __init__(self, errors: Errors) -> None:
        super().__init__()
        self._errors = errors

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._errors.faults.first is None:
            with self._errors.faults:
                self._errors.link_fresh()
        return out


class _Known:
    """Finds the first run of an operation that is run again: it did the same with the same values."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._calls: dict[tuple[Any, ...], Call] = {}
        self._same: dict[int, int] = {}
        self._seen = 0

    def find(self, call: Call) -> Call | None:
        for known in self._graph.calls[self._seen :]:
            first, *_ = [self._calls.setdefault(key, known) for key in self._keys(known)]
            self._same |= zip(known.outputs, first.outputs, strict=False)
        self._seen = len(self._graph.calls)
        return next((self._calls[key] for key in self._keys(call) if key in self._calls), None)

    def _keys(self, call: Call) -> list[tuple[Any, ...]]:
        """From the strictest on: a kernel may be told whether a backward will come, and a value be computed anew."""
        nodes = [self._graph.nodes[i] for i in call.inputs]
        inputs = tuple(map(self._identity, nodes))
        learned = tuple(i for i, n in zip(inputs, nodes, strict=True) if n.learned and not n.data)
        keys: list[tuple[Any, ...]] = [(call.func, inputs, repr((call.args, call.kwargs))), (call.func, inputs)]
        return [*keys, (call.func, "learned", learned)] if learned else keys

    def _identity(self, node: Node) -> int | str:
        """Parameters may be gathered anew, and constants made anew, for every run."""
        if node.op == "parameter":
            return node.name
        return -1 if node.op == "constant" else self._same.get(node.index, node.index)


def _applied_at() -> str:
    """``file.py:line`` that applies the running function written in Python; empty where none is known to run."""
    frame, depth = sys._getframe().f_back, 1
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and issubclass(type(frame.f_locals.get(code.co_varnames[0])), FunctionCtx):
            return user_line(depth + 2)
        frame, depth = frame.f_back, depth + 1
    return ""


def _memory_of(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse and nested tensors
        return id(tensor)


def _is_replaced(sent: list[float], arrived: float) -> bool:
    """Whether a hook replaced an error: of several that were sent, all but one have to be zero to be sure."""
    return (
        sum(s != 0.0 for s in sent) == 1 and math.isfinite(sum(sent)) and (arrived == 0.0 or not math.isfinite(arrived))
    )


def _is_everywhere(error: Tensor) -> Tensor:
    """One where an error arrived at every element, else zero."""
    try:
        return local(error).detach().bool().all().float()
    except (RuntimeError, NotImplementedError):  # sparse and quantised tensors
        return torch.zeros(())


def _tensors(out: Any) -> list[Tensor]:
    return [t for t in (out if isinstance(out, list | tuple) else (out,)) if isinstance(t, Tensor)]
