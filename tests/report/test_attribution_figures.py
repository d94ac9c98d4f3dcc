"""Who carries the loss: what the picture and the page are given, and what is drawn."""

import io
import json
import math
from pathlib import Path

import pytest
import torch

from lit_resinit import History, ResInitError
from lit_resinit.report import attribution_figure, run_figure, write_page
from lit_resinit.report.about import about_run
from lit_resinit.report.attribution import attribution_data, bands_of
from lit_resinit.report.page import page_data


def measured(branches: int = 5, times: int = 6) -> History:
    """Branch i takes i hundredths off the loss for each step; the first adds to it."""
    history = History([f"b{i}" for i in range(branches)], on_ratio=0.1)
    for step in range(times):
        ratio = torch.arange(branches) * step / 10
        history.append(10 * step, torch.ones(4, branches), torch.ones(branches), ratio)
        values = {f"b{i}": 0.01 * i * step - (0.005 if i == 0 else 0.0) for i in range(branches)}
        total = sum(values.values())
        history.attribute(10 * step + 1, values, loss=2.0 - total, joint=1.1 * total)
    return history


def test_neighbours_are_added_up_until_there_are_few_enough() -> None:
    values = torch.randn(3, 103)
    found = bands_of([f"b{i}" for i in range(103)], values, most=10)
    assert len(found.labels) == len(found.depths) == len(found.values) <= 10
    assert found.labels[0] == "b0 .. b10"
    torch.testing.assert_close(found.values.sum(0), values.sum(1), rtol=1e-4, atol=1e-5)
    assert found.depths == sorted(found.depths)


def test_the_page_is_given_the_measurements_with_steps_of_their_own() -> None:
    history = measured()
    found = page_data(history, about_run(None))["attribution"]
    json.dumps(found, allow_nan=False)
    assert found["steps"] == [1, 11, 21, 31, 41, 51]
    torch.testing.assert_close(torch.tensor(found["values"]), history.attributions.values.T, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(torch.tensor(found["sum"]), history.attributions.values.sum(1), rtol=1e-3, atol=1e-6)
    assert found["closed"][-1] == pytest.approx(
        float((history.attributions.loss + history.attributions.joint)[-1]), rel=1e-3
    )
    assert found["bands"]["labels"] == history.branches


def test_the_page_has_none_where_nothing_was_measured_and_the_table_no_column() -> None:
    history = History(["a"])
    history.append(0, torch.ones(4, 1), torch.ones(1), torch.ones(1))
    found = page_data(history, about_run(None))
    assert found["attribution"] is None
    assert found["branches"][0]["path"] is None
    assert page_data(measured(), about_run(None))["branches"][2]["path"] == pytest.approx(0.1)


def test_what_is_unknown_is_null_and_draws_nothing() -> None:
    history = measured(3, 2)
    history.attribute(90, {"b0": math.nan, "b1": math.inf}, loss=math.nan, joint=math.inf)
    found = attribution_data(history, [0, 1, 2], 600)
    json.dumps(found, allow_nan=False)
    assert [row[-1] for row in found["values"]] == [None] * 3
    run_figure(history).savefig(io.BytesIO())


def test_many_branches_and_measurements_are_thinned() -> None:
    history = measured(500, 90)
    found = page_data(history, about_run(None))["attribution"]
    assert (found["steps"][0], found["steps"][-1]) == (1, 891)
    assert len(found["values"]) == 500
    assert len(found["bands"]["labels"]) <= 40


# -------------------------------------------------------------------- the picture


def test_the_stack_is_the_sum_upwards_and_downwards() -> None:
    history = measured()
    heat, stack, loss, *_ = attribution_figure(history).axes
    assert heat.collections[0].get_array().shape == (5, 6)
    tops = [max(p.vertices[:, 1].max() for p in c.get_paths()) for c in stack.collections]
    lows = [min(p.vertices[:, 1].min() for p in c.get_paths()) for c in stack.collections]
    values = history.attributions.values
    assert max(tops) == pytest.approx(float(values.clamp(min=0).sum(1).max()), rel=1e-5)
    assert min(lows) == pytest.approx(float(values.clamp(max=0).sum(1).min()), rel=1e-5)
    lines = {line.get_label(): list(line.get_ydata()) for line in stack.lines}
    assert lines["sum"] == pytest.approx(values.sum(1).tolist())
    assert lines["closing all"] == pytest.approx(history.attributions.joint.tolist())
    beside = {line.get_label(): list(line.get_ydata()) for line in loss.lines}
    assert beside["as it is"] == pytest.approx(history.attributions.loss.tolist())


def test_switching_on_is_marked_in_both() -> None:
    history = measured()
    heat, stack, *_ = attribution_figure(history).axes
    on = [(float(s), d + 0.5) for d, s in enumerate(history.switched_on().values()) if s is not None]
    assert [tuple(p) for p in heat.collections[1].get_offsets().tolist()] == on
    marks = [line.get_xdata()[0] for line in stack.lines if len(line.get_xdata()) == 2 and line.get_ydata()[1] == 0.04]
    assert marks == [step for step, _ in on]


def test_the_picture_of_a_run_has_it_only_where_it_was_measured() -> None:
    assert len(run_figure(measured()).axes) == 4 + 3  # and three colour bars
    history = History(["a"])
    history.append(0, torch.ones(4, 1), torch.ones(1), torch.ones(1))
    assert len(run_figure(history).axes) == 2
    with pytest.raises(ResInitError, match="usefulness='path'"):
        attribution_figure(history)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("branches", [1, pytest.param(300, marks=pytest.mark.slow)])
def test_few_and_many_can_be_drawn(times: int, branches: int) -> None:
    for ending in ("png", "pdf", "svg"):
        file = io.BytesIO()
        run_figure(measured(branches, times)).savefig(file, format=ending)
        assert file.getvalue()


def test_it_can_be_drawn_from_a_file(tmp_path: Path) -> None:
    measured().save(tmp_path / "history.npz")
    again = History.load(tmp_path / "history.npz")
    assert len(run_figure(again).axes) == 7
    write_page(tmp_path / "run.html", again)
    assert '"attribution":{"steps"' in (tmp_path / "run.html").read_text()
