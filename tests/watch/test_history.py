"""The records of a run: columns, bounds, order, files."""

import math
import random
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from lit_resinit import History, ResInitError
from lit_resinit.watch.history import QUANTITIES

# -------------------------------------------------------------------- history


def filled(records: int, branches: int = 2, limit: int = 2000) -> History:
    history = History([f"b{i}" for i in range(branches)], limit=limit)
    for step in range(records):
        gates = torch.full((4, branches), float(step))
        history.append(10 * step, gates, torch.ones(branches), torch.full((branches,), 1e-6 * step))
    return history


def test_columns_have_one_row_for_each_record() -> None:
    history = filled(5, 3)
    assert len(history) == 5
    assert history.steps.tolist() == [0, 10, 20, 30, 40]
    for quantity in QUANTITIES:
        value = getattr(history, quantity)
        assert value.shape == (5, 3)
        assert value.dtype == torch.float32
    assert history.gate[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert torch.equal(history.variance_ratio, history.var_branch / history.var_stream)


@pytest.mark.parametrize("records", [1999, 2000, 2001, 3999, 4001, pytest.param(10_007, marks=pytest.mark.slow)])
def test_long_history_is_bounded_and_exact_at_both_ends(records: int) -> None:
    history = filled(records, 1)
    steps = history.steps.tolist()
    assert 1000 <= len(history) <= 2000
    assert (steps[0], steps[-1]) == (0, 10 * (records - 1))
    assert steps == sorted(set(steps))
    assert [float(g) * 10 for g in history.gate[:, 0]] == steps


@pytest.mark.slow
def test_step_of_switching_on_is_exact_though_rows_are_dropped() -> None:
    history = filled(10_007, 1)
    assert history.switched_on() == {"b0": 10_000}
    assert history.order() == ["b0"]


def test_order_is_by_step_then_by_size() -> None:
    history = History(["late", "never", "small", "large"], on_ratio=0.1)
    for step, ratios in enumerate(([0.0, 0.0, 0.2, 0.3], [0.5, 0.05, 0.2, 0.3])):
        history.append(step, torch.zeros(4, 4), torch.ones(4), torch.tensor(ratios))
    assert history.switched_on() == {"late": 1, "never": None, "small": 0, "large": 0}
    assert history.order() == ["large", "small", "late"]


def test_stream_without_variance_has_no_ratio() -> None:
    history = History(["b"])
    history.append(0, torch.zeros(4, 1), torch.zeros(1), torch.ones(1))
    assert math.isnan(float(history.variance_ratio))
    assert history.switched_on() == {"b": None}


@pytest.mark.parametrize("records", [0, 3, 4500])
def test_saving_and_loading_keeps_everything(records: int, tmp_path: Path) -> None:
    history = filled(records)
    history.save(tmp_path / "history.npz")
    again = History.load(tmp_path / "history.npz")
    assert again.branches == history.branches
    assert torch.equal(again.steps, history.steps)
    assert all(torch.equal(getattr(again, q), getattr(history, q)) for q in QUANTITIES)
    assert (again.switched_on(), again.order()) == (history.switched_on(), history.order())
    for one in (history, again):
        one.append(10 * records, torch.zeros(4, 2), torch.ones(2), torch.ones(2))
    assert torch.equal(again.steps, history.steps)


def test_plain_types_go_through_a_checkpoint_and_back(tmp_path: Path) -> None:
    history = filled(4500)
    torch.save(history.to_dict(), tmp_path / "state.pt")
    again = History.from_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(again.gate, history.gate)
    assert (again.limit, again.on_ratio, again.switched_on()) == (2000, history.on_ratio, history.switched_on())


@pytest.mark.slow
def test_a_continued_history_is_the_same_as_one_in_one_piece() -> None:
    whole, first = filled(4500), filled(2500)
    again = History.from_dict(first.to_dict())
    for step in range(2500, 4500):
        again.append(10 * step, torch.full((4, 2), float(step)), torch.ones(2), torch.full((2,), 1e-6 * step))
    assert torch.equal(again.steps, whole.steps)
    assert all(torch.equal(getattr(again, q), getattr(whole, q)) for q in QUANTITIES)
    assert again.switched_on() == whole.switched_on()


def test_pandas_has_a_row_for_each_record_and_branch() -> None:
    pandas = pytest.importorskip("pandas")
    history = filled(3)
    table = history.to_pandas()
    assert list(table.columns) == ["step", "branch", *QUANTITIES]
    assert len(table) == 6
    wide = table.pivot(index="step", columns="branch", values="var_branch")
    assert isinstance(wide, pandas.DataFrame)
    numpy.testing.assert_array_equal(wide.to_numpy(), history.var_branch.numpy())
    assert wide.index.tolist() == history.steps.tolist()


def test_missing_pandas_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ResInitError, match=r"lit-resinit\[pandas\]"):
        filled(3).to_pandas()


@pytest.mark.parametrize(("branches", "limit"), [(1, 2000), (2800, 2000), (10_000, 561), (10**7, 2)])
def test_very_many_branches_take_bounded_memory(branches: int, limit: int) -> None:
    history = History(["b"] * branches)
    assert history.limit == limit
    assert limit == 2 or limit * branches * len(QUANTITIES) * 4 <= 150 * 2**20


def test_a_limit_without_room_for_both_ends_is_refused() -> None:
    with pytest.raises(ValueError, match="`limit` to be at least 2 but got 1"):
        History(["a"], limit=1)


@pytest.mark.parametrize("limit", [2, 3, 7])
@pytest.mark.parametrize("records", [1, 2, 3, 20])
def test_small_limits_keep_both_ends(limit: int, records: int) -> None:
    history = filled(records, limit=limit)
    assert len(history) <= limit
    assert (history.steps[0], history.steps[-1]) == (0, 10 * (records - 1))


def test_movement_is_the_farthest_from_the_first_record() -> None:
    history = History(["a", "b", "c"])
    for gate in ([0.5, 0.0, 0.0], [0.5, 0.0, 0.7]):  # c goes away and comes back
        row = torch.tensor(gate)
        history.append(len(history), torch.stack([row, row, row, row]), torch.ones(3), torch.ones(3))
    found = history.movement(torch.tensor([-0.5, 0.1, 0.0]), torch.tensor([0.5, 0.3, 0.0]))
    assert found.tolist() == pytest.approx([1.0, 0.3, 0.7])
    assert History(["a"]).movement(torch.ones(1), torch.ones(1)).isnan().all()


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x93NUMPY"])
def test_a_file_of_another_kind_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "history.npz").write_bytes(content)
    with pytest.raises(ResInitError, match="another kind of file"):
        History.load(tmp_path / "history.npz")


def test_a_file_of_someone_else_is_refused(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "other.npz", weights=numpy.zeros(3))
    with pytest.raises(ResInitError, match="weights"):
        History.load(tmp_path / "other.npz")


def test_unknown_column_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="loss"):
        _ = History(["a"]).loss


# -------------------------------------------------------------------- damaged files, and those of another version


def test_damaged_bytes_are_refused_in_words_or_read(tmp_path: Path) -> None:
    path, draw, refused = tmp_path / "history.npz", random.Random(0), []
    filled(50).save(path)
    whole = path.read_bytes()
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(5):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            History.load(path)
        except ResInitError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all("reading a history" in message for message in refused)


@pytest.mark.parametrize("missing", ["on_ratio", "limit", "on", "stride", "count", "saliency"])
def test_what_another_version_does_not_have_is_filled_in(missing: str) -> None:
    history = filled(5)
    history.append(50, torch.zeros(4, 2), torch.ones(2), torch.tensor([0.0, 0.5]))
    values = history.to_dict() | {"newer": torch.zeros(3)}
    del values[missing]
    again = History.from_dict(values)
    assert torch.equal(again.variance_ratio, history.variance_ratio)
    assert again.switched_on() == {"b0": None, "b1": 50}
    assert bool(again.saliency.isnan().all()) == (missing == "saliency")


@pytest.mark.parametrize(
    "damage",
    [
        {"branches": ["one"]},
        {"steps": [1, 2]},
        {"gate": torch.zeros(3, 3)},
        {"on": torch.zeros(7)},
        {"limit": "many"},
        {"stride": 0},
        {"count": 1},
    ],
)
def test_parts_that_do_not_fit_together_are_refused(damage: dict[str, object]) -> None:
    with pytest.raises(ResInitError, match="reading a history: expected"):
        History.from_dict(filled(5).to_dict() | damage)


@pytest.mark.parametrize("state", [None, 3, [], {}, {"branches": [], "steps": []}])
def test_no_history_at_all_is_refused(state: Any) -> None:
    with pytest.raises(ResInitError, match="reading a history: expected"):
        History.from_dict(state)


def test_a_missing_file_is_no_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        History.load(tmp_path / "none.npz")
