"""What a refusal offers can be pasted, and works."""

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from networks import WIDTH, Plain, Scaled
from torch import Tensor, nn

from lit_resinit import apply_, check_identity, make_plan
from lit_resinit.errors import GateError
from lit_resinit.plan.make import patterns_for

X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))
BLOCK = """
from torch import nn


class Bent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.f = nn.Linear(width, width)

    def forward(self, x):
        return x + self.f(x).relu()
"""


class Bent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x).relu()


def installed(folder: Path) -> ModuleType:
    """A package that the user did not write."""
    path = folder / "site-packages" / "their_blocks.py"
    path.parent.mkdir()
    path.write_text(BLOCK)
    spec = importlib.util.spec_from_file_location("their_blocks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refusal(model: nn.Module, **arguments: Any) -> str:
    with pytest.raises(GateError) as refused:
        make_plan(model, X, **arguments)
    return str(refused.value)


def offered(message: str, argument: str) -> list[str]:
    found = re.search(rf"{argument}=(\[.*?\])", message)
    assert found is not None
    patterns: list[str] = ast.literal_eval(found[1])
    return patterns


@pytest.mark.parametrize("argument", ["exclude", "include"])
def test_patterns_of_a_refusal_work_when_pasted(argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = installed(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "their_blocks", theirs)
    stages = [nn.Sequential(theirs.Bent(WIDTH), Scaled(), Plain()) for _ in range(3)]
    model = nn.Sequential(*stages)
    message = refusal(model)
    assert "Edit the block" not in message
    assert offered(message, "exclude") == ["*.0"]
    plan = make_plan(model, X, **{argument: offered(message, argument)})
    assert [b.action for b in plan.branches] == ["excluded", "zero", "insert"] * 3
    apply_(model, plan)
    assert check_identity(model, plan, X).ok


def test_a_block_of_ones_own_is_edited_or_left_out() -> None:
    message = refusal(nn.Sequential(Bent(), Scaled()))
    assert "ScalarGate()" in message
    assert "pass exclude=['0'], or include=['1']" in message


def test_patterns_go_on_from_those_that_were_passed() -> None:
    model = nn.Sequential(Bent(), Scaled(), Scaled(), Bent())
    patterns = offered(refusal(model, exclude="1"), "exclude")
    plan = make_plan(model, X, exclude=patterns)
    assert [b.action for b in plan.branches] == ["excluded", "excluded", "zero", "excluded"]


def test_where_nothing_is_left_the_message_offers_no_pattern() -> None:
    message = refusal(nn.Sequential(Bent(), Bent()))
    assert "scheme='observe'" in message
    assert "exclude=" not in message


@pytest.mark.parametrize(
    ("wanted", "others", "expected"),
    [
        (["a.0", "a.1", "a.2"], ["b.0"], ["a.*"]),
        (["a.0.f", "a.3.f"], ["a.1.f"], ["a.0.f", "a.3.f"]),
        (["a.0.f", "a.1.f"], ["a.0.g"], ["a.*.f"]),
        (["a.0", "a.0.f", "a.1", "a.1.f"], [], ["a.*"]),
        (["(root)", "(root):2"], ["x"], ["(root)", "(root):2"]),
    ],
)
def test_patterns_match_what_is_wanted_and_nothing_else(
    wanted: list[str], others: list[str], expected: list[str]
) -> None:
    assert patterns_for(wanted, [*wanted, *others]) == expected
