"""Autograd functions that have to outlive the loss of their batch, which a loop holds until the next one is over."""

from __future__ import annotations

from typing import Any


class KeptGraphs:
    """Keeps the functions of observed graphs until a later batch.

    See :meth:`~lit_resinit.judge.backward.Errors.release`.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[int, list[Any]]] = []
        self._batch = 0

    def keep(self, functions: list[Any]) -> None:
        """Hold these until this batch is over."""
        self._kept.append((self._batch, functions))

    def begin_batch(self) -> None:
        """The batch before is over, and its loss is gone soon."""
        self.end_batch()
        self._batch += 1

    def end_batch(self) -> None:
        """Let go of what batches before this one left."""
        self._kept = [(batch, functions) for batch, functions in self._kept if batch >= self._batch]

    def clear(self) -> None:
        """Let go of everything."""
        self._kept = []
