"""One training-mode forward as a graph, run so that nobody notices: fake, copied or in place."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_iter, tree_map_only

from lit_resinit.errors import TraceError
from lit_resinit.graph.eager import eager, signals_held
from lit_resinit.graph.keep import cast_lots, host_random_state, keep_rng, keep_state
from lit_resinit.graph.record import Recorder
from lit_resinit.graph.tensors import end_measuring
from lit_resinit.graph.values import Graph

_DRAWS = 6  # more forwards where one draws lots (layer drop), the fullest of which is kept

Run = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def call_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The plain forward."""
    return model(*args, **kwargs)


def trace(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, *, run: Run = call_model
) -> Graph:
    """Record one training-mode forward as a graph, and leave no trace of it.

    Tried in order: a copy made of fake tensors, which computes nothing; a real forward of a copy, where the code looks
    at values; a real forward of the model itself, with all that it holds put back. Ctrl-C waits for the fake tensors.

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
    end_measuring()
    kwargs = kwargs or {}
    first: BaseException | None = None
    for attempt in (_trace_fake, _trace_copy, _trace_in_place):
        try:
            with keep_rng(), torch.inference_mode(False), torch.enable_grad(), eager():
                return _fullest(functools.partial(attempt, model, args, kwargs, run))
        except Exception as error:  # the next attempt decides; the last error is the forward's own
            first = error
    shapes = ", ".join(str(tuple(t.shape)) for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)) or "no tensor"
    raise TraceError(
        f"tried to run one forward of {type(model).__name__} with inputs of shapes {shapes}; expected it to run, but "
        f"it raised {type(first).__name__}: {first}. Pass inputs that fit the forward: "
        "`make_plan(model, args, kwargs)`, or `ResidualInit(example_inputs=...)`."
    ) from first


def _fullest(attempt: Callable[[float | None], Graph]) -> Graph:
    """The forward, repeated where it draws lots: layers that are skipped at random would be missed by a single one.

    Where every lot is the smallest, or the largest there is, either all layers run that lots decide upon, or none.
    """
    before = host_random_state()
    graph = attempt(None)
    if not graph.lots and host_random_state() == before:
        return graph
    for lot in (0.0, 1.0 - 2.0**-24, *[None] * _DRAWS):
        with keep_rng() if lot is not None else contextlib.nullcontext():
            if lot is not None:
                cast_lots(lot)
            other = attempt(lot)
        graph = max(graph, other, key=lambda g: len(g.calls))
    return graph


def _trace_fake(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run, lot: float | None) -> Graph:
    with signals_held():
        return _record_fake(model, args, kwargs, run, lot)


def _record_fake(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run, lot: float | None) -> Graph:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    shared = _shared_storages(model)
    memo = {id(t): mode.from_tensor(t.detach()) for t in _computed_attributes(model)}
    memo |= {id(t): _faked(mode, t, shared) for t in (*model.parameters(), *model.buffers())}
    with FakeCopyMode(mode):
        twin = copy.deepcopy(model, memo)
    _train_like(twin)
    with mode, _quiet(logging.getLogger("torch._subclasses.fake_tensor")):
        args, kwargs = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
        recorder = Recorder(twin, (args, kwargs), keep_storage=True, note_outputs=True, lot=lot, original=model)
        with recorder:
            run(twin, args, kwargs)
    return recorder.graph


def _faked(mode: FakeTensorMode, tensor: Tensor, shared: Container[int]) -> FakeTensor:
    """A parameter or buffer without values.

    A plain one that shares its memory with nothing is made at once, which takes an eighth of the time of the general
    way: with small layers that is a quarter of a plan's.
    """
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.is_leaf
    special = tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    if special or not plain or _storage(tensor) in shared:
        return mode.from_tensor(tensor)
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    fake = FakeTensor(mode, empty.requires_grad_(tensor.requires_grad), tensor.device)
    if isinstance(tensor, nn.Parameter):
        fake._is_param = True
    return fake


def _shared_storages(model: nn.Module) -> set[int]:
    """Memory that more than one tensor of a model shows, be it a plain attribute."""
    tensors = {id(t): t for m in model.modules() for t in tree_iter(list(vars(m).values())) if isinstance(t, Tensor)}
    tensors |= {id(t): t for t in (*model.parameters(), *model.buffers())}
    shown = collections.Counter(_storage(t) for t in tensors.values())
    return {storage for storage, count in shown.items() if count > 1}


def _storage(tensor: Tensor) -> int:
    """Address of a tensor's memory; 0 where it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """What fails on fake tensors is tried again with real ones, whose error is the one to show."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _trace_copy(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run, lot: float | None) -> Graph:
    memo: dict[int, Any] = {id(t): t.detach().clone() for t in _computed_attributes(model)}
    twin = copy.deepcopy(model, memo)  # parameters too: the step may write them, or initialise them from the data
    _train_like(twin)
    return _record_real(twin, args, kwargs, run, lot, model)


def _trace_in_place(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run, lot: float | None
) -> Graph:
    with keep_state(model):
        _train_like(model)
        return _record_real(model, args, kwargs, run, lot)


def _record_real(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: Run,
    lot: float | None,
    original: nn.Module | None = None,
) -> Graph:
    args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), (args, kwargs))
    recorder = Recorder(model, (args, kwargs), note_outputs=True, lot=lot, original=original)
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
