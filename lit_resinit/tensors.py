"""How tensors lie in memory, and over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def geometry(tensor: Tensor) -> tuple[Any, ...]:
    """Which part of its memory a tensor shows, and how."""
    return (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


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
