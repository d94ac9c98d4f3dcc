"""How tensors lie in memory and over the ranks, and how they are measured without anybody taking it for the network."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload


def geometry(tensor: Tensor) -> tuple[Any, ...]:
    """Which part of its memory a tensor shows, and how."""
    return (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def is_sharded(tensor: Tensor) -> bool:
    """Whether several ranks hold a part of the tensor each (``DTensor``)."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """Of a sharded tensor the part that this rank holds, of a jagged one its values; any other tensor as it is."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    jagged = part.is_nested and part.layout is torch.jagged
    values: Tensor = getattr(part, "_values") if jagged else part  # noqa: B009 - typed as a method
    return values


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered from its ranks, which all have to call this; any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.full_tensor()  # type: ignore[attr-defined, no-any-return]


def are_apart(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Whether two views of the same memory (see :func:`geometry`), cut alike, have no element in common."""
    (offset, shape, strides), (other_offset, other_shape, other_strides) = left, right
    if strides != other_strides:
        return False
    for size, other_size, stride in sorted(zip(shape, other_shape, strides, strict=True), key=lambda d: -d[2]):
        start, offset = divmod(offset, max(1, stride))
        other_start, other_offset = divmod(other_offset, max(1, stride))
        if start + size <= other_start or other_start + other_size <= start:
            return True
    return False


def covers_memory(tensor: Tensor) -> bool:
    """Whether a tensor shows all of the memory that it lies in."""
    try:
        return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    except NotImplementedError:  # sparse and nested tensors have no storage
        return False


# -------------------------------------------------------------------- measuring

_PART = 2**22  # elements: 16 MiB of float32, enough to keep any device busy


class _Measuring(threading.local):
    active = False
    graded = True  # whether gradients were enabled before the outermost measurement

    def __init__(self) -> None:
        self.guards: list[Any] = []


_measuring = _Measuring()


class measuring:  # noqa: N801 - used as a function
    """Operations inside are this package's own measurements: no gradient, and no mode of any kind sees them."""

    __slots__ = ("_before", "_grad")

    def __enter__(self) -> None:
        self._before, self._grad = _measuring.active, torch.is_grad_enabled()
        if not self._before:
            _measuring.graded = self._grad
        _measuring.active = True
        torch._C._set_grad_enabled(False)
        _measuring.guards.append(torch._C._DisableTorchDispatch())

    def __exit__(self, *exc: Any) -> None:
        _measuring.guards.pop()
        torch._C._set_grad_enabled(self._grad)
        _measuring.active = self._before


def end_measuring() -> None:
    """End a measurement that an interrupt cut off between two lines, which would blind everything after it."""
    if _measuring.active:
        while _measuring.guards:
            _measuring.guards.pop()
        torch._C._set_grad_enabled(_measuring.graded)
        _measuring.active = False


def is_not_forward(func: OpOverload) -> bool:
    """Whether an operation is none of the network's forward: a query, a backward pass, or a measurement of ours."""
    return func.namespace == "prim" or _measuring.active or torch._C._current_graph_task_id() != -1


def as_wide(tensor: Tensor) -> Tensor:
    """Real values in float32, or in float64 where they are that already."""
    values = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    return values if values.dtype is torch.float64 else values.float()


def in_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """A tensor cut along its first dimension, so that what is computed of each part needs little memory at a time."""
    if tensor.numel() <= _PART or tensor.ndim == 0:
        return (tensor,)
    rows = max(1, _PART * tensor.shape[0] // tensor.numel())
    return tuple(tensor[i : i + rows] for i in range(0, tensor.shape[0], rows))


def mean_and_variance(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance over all elements in two passes (ten times faster than ``var_mean``).

    In float32, or in float64 where the values are; the real and the imaginary part of a complex value are two elements.
    """
    found = [_sum_of_squares(as_wide(part)) for part in in_parts(tensor)]
    if len(found) == 1:
        mean, squares, count = found[0]
        return mean, squares / max(1, count)
    means, squares = (torch.stack(column) for column in list(zip(*found, strict=True))[:2])
    counts = torch.tensor([n for *_, n in found], dtype=means.dtype, device=means.device)
    mean = (means * counts).sum() / counts.sum()
    return mean, (squares + counts * (means - mean).square()).sum() / counts.sum()


def means_and_variances(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance of each row of a tensor, as :func:`mean_and_variance` has them of a whole one."""
    wide = as_wide(rows).flatten(1)
    mean = wide.mean(1)
    return mean, torch.linalg.vector_norm(wide - mean[:, None], dim=1).square() / wide.shape[1]


def _sum_of_squares(wide: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean, sum of squared deviations from it, and count."""
    mean = wide.mean()
    return mean, torch.linalg.vector_norm(wide - mean).square(), wide.numel()


def peak_of(tensor: Tensor) -> Tensor | None:
    """Largest absolute value as a scalar tensor, NaN or inf where there is one; None for a tensor without values."""
    try:
        values = local(tensor).detach()
        if values.numel() == 0 or values.is_meta:
            return None
        if values.dtype == torch.bool:
            return values.any().float()
        if not values.dtype.is_floating_point:
            values = as_wide(values)
        lowest, highest = torch.aminmax(values)  # ten times faster than a maximum norm, and NaN goes through
        return torch.maximum(-lowest, highest)
    except (RuntimeError, NotImplementedError):  # sparse and quantised tensors
        return None


def to_host(scalars: list[Tensor]) -> list[float]:
    """Scalar tensors as numbers, in one transfer."""
    if not scalars:
        return []
    device = scalars[0].device
    dtype = torch.float64 if any(s.dtype is torch.float64 for s in scalars) else torch.float32
    with measuring():
        return torch.stack([s.detach().to(device, dtype) for s in scalars]).tolist()
