"""What was measured along the gate path during a run: steps by branches, bounded however long the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_NUMBERS = ("attribution_loss", "attribution_joint")


class Attributions:
    """Attribution of every branch at the steps at which it was measured, with the loss on the same data.

    When ``limit`` measurements are reached, every second one is dropped; the newest stays.

    Args:
        branches: How many branches.
        limit: Largest number of measurements kept, at least 2.

    Example:
        >>> found = Attributions(2)
        >>> found.append(7, torch.tensor([0.5, 0.1]), loss=1.0, joint=0.61)
        >>> found.steps, found.loss, found.joint
        (tensor([7]), tensor([1.]), tensor([0.6100]))
        >>> found.by_record(torch.tensor([5, 10]))
        tensor([[0.5000, 0.1000],
                [   nan,    nan]])
    """

    __slots__ = ("_branches", "_limit", "_rows")

    def __init__(self, branches: int, limit: int = 2000) -> None:
        self._branches, self._limit = branches, limit
        self._rows: list[tuple[int, Tensor]] = []  # step; loss, joint effect, branches

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, step: int, values: Tensor, loss: float, joint: float) -> None:
        """Add a measurement; one of the same step is replaced.

        Args:
            step: Optimizer steps done.
            values: Attribution, ``(branches,)``.
            loss: Loss on the data of the measurement.
            joint: Loss with all gates closed, minus the loss.
        """
        row = torch.cat([torch.tensor([loss, joint]), values.detach().float().cpu()])
        if self._rows and self._rows[-1][0] == step:
            self._rows.pop()
        self._rows.append((step, row))
        if len(self._rows) > self._limit:
            self._rows = self._rows[-1::-2][::-1]

    @property
    def steps(self) -> Tensor:
        """Optimizer steps done at each measurement, int64 ``(measurements,)``."""
        return torch.tensor([step for step, _ in self._rows], dtype=torch.int64)

    @property
    def values(self) -> Tensor:
        """Attribution, ``(measurements, branches)``."""
        return self._table()[:, 2:]

    @property
    def loss(self) -> Tensor:
        """Loss on the data of the measurement, ``(measurements,)``."""
        return self._table()[:, 0]

    @property
    def joint(self) -> Tensor:
        """Loss with all gates closed minus the loss, ``(measurements,)``."""
        return self._table()[:, 1]

    def _table(self) -> Tensor:
        return torch.stack([row for _, row in self._rows]) if self._rows else torch.zeros(0, 2 + self._branches)

    def by_record(self, steps: Tensor) -> Tensor:
        """The newest measurement from each record up to the next, ``(records, branches)``; NaN where there is none."""
        found = torch.full((len(steps), self._branches), math.nan)
        for record, (_, row) in zip(
            torch.searchsorted(steps, self.steps, right=True).tolist(), self._rows, strict=True
        ):
            if record:
                found[record - 1] = row[2:]
        return found

    def to_dict(self) -> dict[str, Tensor]:
        """The measurements as tensors, under the names that a history keeps them."""
        return {
            "attribution_steps": self.steps,
            "attribution_values": self.values,
            "attribution_loss": self.loss,
            "attribution_joint": self.joint,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], branches: int, limit: int) -> Attributions:
        """What :meth:`to_dict` described; nothing where an older version measured nothing.

        Raises:
            ValueError: If the parts do not fit together.
        """
        steps = [int(s) for s in values.get("attribution_steps", ())]
        found = cls(branches, max(limit, len(steps)))
        if not steps:
            return found
        table = torch.full((len(steps), 2 + branches), math.nan)
        for position, name in enumerate(_NUMBERS):
            table[:, position] = _fitting(name, values.get(name, table[:, position]), (len(steps),))
        table[:, 2:] = _fitting("attribution_values", values["attribution_values"], (len(steps), branches))
        found._rows = list(zip(steps, table, strict=True))
        return found


def _fitting(name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    tensor = torch.as_tensor(value)
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}")
    return tensor
