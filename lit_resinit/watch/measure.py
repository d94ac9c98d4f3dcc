"""Stream and branch at every planned addition of one forward, measured on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit.graph.faults import Faults
from lit_resinit.graph.tensors import mean_and_variance, measuring
from lit_resinit.judge.compare import Addition, AtAdditions
from lit_resinit.judge.tap import Tap
from lit_resinit.plan.values import ResidualPlan


class Measured:
    """What was measured of stream and branch at the planned additions, left on the device until :meth:`moments`."""

    def __init__(self, plan: ResidualPlan) -> None:
        self._size = len(plan.branches)
        self._stream: Tensor | None = None
        self._seen: dict[int, list[tuple[Tensor, Tensor, int]]] = {}  # branch -> (mean, variance, count) twice

    def before(self, addition: Addition) -> None:
        """Measure while both summands are as they were."""
        if addition.value is not None:
            self._measure(addition.index, addition.stream, addition.value)
        else:
            self._stream = addition.kept_stream()

    def after(self, addition: Addition, out: Tensor) -> None:
        """Where the operation fuses the branch, it is what was added."""
        stream, self._stream = self._stream, None
        if stream is not None:
            self._measure(addition.index, stream, out - stream)

    def _measure(self, index: int, stream: Tensor, branch: Tensor) -> None:
        rows = self._seen.setdefault(index, [])
        for tensor in (stream, branch):
            mean, variance = mean_and_variance(tensor)
            rows.append((mean, variance, tensor.numel()))

    def moments(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """(count, mean, variance) of stream and branch, ``(2 * branches,)`` each; empties what was collected."""
        seen, self._seen = self._seen, {}
        if not seen:
            return None
        device = next(iter(seen.values()))[0][0].device
        with measuring():
            count, mean, variance = (torch.zeros(2 * self._size, device=device) for _ in range(3))
            index = torch.tensor([2 * i + j for i in seen for j in (0, 1)], device=device)
            rows = [row for pair in seen.values() for row in pair[-2:]]
            count[index] = torch.tensor([float(n) for _, _, n in rows], device=device)
            mean[index] = torch.stack([m.to(mean) for m, _, _ in rows])
            variance[index] = torch.stack([v.to(variance) for _, v, _ in rows])
        return count, mean, variance


class Watcher:
    """Context manager that measures stream and branch at every planned addition of one forward.

    It records nothing: operations other than the planned kinds of addition pass untouched; a backward pass inside is
    ignored, so that recomputation is not counted twice.

    Args:
        model: The model, with the plan applied.
        plan: The plan.
        measured: Where the measurements go; a place of its own when None.
        faults: What becomes of an exception of ours; it passes on when None. From the first one on nothing is measured.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ResidualPlan,
        measured: Measured | None = None,
        faults: Faults | None = None,
    ) -> None:
        self._measured = Measured(plan) if measured is None else measured
        self._tap = Tap(model, AtAdditions(plan, (self._measured,)), faults=faults)

    def __enter__(self) -> Watcher:
        self._tap.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._tap.__exit__(*exc)

    def moments(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """(count, mean, variance) of stream and branch, ``(2 * branches,)`` each; empties what was collected."""
        return self._measured.moments()
