"""Moments of streams of numbers, merged exactly over parts and ranks."""

from __future__ import annotations

import math

import torch
import torchmetrics
from torch import Tensor


class Moments(torchmetrics.Metric):
    """Count, mean and sum of squared deviations of several streams of numbers, merged exactly.

    Two parts with ``(n, mean, M2)`` merge to ``M2 = M2a + M2b + d^2 na nb / (na + nb)`` with ``d = meanb - meana``.

    As input to ``update``: ``count``, ``mean`` and ``variance`` (population), each a float32 tensor of shape
    ``(size,)``; a count of zero leaves an entry alone. As output of ``compute``: the population variance, ``(size,)``,
    NaN where nothing was seen.

    Args:
        size: Number of streams.

    Example:
        >>> moments = Moments(2)
        >>> moments.update(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]))
        >>> moments.update(torch.tensor([2.0, 0.0]), torch.tensor([3.0, 0.0]), torch.tensor([1.0, 0.0]))
        >>> moments.compute()
        tensor([2., nan])

    Reference:
        Chan, Golub and LeVeque (1983), Algorithms for Computing the Sample Variance.
    """

    full_state_update = False
    count: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        for name in ("count", "mean", "squares"):
            self.add_state(name, default=torch.zeros(size), dist_reduce_fx=None)

    def update(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        """Add one part."""
        parts = [torch.stack(pair) for pair in zip(self._parts(), (count, mean, variance * count), strict=True)]
        self.count, self.mean, self.squares = _merge(*parts)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.count, self.mean, self.squares

    def compute(self) -> Tensor:
        """Population variance of everything seen, over all ranks."""
        parts = self._parts()
        count, _, squares = _merge(*parts) if self.count.ndim == 2 else parts
        return torch.where(count > 0, squares / count.clamp(min=1.0), math.nan)


def _merge(count: Tensor, mean: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge parts along the first axis."""
    total = count.sum(0)
    safe = total.clamp(min=1.0)
    joint = (count * mean).sum(0) / safe
    return total, joint, (squares + count * (mean - joint).square()).sum(0)
