"""Rows of numbers by optimizer step, bounded however many come."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Records:
    """The first row, the newest one, and between them rows at equal distances.

    When there are more than ``limit``, every second one is dropped and the stride doubles.

    Args:
        limit: Largest number of rows kept, at least 2.
        rows: What is known already: steps, and one tensor of one shape for each.
        stride: How many rows came for each that is kept.
        count: How many came at all; as many as are known when None.

    Example:
        >>> records = Records(limit=2)
        >>> for step in range(5):
        ...     records.append(step, torch.zeros(1))
        >>> records.steps
        tensor([0, 4])
    """

    def __init__(
        self, limit: int, rows: Sequence[tuple[int, Tensor]] = (), stride: int = 1, count: int | None = None
    ) -> None:
        self.limit, self.rows, self.stride = limit, list(rows), stride
        self.count = len(self.rows) if count is None else count
        self._columns: dict[int, Tensor] = {}  # what was read since the last row
        if stride < 1 or self.count < len(self.rows):
            raise ValueError(f"{self.count} records, one of {stride} kept")

    def __len__(self) -> int:
        return len(self.rows)

    def append(self, step: int, row: Tensor) -> None:
        """Add a row; the newest one stays only if it falls on the stride."""
        self._columns.clear()
        if self.rows and (self.count - 1) % self.stride != 0:
            self.rows.pop()
        self.rows.append((step, row))
        self.count += 1
        if len(self.rows) > self.limit:
            self.rows = self.rows[::2]
            self.stride *= 2

    @property
    def steps(self) -> Tensor:
        """Optimizer steps, int64 ``(records,)``."""
        return torch.tensor([step for step, _ in self.rows], dtype=torch.int64)

    @property
    def newest(self) -> Tensor:
        """The last row."""
        return self.rows[-1][1]

    def column(self, position: int) -> Tensor:
        """One part of every row, stacked; for there to be one, there has to be a row."""
        if position not in self._columns:
            self._columns[position] = torch.stack([row[position] for _, row in self.rows])
        return self._columns[position].clone()
