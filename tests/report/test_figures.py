"""Figures: what is drawn where, and what cannot be drawn."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import WIDTH, Plain, stack

from lit_resinit import History, ResInitError, make_plan
from lit_resinit.plan.values import ResidualPlan
from lit_resinit.report import activation_figure, gate_figure, order_figure, stream_figure

X = torch.randn(4, WIDTH)


def watched(plan: ResidualPlan, ratios: list[list[float]]) -> History:
    history = History([b.name for b in plan.branches], on_ratio=0.1)
    for step, row in enumerate(ratios):
        history.append(step, torch.full((4, len(plan)), 0.25), torch.ones(len(plan)), torch.tensor(row))
    return history


def test_figure_has_steps_across_and_depth_upwards() -> None:
    plan = make_plan(stack(Plain, 5), X)
    history = watched(plan, [[1e-6 * (i + 1) * 10**s for i in range(5)] for s in range(6)])
    axes, colours = activation_figure(history).axes
    mesh = axes.collections[0]
    assert mesh.get_array().shape == (5, 6)
    assert axes.get_xlabel() == "optimizer step"
    assert "first to last" in axes.get_ylabel()
    assert "Var" in colours.get_ylabel()
    marks = axes.collections[1].get_offsets()
    assert [tuple(m) for m in marks.tolist()] == [
        (step, depth + 0.5) for depth, step in enumerate(history.switched_on().values()) if step is not None
    ]


@pytest.mark.parametrize("ratios", [[[0.0, 0.0]], [[float("nan"), 0.1], [0.2, float("nan")]]])
def test_figure_of_few_or_unknown_values_can_be_drawn(ratios: list[list[float]]) -> None:
    plan = make_plan(stack(Plain), X)
    file = io.BytesIO()
    activation_figure(watched(plan, ratios)).savefig(file)
    assert file.getvalue().startswith(b"\x89PNG")


def opening(branches: int, records: int = 4) -> History:
    """Branch i has gate 0.1 * step * i and a stream of variance 10**step."""
    history = History([str(i) for i in range(branches)], on_ratio=0.1)
    for step in range(records):
        gate = 0.1 * step * torch.arange(branches)
        history.append(step, gate.expand(4, -1), torch.full((branches,), 10.0**step), gate.square() * 10.0**step)
    return history


def test_gate_curves_are_those_of_the_history() -> None:
    history = opening(3)
    axes = gate_figure(history).axes[0]
    drawn = torch.tensor([line.get_ydata().tolist() for line in axes.lines]).T
    torch.testing.assert_close(drawn.float(), history.gate_max)
    assert axes.lines[0].get_xdata().tolist() == history.steps.tolist()


def test_many_gate_curves_are_thinned_and_the_title_says_so() -> None:
    axes = gate_figure(opening(200)).axes[0]
    assert len(axes.lines) == 50
    assert "50 of 200" in axes.get_title()


def test_order_has_a_dot_for_each_step_and_a_cross_for_each_branch_that_never_switched_on() -> None:
    history = opening(4)
    dots, crosses = order_figure(history).axes[0].collections
    on = history.switched_on()
    assert dots.get_offsets().tolist() == [[on[name], history.branches.index(name)] for name in history.order()]
    assert [depth for _, depth in crosses.get_offsets().tolist()] == [0.0, 1.0]


def test_order_of_nothing_is_crosses_only() -> None:
    history = opening(2, records=1)
    assert "(0 of 2)" in order_figure(history).axes[0].get_title()


def test_stream_is_drawn_at_the_first_and_the_last_record() -> None:
    axes = stream_figure(opening(3)).axes[0]
    assert {line.get_label(): line.get_ydata().tolist() for line in axes.lines} == {
        "step 0": [1.0] * 3,
        "step 3": [1000.0] * 3,
    }
    assert axes.get_yscale() == "log"


FIGURES = [activation_figure, gate_figure, order_figure, stream_figure]


@pytest.mark.parametrize("figure", FIGURES)
def test_figures_can_be_drawn_from_a_loaded_history(figure: Callable[[History], Any], tmp_path: Path) -> None:
    opening(5).save(tmp_path / "history.npz")
    file = io.BytesIO()
    figure(History.load(tmp_path / "history.npz")).savefig(file, format="svg")
    assert b"<svg" in file.getvalue()


@pytest.mark.parametrize("figure", FIGURES)
def test_empty_history_is_an_error(figure: Callable[[History], Any]) -> None:
    with pytest.raises(ResInitError, match="at least one record"):
        figure(History(["a"]))


@pytest.mark.parametrize("figure", FIGURES)
def test_missing_matplotlib_says_what_to_install(
    figure: Callable[[History], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ResInitError, match=r"lit-resinit\[report\]"):
        figure(opening(2))
