"""Operations that are this package's own measurements, which no mode takes for the network's."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._ops import OpOverload


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


def is_not_forward(func: OpOverload) -> bool:
    """Whether an operation is none of the network's forward: a query, a backward pass, or a measurement of ours."""
    return func.namespace == "prim" or _measuring.active or torch._C._current_graph_task_id() != -1
