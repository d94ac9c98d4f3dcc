"""What agrees with usefulness: rank correlations, what chance gives, and the reliability that bounds them."""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch
from torch import Tensor

from lit_resinit.watch.history import History


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """Spearman's rank correlation of something with usefulness, and what chance gives.

    Args:
        what: What was compared with usefulness.
        correlation: From -1 to 1; NaN where it is not defined (fewer than three branches, or all values equal).
        low: Lower end of the interval in which 95 of 100 random orders fall.
        high: Its upper end.
        branches: How many branches were compared.
        reliability: Split-half reliability of the usefulness, from 0 to 1; NaN where it is not known.
    """

    what: str
    correlation: float
    low: float
    high: float
    branches: int
    reliability: float = math.nan

    @property
    def beyond_chance(self) -> bool:
        """Whether the correlation lies outside the interval of random orders."""
        return not math.isnan(self.correlation) and not self.low <= self.correlation <= self.high

    def __str__(self) -> str:
        if math.isnan(self.correlation):
            few = f"over {self.branches} branches (too few, or all equal)."
            return f"usefulness and {self.what}: no rank correlation {few}"
        if math.isnan(self.reliability):
            return f"usefulness and {self.what}: no rank correlation, for the reliability of usefulness is not known."
        verdict = "beyond chance" if self.beyond_chance else "not told from chance"
        return (
            f"usefulness and {self.what}: Spearman correlation {self.correlation:+.2f} over {self.branches} branches; "
            f"random orders give {self.low:+.2f} to {self.high:+.2f} (95 %): {verdict}. Usefulness has a split-half "
            f"reliability of {self.reliability:.2f}, so that about {math.sqrt(self.reliability):.2f} is the most."
        )


def split_half_reliability(by_batch: Tensor) -> float:
    """How far the ranking of the branches is the same on other batches: from 0, chance, to 1.

    The batches are cut in two in up to 64 ways. Spearman's correlation ``r`` of the means over both halves, averaged,
    is that of half the data; of all of them it is ``2 r / (1 + r)``.

    Args:
        by_batch: Usefulness of each batch, ``(batches, branches)``.

    Returns:
        The reliability; NaN for fewer than two batches or three branches, or where nothing differs.

    Example:
        >>> split_half_reliability(torch.arange(12.0).repeat(4, 1))
        1.0

    Reference:
        Spearman (1910), Correlation Calculated from Faulty Data; Brown (1910), Some Experimental Results in the
        Correlation of Mental Abilities.
    """
    r = _across_halves(by_batch, by_batch)
    return r if math.isnan(r) else round(2 * max(0.0, r) / (1 + max(0.0, r)), 6)


def halves_agreement(what: str, values: Tensor, usefulness: Tensor) -> Agreement:
    """Compare ranks on different batches, since on the same ones both quantities share what is chance in the data.

    Args:
        what: What the values are, for the report.
        values: Of each batch, ``(batches, branches)``.
        usefulness: Of the same batches, likewise.

    Returns:
        Spearman's correlation of the one on half of the batches with the other on the other half, averaged over the
        ways to cut them; the reliability beside it is that of half the batches too.
    """
    chance = rank_agreement(what, values.mean(0), usefulness.mean(0))
    reliability = _across_halves(usefulness, usefulness)
    return dataclasses.replace(
        chance, correlation=_across_halves(values, usefulness), reliability=max(0.0, reliability)
    )


def _across_halves(x: Tensor, y: Tensor) -> float:
    """Spearman's correlation of the means of ``x`` over half of the batches with those of ``y`` over the others."""
    batches, branches = x.shape
    if batches < 2 or branches < 3 or not bool((x + y).isfinite().all()):
        return math.nan
    halves = [(x[left].mean(0), y[right].mean(0)) for left, right in _halves(batches)]
    differing = [(a, b) for a, b in halves if bool((a != a[0]).any()) and bool((b != b[0]).any())]
    if not differing:
        return math.nan
    return float(_spearman(*(torch.stack(side, 1).double() for side in zip(*differing, strict=True))).mean())


def _halves(count: int, most: int = 64) -> list[tuple[list[int], list[int]]]:
    """Ways to cut so many things in two, the first one always on the same side: all, or the same few at random."""
    if math.comb(count - 1, (count - 1) // 2) <= most:
        chosen = [[0, *rest] for rest in itertools.combinations(range(1, count), (count + 1) // 2 - 1)]
    else:
        generator = torch.Generator().manual_seed(0)
        orders = [torch.randperm(count, generator=generator).tolist() for _ in range(most)]
        chosen = [order[: count // 2] for order in orders]
    halves = [(left, [i for i in range(count) if i not in left]) for left in chosen]
    return [*halves, *((right, left) for left, right in halves)]


def _spearman(x: Tensor, y: Tensor) -> Tensor:
    """Spearman's correlation of each pair of columns."""
    from torchmetrics.functional import spearman_corrcoef  # slow to import

    return spearman_corrcoef(x.squeeze(1), y.squeeze(1))


def rank_agreement(
    what: str, values: Tensor, usefulness: Tensor, permutations: int = 1000, reliability: float = math.nan
) -> Agreement:
    """Compare the ranks of two rows of numbers, with the interval that random orders give.

    Args:
        what: What the values are, for the report.
        values: ``(branches,)``; NaN leaves a branch out.
        usefulness: ``(branches,)``; NaN leaves a branch out.
        permutations: Number of random orders; always the same ones, and the global random state is not used.
        reliability: What :func:`split_half_reliability` says of the usefulness.

    Returns:
        The correlation, and the 2.5 % and 97.5 % quantiles over the random orders.

    Example:
        >>> rank_agreement("x", torch.arange(8.0), torch.arange(8.0).square()).correlation
        1.0
    """
    known = values.isfinite() & usefulness.isfinite()
    x, y = values[known].double(), usefulness[known].double()
    count = int(known.sum())
    if count < 3 or bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return Agreement(what, math.nan, math.nan, math.nan, count, reliability)
    generator = torch.Generator().manual_seed(0)
    orders = torch.stack([torch.randperm(count, generator=generator) for _ in range(permutations)], dim=1)
    by_chance = _spearman(x[orders], y[:, None].expand(-1, permutations).contiguous())
    low, high = torch.quantile(by_chance, torch.tensor([0.025, 0.975], dtype=by_chance.dtype)).tolist()
    found = round(float(_spearman(x[:, None], y[:, None])), 6)
    return Agreement(what, found, low, high, count, reliability)


def agreements(
    history: History, usefulness: dict[str, float], reliability: float = math.nan
) -> tuple[Agreement, Agreement]:
    """How usefulness agrees with early switching on, and with the first-order estimate.

    Args:
        history: The history of the run; branches that never switched on share the last rank.
        usefulness: What :func:`measure_usefulness` returned.
        reliability: What :func:`split_half_reliability` says of it; without it nothing is told.

    Returns:
        (early switching on, mean size of the first-order estimate over the last ten records against the size of the
        usefulness).

    Example:
        >>> early, _ = agreements(History(["a"]), {"a": 0.1})
        >>> str(early)
        'usefulness and early switching on: no rank correlation over 1 branches (too few, or all equal).'
    """
    names = history.branches
    order = {name: place for place, name in enumerate(history.order())}
    apart = set(history.open_from_start())  # these have no place in the order
    early = torch.tensor([math.nan if n in apart else -float(order.get(n, len(order))) for n in names])
    found = torch.tensor([usefulness.get(name, math.nan) for name in names])
    return (
        rank_agreement("early switching on", early, found, reliability=reliability),
        rank_agreement("its first-order estimate", history.mean_saliency(), found.abs(), reliability=reliability),
    )
