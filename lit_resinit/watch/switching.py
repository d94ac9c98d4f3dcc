"""When each branch switched on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_OFF, _UNDECIDED, _OPEN = -1, -2, -3  # in place of the step of a branch that has not switched on


class Switching:
    """The first recorded step at which each branch was on, exact however few records are kept.

    Args:
        branches: How many.

    Attributes:
        on: Steps, int64 ``(branches,)``; a negative number where there is none.

    Example:
        >>> switching = Switching(2)
        >>> switching.see(10, torch.tensor([0.0, 0.5]), on_ratio=1e-3)
        >>> switching.steps
        [None, 10]
    """

    def __init__(self, branches: int) -> None:
        self.on = torch.full((branches,), _OFF, dtype=torch.int64)

    def begin(self, closed: Sequence[bool]) -> None:
        """Any branch not known to start closed that is on at its first record was so from the start."""
        self.on[:] = torch.where(torch.tensor(closed, dtype=torch.bool), _OFF, _UNDECIDED)

    def see(self, step: int, ratio: Tensor, on_ratio: float) -> None:
        """Note which branches a record shows switched on; one without a ratio did not run."""
        on, ran = ratio >= on_ratio, ~ratio.isnan()
        self.on[(self.on == _UNDECIDED) & on] = _OPEN
        self.on[(self.on == _UNDECIDED) & ran] = _OFF
        self.on[(self.on == _OFF) & on] = step

    @property
    def steps(self) -> list[int | None]:
        """None for a branch that has not switched on, and for one that was open from the start."""
        return [None if on < 0 else on for on in self.on.tolist()]

    @property
    def open_from_start(self) -> list[bool]:
        """Whether each branch was not closed, and on at its first record."""
        return [on == _OPEN for on in self.on.tolist()]
