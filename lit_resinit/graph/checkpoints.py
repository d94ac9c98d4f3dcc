"""Activation checkpointing that asks for the gradient of everything, made to answer for single tensors too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as library


class _Recomputed:
    """Stands in for the function behind ``use_reentrant=True``, which ``torch.autograd.grad`` cannot pass."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return library.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


@contextlib.contextmanager
def passable_checkpoints() -> Iterator[None]:
    """Inside, ``checkpoint(..., use_reentrant=True)`` recomputes as ``use_reentrant=False`` does."""
    before = library.CheckpointFunction
    library.CheckpointFunction = _Recomputed  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        library.CheckpointFunction = before  # type: ignore[misc]
