"""Stream and branch at every planned addition of one forward, measured on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit.graph.faults import Faults
from lit_resinit.graph.tensors import mean_and_variance, means_and_variances, measuring
from lit_resinit.judge.compare import Addition, AtAdditions
from lit_resinit.judge.tap import Tap
from lit_resinit.plan.values import ResidualPlan

_SMALL = 2**14  # elements up to which copying a tensor costs less than measuring it by itself
_MOST = 2**18  # elements that wait at a time


class Measured:
    """What was measured of stream and branch at the planned additions, left on the device until :meth:`moments`.

    Small tensors wait, as copies, to be measured many at a time: each operation on a small tensor is mostly its call.
    Where a branch runs several times, the last run counts.
    """

    def __init__(self, plan: ResidualPlan) -> None:
        self._size = 2 * len(plan.branches)
        self._stream: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}  # by position: twice that of the branch, and one more for its output
        self._elements = 0  # of those
        self._alone: dict[int, tuple[Tensor, Tensor, int]] = {}  # mean, variance, count
        self._together: list[tuple[list[int], Tensor, Tensor, int | tuple[int, ...]]] = []

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
        for position, tensor in ((2 * index, stream), (2 * index + 1, branch)):
            if type(tensor) is Tensor and 0 < tensor.numel() <= _SMALL:
                self._alone.pop(position, None)
                self._waiting[position] = tensor.detach().clone()
                self._elements += tensor.numel()
            else:
                self._waiting.pop(position, None)
                self._alone[position] = *mean_and_variance(tensor), tensor.numel()
        if self._elements > _MOST:
            self._measure_waiting()

    def _measure_waiting(self) -> None:
        alike: dict[tuple[Any, ...], dict[int, Tensor]] = {}
        for position, tensor in self._waiting.items():
            alike.setdefault((tensor.shape, tensor.dtype, tensor.device), {})[position] = tensor
        self._waiting, self._elements = {}, 0
        for tensors in alike.values():
            rows = torch.stack(list(tensors.values()))
            self._together.append((list(tensors), *means_and_variances(rows), rows[0].numel()))

    def moments(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """(count, mean, variance) of stream and branch, ``(2 * branches,)`` each; empties what was collected."""
        with measuring():
            self._measure_waiting()
            alone, together = self._alone, self._together
            self._alone, self._together = {}, []
            if alone:
                means, variances, counts = zip(*alone.values(), strict=True)
                columns = [torch.stack([x.to(c[0]) for x in c]) for c in (means, variances)]
                together.append((list(alone), columns[0], columns[1], counts))  # newer than what waited
            if not together:
                return None
            count, mean, variance = (torch.zeros(self._size, device=together[0][1].device) for _ in range(3))
            for positions, means_, variances_, counts_ in together:
                index = torch.tensor(positions, device=count.device)
                count[index] = torch.as_tensor(counts_, dtype=count.dtype, device=count.device)
                mean[index], variance[index] = means_.to(mean), variances_.to(variance)
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
