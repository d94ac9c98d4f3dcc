"""Objects that show themselves: short as a ``repr``, as a table in rich and in a notebook."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import rich
import torch
from networks import WIDTH, Classifier, NormLast, Scaled, data, stack, trainer

import lit_resinit
from lit_resinit import History, ResidualInit, apply_, check_identity, make_plan, observe
from lit_resinit.words import some_of

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
IMAGES = Path(__file__).parent.parent / "docs" / "images"


def history(records: int = 2, branches: int = 3) -> History:
    found = History([f"b{i}" for i in range(branches)])
    for step in range(records):
        ratio = torch.linspace(0, 0.5, branches)
        found.append(10 * step, torch.full((4, branches), 0.25), torch.ones(branches), ratio)
    return found


def test_reprs_are_one_short_line() -> None:
    model = stack(NormLast, 3)
    plan = make_plan(model, X)
    assert repr(plan) == "<ResidualPlan: 3 residual branches, scheme auto>"
    assert repr(plan.branches[1]) == "<Branch 1: identity skip, zero, gate 1.norm.weight>"
    assert repr(plan.gates[1]) == "<Gate 1.norm.weight: norm, closed at 0 with 1.norm.bias>"
    assert repr(check_identity(model, plan, X)) == "<IdentityReport: 3 of 3 branches open>"
    apply_(model, plan)
    with observe(model, plan, X) as seen:
        model(X).square().mean().backward()
    assert repr(seen.identity) == "<IdentityReport: 3 branches closed>"
    assert repr(seen.gradients) == "<GradientReport: 6 alive>"
    assert repr(history()) == "<History: 2 records of 3 branches, steps 0 to 10, 2 switched on>"
    assert repr(History(["a"])) == "<History: 0 records of 1 branches>"


def test_the_callback_says_what_it_knows(tmp_path: Path) -> None:
    callback = ResidualInit("last_layer")
    assert repr(callback) == "<ResidualInit: scheme last_layer, not set up>"
    trainer(tmp_path, callback).fit(Classifier(stack(Scaled)), data(WIDTH))
    assert repr(callback) == "<ResidualInit: scheme last_layer, 2 branches, 3 records>"


def test_plans_that_are_equal_stay_equal_and_go_through_pickle() -> None:
    plan = make_plan(stack(Scaled), X)
    assert pickle.loads(pickle.dumps(plan)) == plan


def shown() -> list[object]:
    model = stack(Scaled, 3)
    plan = make_plan(model, X)
    apply_(model, plan)
    with observe(model, plan, X) as seen:
        model(X).square().mean().backward()
    return [plan, seen.identity, seen.gradients, history(), History(["a", "b"])]


@pytest.mark.parametrize("position", range(5))
def test_tables_for_rich_and_for_notebooks(position: int, capsys: pytest.CaptureFixture[str]) -> None:
    value = shown()[position]
    rich.print(value)
    printed = capsys.readouterr().out
    html = value._repr_html_()
    cells = re.findall("<t[hd]>(.*?)</t[hd]>", html)
    assert len(cells) > 6
    for cell in cells[:2]:
        assert cell in printed
    assert html.count("<tr>") == html.count("</tr>") >= 2


def test_html_is_escaped() -> None:
    found = History(["<b>&"])
    assert "&lt;b&gt;&amp;" in found._repr_html_()
    assert "<b>" not in found._repr_html_()


def test_long_tables_show_both_ends() -> None:
    rows = some_of([(str(i), "x") for i in range(1000)])
    assert (rows[0], rows[20], rows[-1], len(rows)) == (("0", "x"), ("... 960 more", ""), ("999", "x"), 41)
    assert len(re.findall("<tr>", history(2, 1000)._repr_html_())) == 42


def test_dir_is_the_api() -> None:
    assert dir(lit_resinit) == sorted(lit_resinit.__all__)
    assert all(hasattr(lit_resinit, name) for name in dir(lit_resinit))


@pytest.mark.parametrize("what", ["ratio", "gates", "order", "stream"])
def test_a_history_draws_itself(what: str) -> None:
    assert "A title" in history().plot(what, "A title").axes[0].get_title()
    assert "A title" not in history().plot(what).axes[0].get_title()


def test_other_figures_are_refused() -> None:
    with pytest.raises(ValueError, match="one of gates, order, ratio, stream but got 'loss'"):
        history().plot("loss")


@pytest.mark.parametrize("what", ["ratio", "order"])
def test_legend_title_and_label_do_not_meet(what: str) -> None:
    figure = history().plot(what, "A title that is about as long as a line of a picture can be")
    figure.canvas.draw()
    axes = figure.axes[0]
    legend = axes.get_legend().get_window_extent()
    assert not legend.overlaps(axes.title.get_window_extent())
    assert not legend.overlaps(axes.xaxis.label.get_window_extent())


def test_the_picture_of_the_readme_is_what_the_code_draws(tmp_path: Path) -> None:
    from matplotlib.image import imread

    drawn = History.load(IMAGES / "digits_200_blocks.npz")
    drawn.plot(title="200 residual blocks switching on (handwritten digits)").savefig(tmp_path / "new.png", dpi=150)
    old, new = imread(IMAGES / "digits_200_blocks.png"), imread(tmp_path / "new.png")
    assert old.shape == new.shape
    assert np.abs(old - new).mean() < 0.02  # fonts differ a little from one machine to the next
