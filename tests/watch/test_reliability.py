"""How sure a ranking is, what bounds a correlation with it, and what is said at the end of a run."""

import itertools
import math

import numpy
import pytest
import torch
from torch import Tensor

from lit_resinit import History
from lit_resinit.watch.agreement import halves_agreement, split_half_reliability
from lit_resinit.watch.conclusion import Conclusion, conclude
from lit_resinit.watch.path import Attribution
from lit_resinit.watch.usefulness import Ablation


def rows(batches: int, branches: int, noise: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linspace(0.0, 1.0, branches) + noise * torch.randn(batches, branches, generator=generator)


def test_reliability_is_that_of_scipy_over_all_halves() -> None:
    stats = pytest.importorskip("scipy.stats")
    found = rows(6, 9, 0.7)
    values = found.double().numpy()
    correlations = []
    for left in itertools.combinations(range(6), 3):
        right = [i for i in range(6) if i not in left]
        correlations.append(stats.spearmanr(values[list(left)].mean(0), values[right].mean(0)).statistic)
    r = numpy.mean(correlations)
    assert split_half_reliability(found) == pytest.approx(2 * r / (1 + r), abs=1e-5)


def test_reliability_goes_from_chance_to_one() -> None:
    found = [split_half_reliability(rows(8, 20, noise)) for noise in (0.0, 0.3, 1.0, 100.0)]
    assert found[0] == 1.0
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.4


def test_what_is_reliable_is_so_on_new_data() -> None:
    """The correlation of two independent measurements of the same quantity is its reliability."""
    pairs = [(rows(8, 40, 0.8, seed), rows(8, 40, 0.8, 1000 + seed)) for seed in range(20)]
    stats = pytest.importorskip("scipy.stats")
    between = numpy.mean([stats.spearmanr(x.mean(0), y.mean(0)).statistic for x, y in pairs])
    assert numpy.mean([split_half_reliability(x) for x, _ in pairs]) == pytest.approx(between, abs=0.08)


@pytest.mark.parametrize(
    "found", [torch.randn(1, 9), torch.randn(8, 2), torch.ones(8, 9), torch.full((8, 9), math.nan)]
)
def test_reliability_that_cannot_be_known_is_nan(found: Tensor) -> None:
    assert math.isnan(split_half_reliability(found))


def test_noise_that_two_quantities_share_is_no_agreement() -> None:
    noise = torch.randn(8, 30, generator=torch.Generator().manual_seed(0))
    found = halves_agreement("x", noise + 1e-3, noise)
    assert abs(found.correlation) < 0.4
    assert found.reliability < 0.4
    signal = torch.linspace(0.0, 9.0, 30) + noise
    assert halves_agreement("x", signal, signal).correlation > 0.9


def test_many_batches_are_cut_in_some_ways_only() -> None:
    assert 0.9 < split_half_reliability(rows(100, 20, 0.5)) <= 1.0


# -------------------------------------------------------------------- the conclusion


def concluded(joint: float, batches: int = 8, with_path: bool = True) -> Conclusion:
    names = tuple(f"b{i}" for i in range(6))
    useful = rows(batches, 6, 0.05)
    history = History(names)
    for step in range(3):
        history.append(step, torch.arange(6.0).expand(4, -1), torch.ones(6), 0.1 * torch.arange(6.0))
    path = Attribution(names, 2.0 * useful.double(), loss=0.5, joint=joint, points=3)
    ablation = Ablation(names, torch.full((batches,), 0.5), useful.double(), joint)
    return conclude(history, ablation, path if with_path else None, "8 validation batches")


def test_ablation_joint_effect_and_path_stand_side_by_side() -> None:
    found = concluded(joint=6.0)
    total = sum(found.ablation.means.values())
    assert found.share == pytest.approx(total / 6.0)
    text = str(found)
    assert "usefulness on 8 validation batches: the loss is 0.5; closing all gates changes it by +6." in text
    assert f"{total:+.3g} in sum, {total / 6.0:.2f} of that (near 0: blocks replace one another)" in text
    assert f"The gate path adds up to {2 * total:+.3g} on 3 points." in text
    assert f"reliability of the ranking by closing is {found.reliability:.2f}" in text
    assert text.count("Spearman correlation") == text.count("split-half reliability of 0.") + text.count(
        "split-half reliability of 1."
    )


@pytest.mark.parametrize("joint", [0.0, math.inf, math.nan])
def test_a_joint_effect_that_nothing_is_a_part_of(joint: float) -> None:
    found = concluded(joint)
    assert math.isnan(found.share)
    assert "in sum. The gate path" in str(found)
    assert "gate path" not in str(concluded(joint, with_path=False))


def test_one_batch_has_no_errors_and_no_correlation() -> None:
    found = concluded(6.0, batches=1)
    assert all(map(math.isnan, found.ablation.errors.values()))
    assert "Spearman" not in str(found)
    assert "reliability of the ranking by closing is not known" in str(found)


def test_errors_are_standard_errors_over_batches() -> None:
    found = Ablation(("a",), torch.ones(4), torch.tensor([[1.0], [2.0], [3.0], [6.0]]))
    assert found.means == {"a": 3.0}
    assert found.errors["a"] == pytest.approx(numpy.std([1, 2, 3, 6], ddof=1) / 2)
