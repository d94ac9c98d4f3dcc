"""Measurements along the gate path in a history: by step, by record, in files and under logger keys."""

import math
from pathlib import Path

import pytest
import torch

from lit_resinit import History, ResInitError
from lit_resinit.watch.attributions import Attributions
from lit_resinit.watch.history import QUANTITIES
from lit_resinit.watch.logs import attribution_metrics, metrics


def recorded(records: int, every: int = 10, limit: int = 2000) -> History:
    """A record each ten steps, and a measurement after every so many of them."""
    history = History(["a", "b"], limit=limit)
    for record in range(records):
        history.append(10 * record, torch.full((4, 2), float(record)), torch.ones(2), torch.ones(2))
        if record % every == 0:
            history.attribute(10 * record + 1, {"a": float(record), "b": -1.0}, loss=2.0, joint=record - 1.0)
    return history


def test_a_measurement_stands_at_the_record_before_it() -> None:
    history = recorded(5, every=2)
    assert history.attribution.shape == (5, 2)
    assert history.attribution[:, 0].isnan().tolist() == [False, True, False, True, False]
    assert history.attribution[[0, 2, 4], 0].tolist() == [0.0, 2.0, 4.0]
    assert history.attributions.steps.tolist() == [1, 21, 41]
    assert history.attributions.values.tolist() == [[0.0, -1.0], [2.0, -1.0], [4.0, -1.0]]
    assert history.attributions.loss.tolist() == [2.0] * 3
    assert history.attributions.joint.tolist() == [-1.0, 1.0, 3.0]


def test_a_later_one_takes_the_place_of_one_at_the_same_step_or_record() -> None:
    history = recorded(1)
    history.attribute(7, {"a": 5.0}, 1.0, 4.0)
    assert history.attribution[0].tolist()[0] == 5.0
    assert math.isnan(history.attribution[0, 1])  # not measured
    assert len(history.attributions) == 2
    history.attribute(7, {"a": 6.0, "b": 0.0}, 1.0, 4.0)
    assert history.attributions.values[:, 0].tolist() == [0.0, 6.0]


def test_without_a_measurement_every_record_has_none() -> None:
    history = recorded(3, every=100)
    assert bool(history.attribution[1:].isnan().all())
    assert History(["a"]).attribution.shape == (0, 1)


@pytest.mark.parametrize("limit", [2, 7, 20])
def test_a_long_run_is_bounded_and_keeps_the_newest(limit: int) -> None:
    found = Attributions(1, limit)
    for step in range(1000):
        found.append(step, torch.tensor([float(step)]), 0.0, 0.0)
        assert len(found) <= limit
        assert found.steps[-1] == step
    assert found.values[:, 0].tolist() == found.steps.tolist() == sorted(found.steps.tolist())


def test_thinned_records_keep_the_measurements() -> None:
    history = recorded(100, every=10, limit=16)
    assert history.attributions.steps.tolist() == [100 * i + 1 for i in range(10)]
    assert int((~history.attribution[:, 0].isnan()).sum()) >= 7


@pytest.mark.parametrize("records", [0, 35])
def test_files_and_checkpoints_keep_them(records: int, tmp_path: Path) -> None:
    history = recorded(records)
    history.save(tmp_path / "history.npz")
    torch.save(history.to_dict(), tmp_path / "state.pt")
    for again in (
        History.load(tmp_path / "history.npz"),
        History.from_dict(torch.load(tmp_path / "state.pt", weights_only=True)),
    ):
        assert torch.equal(again.attribution.nan_to_num(-9.0), history.attribution.nan_to_num(-9.0))
        for name in ("steps", "values", "loss", "joint"):
            assert torch.equal(getattr(again.attributions, name), getattr(history.attributions, name))


def test_a_history_of_an_older_version_has_none(tmp_path: Path) -> None:
    values = {k: v for k, v in recorded(5).to_dict().items() if not k.startswith("attribution")}
    again = History.from_dict(values)
    assert len(again.attributions) == 0
    assert bool(again.attribution.isnan().all())
    assert torch.equal(again.gate, recorded(5).gate)


@pytest.mark.parametrize("name", ["attribution_values", "attribution_loss", "attribution_joint"])
def test_parts_that_do_not_fit_together_are_refused(name: str) -> None:
    with pytest.raises(ResInitError, match=name):
        History.from_dict(recorded(30).to_dict() | {name: torch.zeros(7)})


def test_the_table_of_pandas_has_them_where_they_were_measured() -> None:
    pytest.importorskip("pandas")
    table = recorded(3).to_pandas()
    assert list(table.columns) == ["step", "branch", *QUANTITIES, "attribution"]
    assert table["attribution"].notna().tolist() == [True, True, False, False, False, False]


# -------------------------------------------------------------------- logger keys


def test_loggers_get_each_branch_the_sum_and_what_it_should_be() -> None:
    history = recorded(11)
    assert attribution_metrics(history) == {
        "resinit/attribution/a": 10.0,
        "resinit/attribution/b": -1.0,
        "resinit/attribution_sum": 9.0,
        "resinit/attribution_joint": 9.0,
        "resinit/attribution_loss": 2.0,
    }
    assert not any("attribution" in key for key in metrics(history))


def test_many_branches_are_quantiles() -> None:
    history = History([f"b{i}" for i in range(101)])
    history.append(0, torch.zeros(4, 101), torch.ones(101), torch.ones(101))
    history.attribute(1, {f"b{i}": float(i) for i in range(101)}, 0.0, 0.0)
    found = attribution_metrics(history)
    assert {k: v for k, v in found.items() if k.count("/") == 2} == {
        "resinit/attribution/q10": 10.0,
        "resinit/attribution/q50": 50.0,
        "resinit/attribution/q90": 90.0,
    }
    assert "resinit/attribution/b7" in attribution_metrics(history, per_branch=True)


# -------------------------------------------------------------------- readings of the records


def test_what_is_read_is_a_copy_and_follows_the_records() -> None:
    history = recorded(3)
    history.gate.zero_()
    assert history.gate[:, 0].tolist() == [0.0, 1.0, 2.0]
    history.append(30, torch.full((4, 2), 3.0), torch.ones(2), torch.ones(2))
    assert history.gate[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_saliency_is_averaged_in_size_over_the_last_records() -> None:
    history = History(["a", "b", "c"])
    assert bool(history.mean_saliency().isnan().all())
    for record in range(12):
        sign = 1.0 if record % 2 else -1.0
        row = torch.tensor([sign * record, 1.0, math.nan if record < 11 else 4.0])
        history.append(record, torch.stack([row] * 4), torch.ones(3), torch.ones(3))
    assert history.mean_saliency().tolist() == [6.5, 1.0, 4.0]
    assert history.mean_saliency(1).tolist() == [11.0, 1.0, 4.0]
