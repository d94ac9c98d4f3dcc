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
