"""Hooks of the user's on parameters, and what they make of gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lit_resinit.graph.faults import Faults
from lit_resinit.graph.tensors import local, measuring, peak_of
from lit_resinit.judge.seen import Hooked


class HookedParameters:
    """What the user's hooks on parameters make of their gradients, which no operation knows of.

    Args:
        push: Remembers a size on the device, and returns its number.
        keep: Takes a handle that is removed at the end.
        faults: Faults of ours.
    """

    def __init__(self, push: Callable[[Tensor], int], keep: Callable[[Any], None], faults: Faults) -> None:
        self._push, self._keep, self._faults = push, keep, faults
        self._hooked: dict[str, tuple[Tensor, int, str]] = {}
        self.sizes: dict[str, Tensor | None] = {}  # before an optimizer in the backward moves them
        self._sums: dict[str, Tensor] = {}
        self._accumulations: dict[int, Any] = {}
        self._kept: list[tuple[str, int, int]] = []

    def watch(self, name: str, parameter: Tensor, accumulation: Any, grad: Tensor) -> None:
        """Measure a gradient before and after the hooks on its parameter."""
        before, after = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
        hooks = [*(before or {}).values(), *(after or {}).values()]
        if hooks and name not in self._hooked:
            self._hooked[name] = parameter, parameter._version, ", ".join(dict.fromkeys(map(line_of, hooks)))
            self.sizes[name] = peak_of(parameter)
        if hooks and id(accumulation) not in self._accumulations:
            self._accumulations[id(accumulation)] = accumulation
            self._keep(accumulation.register_prehook(functools.partial(self._note_kept, name)))
        if before:
            part = local(grad)
            self._sums[name] = self._sums[name] + part if name in self._sums else part.clone()

    def _note_kept(self, name: str, grads: tuple[Tensor | None, ...]) -> None:
        with self._faults, measuring():
            kept = [p for g in grads if g is not None and (p := peak_of(g)) is not None]
            sent = peak_of(self._sums.pop(name)) if name in self._sums else None
            self._kept += [(name, self._push(sent if sent is not None else k), self._push(k)) for k in kept]

    def numbers(self, errors: list[float]) -> dict[str, Hooked]:
        """What was sent and what was kept, given the sizes of all errors."""
        hooked: dict[str, Hooked] = {}
        for name, sent, kept in self._kept:
            parameter, version, source = self._hooked[name]
            used = parameter.grad is None or parameter._version != version
            earlier = hooked.get(name, Hooked(0.0, 0.0, used, source))  # of a backward before this one
            hooked[name] = Hooked(earlier.sent + errors[sent], earlier.kept + errors[kept], used, source)
        return hooked

    def forget(self) -> None:
        """Let go of every tensor."""
        self._hooked, self.sizes, self._sums, self._accumulations = {}, {}, {}, {}


def line_of(function: Any) -> str:
    """``file.py:line`` where a function is defined; its name where it is not written in Python."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return repr(function) if code is None else f"{code.co_filename}:{code.co_firstlineno}"
