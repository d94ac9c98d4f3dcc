"""What is put back after a forward that nobody is to notice: generators, tensors, gradients, attributes."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import gc
import io
import operator
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit.graph.tensors import local

_DATA = 1_000  # elements; a container or tensor of data that is larger holds data, and no state of whoever reads them
_MOST = 100_000  # objects looked at below what holds data
_ALL_ONES = 0x12DD9BB3  # what a Mersenne Twister holds where it gives 32 ones

_ATOMS = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(Ellipsis)}
_EMPTY = {dict, list, set, collections.OrderedDict}  # most of what a module holds is an empty one of these
_CLOSED = (type, types.ModuleType, types.BuiltinFunctionType, range, slice, enum.Enum)  # nobody's state
_STREAMS = ("__next__", "read", "recv")
_PLAIN = (Tensor, nn.Parameter)


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


def cast_lots(lot: float) -> None:
    """Let the next few hundred draws of Python's and numpy's generators all be zero, or all be nearly one."""
    words = [_ALL_ONES if lot else 0] * 623 + [1]  # the last one ends it: a loop may wait for another draw
    random.setstate((3, (*words, 0), None))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.set_state(("MT19937", numpy.array(words, dtype=numpy.uint32), 0))


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


def host_random_state() -> tuple[Any, ...]:
    """Where the generators of Python and, where it is loaded, numpy stand."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    _, words, *rest = numpy.random.get_state()
    return random.getstate(), (words.tobytes(), *rest)


@contextlib.contextmanager
def keep_state(model: nn.Module, *, announced: bool = False) -> Iterator[Kept]:
    """Put everything back that a model holds: parameters, buffers, gradients, flags, attributes and what is in them.

    Args:
        model: The model.
        announced: Whether :meth:`Kept.before_write` is called before any operation writes. Parameters, most of what a
            model holds and hardly ever written in a forward, are then copied only if they are.
    """
    kept = Kept(model, later=model.parameters() if announced else ())
    try:
        yield kept
    finally:
        kept.put_back()


# -------------------------------------------------------------------- what objects hold


class Kept:
    """What objects hold now, with everything below them, to be put back later.

    Followed are attributes, containers, tensors, arrays and generators of random numbers, and below data also what a
    function remembers. Nothing is called on the way but what reads a state.

    Args:
        roots: The objects.
        apart: Objects that are not looked into.
        data: Whether the objects hold data: tensors and containers of more than a thousand elements then count as
            such and not as a state, so that nothing large is copied.
        later: Tensors that are copied in :meth:`before_write`, if at all.

    Attributes:
        streams: Kinds of what was met that moves on and cannot be put back: a generator, a file, a socket.
    """

    def __init__(
        self, *roots: Any, apart: tuple[Any, ...] = (), data: bool = False, later: Iterable[Tensor] = ()
    ) -> None:
        self.streams: list[str] = []
        self._data = data
        self._later = {id(t) for t in later}
        self._uncopied: dict[int, list[_KeptTensor]] = {}  # by their memory
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[_KeptTensor] = []
        self._others: list[Any] = []  # functions without arguments that put one thing back
        self._empty: list[Any] = []
        self._apart = apart
        self._keepers: dict[type, Callable[[Any], Iterable[Any]]] = {}
        with torch.no_grad():
            self._look(list(roots))

    def before_write(self, tensor: Tensor) -> None:
        """Copy what was left for later and lies in the memory of a tensor that is about to be written."""
        if self._uncopied:
            for kept in self._uncopied.pop(_memory_of(tensor), ()):
                kept.copy()

    def put_back(self) -> None:
        """Make everything what it was; what did not change is not touched."""
        for current, before in self._attributes:
            if not _equal(current, before):
                current.clear()
                current.update(before)
        for container in self._empty:
            if container:
                container.clear()
        for container, content in self._containers:
            _refill(container, content)
        with torch.no_grad():
            for tensor in self._tensors:
                tensor.put_back()
        for put_back in self._others:
            put_back()

    def _look(self, stack: list[Any]) -> None:
        seen = {id(x) for x in self._apart}
        empty = self._empty
        while stack and not (self._data and len(seen) > _MOST):
            value = stack.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            for found in self._keep(value):
                kind = type(found)
                if kind in _EMPTY and not found:
                    empty.append(found)
                elif kind not in _ATOMS:
                    stack.append(found)

    def _keep(self, value: Any) -> Iterable[Any]:
        """Note one object, and return what is to be looked at next."""
        kind = type(value)
        if value.__class__ is not kind:  # a proxy, which is what it stands for
            return self._keeper_of(value)(value)
        if kind not in self._keepers:
            self._keepers[kind] = self._keeper_of(value)
        return self._keepers[kind](value)

    def _keeper_of(self, value: Any) -> Callable[[Any], Iterable[Any]]:
        """What notes objects of a kind."""
        numpy = sys.modules.get("numpy")
        if isinstance(value, nn.Module):
            return self._keep_attributes
        if isinstance(value, dict | list | set | collections.deque):
            return self._keep_container
        if isinstance(value, Tensor):
            return self._keep_tensor
        if isinstance(value, tuple | frozenset):
            return self._keep_fixed
        if isinstance(value, types.FunctionType):  # what it remembers is its maker's
            return self._keep_function if self._data else _keep_nothing
        if isinstance(value, _CLOSED) or getattr(type(value), "outside_the_network", False):
            return _keep_nothing
        if isinstance(value, types.MethodType):
            return operator.attrgetter("__self__", "__func__")
        if isinstance(value, functools.partial):
            return operator.attrgetter("func", "args", "keywords")
        if isinstance(value, torch.Generator | random.Random):
            return self._keep_generator
        if numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState | numpy.ndarray):
            return self._keep_numpy
        return self._keep_stream if _is_stream(value) else self._keep_attributes

    def _keep_stream(self, value: Any) -> Iterable[Any]:
        self.streams.append(type(value).__name__)
        return ()

    def _keep_fixed(self, value: Any) -> Iterable[Any]:
        return value if self._is_looked_into(value) else ()

    def _keep_attributes(self, value: Any) -> Iterable[Any]:
        own = getattr(value, "__dict__", None)
        before: dict[str, Any] = {n: getattr(value, n) for n in _slots(value.__class__) if hasattr(value, n)}
        if before:
            self._others.append(functools.partial(_set_all, value, before))
        if not isinstance(own, dict):
            return before.values()
        before_own = dict(own)
        self._attributes.append((own, before_own))
        return [*before_own.values(), *before.values()] if before else before_own.values()

    def _keep_container(self, value: Any) -> Any:
        content = (
            dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)
        ) or None
        self._containers.append((value, content))
        if content is None or not self._is_looked_into(value):
            return ()
        return content.values() if isinstance(content, dict) else content

    def _is_looked_into(self, value: Any) -> bool:
        return not self._data or len(value) <= _DATA

    def _keep_tensor(self, value: Tensor) -> Any:
        if self._data and (value.is_nested or value.numel() > _DATA):
            return ()
        kept = _KeptTensor(value)
        self._tensors.append(kept)
        memory = _memory_of(value) if id(value) in self._later else 0
        if memory:
            self._uncopied.setdefault(memory, []).append(kept)
        else:
            kept.copy()
        return () if kept.grad is None else (kept.grad,)

    def _keep_function(self, value: Any) -> Any:
        found: list[Any] = [*vars(value).values(), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                content = cell.cell_contents
                found.append(content)
                self._others.append(functools.partial(setattr, cell, "cell_contents", content))
        return found

    def _keep_generator(self, value: Any) -> Iterable[Any]:
        read, write = (
            (value.get_state, value.set_state)
            if isinstance(value, torch.Generator)
            else (value.getstate, value.setstate)
        )
        self._others.append(functools.partial(write, read()))
        return ()

    def _keep_numpy(self, value: Any) -> Iterable[Any]:
        """Numpy's arrays and generators of random numbers."""
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.random.Generator):
            self._others.append(functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, numpy.random.RandomState):
            self._others.append(functools.partial(value.set_state, value.get_state()))
        elif value.flags.writeable and not (self._data and value.size > _DATA):
            self._others.append(functools.partial(numpy.copyto, value, value.copy()))
        return ()


def _keep_nothing(value: Any) -> Iterable[Any]:
    """It is nobody's state."""
    return ()


class _KeptTensor:
    """Value, gradient, memory and flag of one tensor."""

    __slots__ = ("flag", "grad", "memory", "tensor", "value", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.grad = tensor, tensor.grad if tensor.is_leaf else None
        self.flag, self.version = tensor.requires_grad, _version(tensor)
        self.memory: Tensor | None = None
        self.value: Tensor | None = None
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):  # a parameter without a shape yet
            self.memory = tensor.detach()

    def copy(self) -> None:
        """Keep the values too."""
        try:
            self.value = None if self.memory is None else self.memory.clone()
        except (RuntimeError, NotImplementedError, ValueError):
            self.memory = None

    def put_back(self) -> None:
        tensor = self.tensor
        if self.memory is not None and not _same_memory(tensor, self.memory):
            tensor.data = self.memory
        if self.value is not None and not _same_values(tensor, self.value, self.version):
            tensor.detach().copy_(self.value)
        if tensor.is_leaf:
            if tensor.grad is not self.grad:
                tensor.grad = self.grad
            if tensor.requires_grad != self.flag:
                tensor.requires_grad_(self.flag)


def _memory_of(tensor: Tensor) -> int:
    """What tells the memory of a plain tensor from any other; 0 for tensors that are made of several, or have none."""
    try:
        storage = tensor.untyped_storage() if type(tensor) in _PLAIN else None
    except (RuntimeError, NotImplementedError, ValueError):
        return 0
    return 0 if storage is None or not storage.nbytes() else storage._cdata


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _same_memory(left: Tensor, right: Tensor) -> bool:
    try:
        return left.data_ptr() == right.data_ptr() and left.shape == right.shape
    except (RuntimeError, NotImplementedError):  # tensors without storage, or made of several
        return True


def _same_values(left: Tensor, right: Tensor, version: int) -> bool:
    try:
        return torch.equal(local(left.detach()), local(right))
    except (RuntimeError, NotImplementedError, AttributeError):  # kinds of tensors that cannot be compared
        return _version(left) == version


def _equal(current: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether every name stands for the very object that it stood for."""
    if len(current) != len(before) or not all(map(operator.is_, current.values(), before.values())):
        return False
    names = zip(current, before, strict=True)
    return all(map(operator.is_, current, before)) or all(
        a is b or (not isinstance(a, Tensor) and a == b) for a, b in names
    )


def _refill(container: Any, content: Any) -> None:
    if not container and not content:
        return
    if isinstance(container, dict):
        if not _equal(container, content or {}):
            kind = collections.OrderedDict if isinstance(container, collections.OrderedDict) else dict
            kind.clear(container)
            kind.update(container, content or {})
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, content or ())
    elif len(container) != len(content or ()) or any(x is not y for x, y in zip(container, content, strict=True)):
        kind_of_list: Any = list if isinstance(container, list) else collections.deque
        kind_of_list.clear(container)
        kind_of_list.extend(container, content or ())


def _set_all(value: Any, before: dict[str, Any]) -> None:
    for name, content in before.items():
        if getattr(value, name, None) is not content:
            object.__setattr__(value, name, content)


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    """Names of attributes that instances hold outside their dictionary; none of classes written in C."""
    found = [vars(c).get("__slots__", ()) for c in kind.__mro__]
    names = [n for own in found for n in ((own,) if isinstance(own, str) else own)]
    return tuple(n for n in names if not n.startswith("__"))


def _is_stream(value: Any) -> bool:
    """Whether something moves on when it is read: an iterator that is not made of attributes, a file, a socket."""
    if isinstance(value, io.IOBase):
        return True
    made_of_attributes = hasattr(value, "__dict__")
    return any(hasattr(type(value), n) for n in (_STREAMS[1:] if made_of_attributes else _STREAMS))
