"""Compiled code runs uncompiled for a while, and signals wait until the fake tensors are gone."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

_lock = threading.Lock()
_open = 0  # how many run inside `eager` now
_before: Any = None  # sets the stance that the first of them found


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run compiled code uncompiled; the last one out sets what the first one found, in whatever order they leave."""
    global _open, _before
    with _lock:
        if _open == 0:
            _before = torch.compiler.set_stance("force_eager")
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if _open == 0:
                _before.__exit__(None, None, None)
                _before = None


class _Holder:
    """Takes the place of a signal's handler; what arrives while it holds is handed on when it lets go."""

    def __init__(self) -> None:
        self.holds = True
        self.handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self.arrived: list[tuple[int, FrameType | None]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        insists = number == signal.SIGINT and any(n == number for n, _ in self.arrived)  # a loop without an end
        if self.holds and not insists:
            self.arrived.append((number, frame))
        else:
            self.handlers[number](number, frame)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold signals back that Python code handles, Ctrl-C among them: an error out of C++ would end the process.

    They are handled in the order of arrival as soon as the block is left. In other threads than the main one no signal
    is handled, so there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    holder = _Holder()
    try:
        for each in signal.valid_signals():
            handler = signal.getsignal(each)
            if callable(handler):
                holder.handlers[int(each)] = handler
                signal.signal(each, holder)
        yield
    finally:
        holder.holds = False  # first: whatever comes now goes to its handler, also where one of these lines is cut off
        for number, handler in holder.handlers.items():
            signal.signal(number, handler)
        for number, frame in holder.arrived:
            holder.handlers[number](number, frame)
