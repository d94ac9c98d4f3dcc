"""The table at the end of a run."""

import io

import pytest
import torch
from networks import WIDTH, NormLast, Plain, Scaled, stack
from rich.console import Console
from torch import nn

from lit_resinit import History, make_plan
from lit_resinit.plan.values import ResidualPlan
from lit_resinit.report import history_table

X = torch.randn(4, WIDTH)


def watched(plan: ResidualPlan, ratios: list[list[float]]) -> History:
    history = History([b.name for b in plan.branches], on_ratio=0.1)
    for step, row in enumerate(ratios):
        history.append(step, torch.full((4, len(plan)), 0.25), torch.ones(len(plan)), torch.tensor(row))
    return history


def printed(plan: ResidualPlan, history: History) -> list[list[str]]:
    """Cells of the printed table."""
    file = io.StringIO()
    Console(file=file, width=200).print(history_table(plan, history))
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


class Deep(nn.Module):
    """Blocks under a long name."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({"backbone": nn.ModuleDict({name: Plain() for name in names})})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.transformer["backbone"].values():
            x = block(x)
        return x


LONG = [f"{i}_a_very_long_name_of_a_block_number_{i}_of_this_network" for i in range(6)]
ALIKE = [f"encoder_with_a_long_name_{word}_and_a_long_end_of_it" for word in ("one", "two", "three")]


@pytest.mark.parametrize("names", [["0", "1", "2"], LONG, ALIKE, [LONG[0], "b"]])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_names_that_do_not_fit_can_still_be_told_apart(names: list[str], width: int) -> None:
    plan = make_plan(Deep(names), X)
    history = watched(plan, [[0.0] * len(plan)])
    file = io.StringIO()
    Console(file=file, width=width).print(history_table(plan, history, width=width, woke={plan.gates[0].parameter: 3}))
    text = file.getvalue()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert len(rows) == len({row[0] for row in rows}) == len(names)
    assert "transformer.backbone" in text
    assert rows[0][-1] == "3"
    assert max(map(len, text.splitlines())) <= width


def test_branches_that_were_open_from_the_start_have_no_place() -> None:
    plan = make_plan(stack(Scaled, 3), X)
    history = History([b.name for b in plan.branches], on_ratio=0.1)
    history.begin([False, True, False])
    for step, row in enumerate([[0.5, 0.5, 0.0], [0.5, 0.5, 0.5]]):
        history.append(step, torch.full((4, 3), 0.25), torch.ones(3), torch.tensor(row))
    assert history.switched_on() == {"0": None, "1": 0, "2": 1}
    assert (history.order(), history.open_from_start()) == (["1", "2"], ["0"])
    assert History.from_dict(history.to_dict()).open_from_start() == ["0"]
    table = history_table(plan, history)
    assert table.title == "2 of 2 residual branches switched on by step 1; 1 open from the start"
    assert [row[4:] for row in printed(plan, history)] == [["start", "-"], ["0", "1"], ["1", "2"]]
