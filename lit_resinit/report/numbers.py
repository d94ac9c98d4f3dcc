"""Numbers as the page shows them."""

from __future__ import annotations

import math

from torch import Tensor


def evenly(size: int, most: int) -> list[int]:
    """At most ``most`` positions of ``size``, evenly spaced, both ends among them."""
    if size <= most:
        return list(range(size))
    return sorted({round(i * (size - 1) / (most - 1)) for i in range(most)})


def plain(row: Tensor) -> list[float | None]:
    """A row of numbers for JSON, with four significant digits."""
    return [digits(v) for v in row.tolist()]


def digits(value: float) -> float | None:
    """Four significant digits; None for what JSON has no number for."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def decades(values: Tensor) -> float:
    """How many powers of ten lie between the smallest and the largest positive value."""
    positive = values[(values > 0) & values.isfinite()].double()
    return float((positive.max() / positive.min()).log10()) if positive.numel() else 0.0
