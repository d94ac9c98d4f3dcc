"""Scikit-learn's digits, and batches of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training inputs and labels, then those for validation: 64 pixels of mean 0 and variance 1 in all."""
    from sklearn.datasets import load_digits

    x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    x = ((x - x.mean()) / x.std()).float()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order].long()
    return x[360:], y[360:], x[:360], y[:360]


class Batches:
    """Batches drawn at random, the same for the same seed."""

    def __init__(self, x: Tensor, y: Tensor, size: int) -> None:
        self._x, self._y, self._size = x, y, size

    def draw(self, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            chosen = torch.randint(len(self._x), (self._size,), generator=generator)
            yield self._x[chosen], self._y[chosen]
