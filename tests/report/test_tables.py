"""The table at the end of a run."""

import io

import torch
from networks import WIDTH, NormLast, Plain, Scaled, stack
from rich.console import Console
from torch import nn

from lit_resinit import History, make_plan
from lit_resinit.plan.values import ResidualPlan
from lit_resinit.report import history_table
from lit_resinit.watch.usefulness import Ablation

X = torch.randn(4, WIDTH)


def watched(plan: ResidualPlan, ratios: list[list[float]]) -> History:
    history = History([b.name for b in plan.branches], on_ratio=0.1)
    for step, row in enumerate(ratios):
        history.append(step, torch.full((4, len(plan)), 0.25), torch.ones(len(plan)), torch.tensor(row))
    return history


def printed(plan: ResidualPlan, history: History, ablation: Ablation | None = None) -> list[list[str]]:
    """Cells of the printed table."""
    file = io.StringIO()
    Console(file=file, width=200).print(history_table(plan, history, ablation=ablation))
    lines = [line for line in file.getvalue().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_table_has_a_row_for_each_branch() -> None:
    plan = make_plan(nn.Sequential(Scaled(), NormLast()), X)
    rows = printed(plan, watched(plan, [[0.0, 0.0], [0.0, 0.5]]))
    assert rows == [["0", "scale", "0.25", "0", "-", "-"], ["1", "norm", "0.25", "0.5", "1", "1"]]


def test_table_of_a_deep_network_shows_both_ends() -> None:
    plan = make_plan(stack(Plain, 100), X)
    rows = printed(plan, watched(plan, [[0.0] * 100]))
    assert len(rows) == 41
    assert (rows[0][0], rows[-1][0]) == ("0", "99")
    assert rows[20][0] == "... 60 more"


def test_table_without_records_has_dashes() -> None:
    plan = make_plan(stack(Plain), X)
    assert {row[3] for row in printed(plan, watched(plan, []))} == {"-"}


def test_usefulness_has_columns_where_it_was_measured() -> None:
    plan = make_plan(nn.Sequential(Scaled(), NormLast()), X)
    history = watched(plan, [[0.0, 0.5]])
    history.attribute(1, {"0": 0.25, "1": -0.125}, 1.0, 0.125)
    assert [row[6:] for row in printed(plan, history)] == [["0.25"], ["-0.125"]]
    ablation = Ablation(("1",), torch.ones(2), torch.tensor([[0.1], [0.3]]))
    assert [row[6:] for row in printed(plan, history, ablation)] == [["0.25", "-"], ["-0.125", "0.2 ± 0.1"]]
