"""Steps of one network over several fits: a Trainer counts its own, the history goes on."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class Fits:
    """How a Trainer's steps are counted on, where the same callback has fitted the same network before.

    Args:
        offset: What is added to the Trainer's steps.
        begun: The first step of every fit after the first.
        done: Steps done when the last fit of this process ended; None before.

    Example:
        >>> fits = Fits()
        >>> fits.begin(global_step=0, last=-1)
        >>> fits.end(global_step=10)
        >>> fits.begin(global_step=0, last=9)
        >>> fits.step(0), fits.begun
        (10, [10])
    """

    offset: int = 0
    begun: list[int] = dataclasses.field(default_factory=list)
    done: int | None = None

    def begin(self, global_step: int, last: int) -> None:
        """A training starts, at a Trainer's step, after a record of the step ``last``."""
        done = 0 if self.done is None else self.done
        self.offset = max(self.offset, done - global_step, last + 1 - global_step)
        if self.done is not None and (not self.begun or self.begun[-1] != self.step(global_step)):
            self.begun.append(self.step(global_step))

    def step(self, global_step: int) -> int:
        """The step of this network that a Trainer's step is."""
        return self.offset + global_step

    def end(self, global_step: int) -> None:
        """A training is over, or was stopped."""
        self.done = self.step(global_step)
