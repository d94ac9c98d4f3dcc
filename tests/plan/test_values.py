"""A plan as text, as plain types, and as a value."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import WIDTH, NormLast, Plain, Scaled, stack
from torch import nn

from lit_resinit import make_plan
from lit_resinit.find.gates import Gate
from lit_resinit.plan.values import Branch

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def test_table_of_a_constant_scheme_names_what_is_multiplied_and_by_what() -> None:
    shown = str(make_plan(stack(Plain, 3), X, scheme="sqrt_depth"))
    assert "#.f times 1/sqrt(3)" in shown
    assert "residual_gate" not in shown
    assert "#.f.2.weight times 1/sqrt(3)" in str(make_plan(stack(Plain, 3), X, scheme="downscale"))


def test_length_counts_the_branches_of_one_stream() -> None:
    assert [b.length for b in make_plan(stack(Plain, 5), X).branches] == [5] * 5


# -------------------------------------------------------------------- as text and as plain types


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(plain(v) for v in value)
    return value is None or type(value) in (str, int, float, bool)


@pytest.mark.parametrize("build", [lambda: stack(NormLast), lambda: stack(Plain), lambda: stack(Scaled)])
def test_to_dict_goes_through_json(build: Callable[[], nn.Module]) -> None:
    plan = make_plan(build(), X)
    values = plan.to_dict()
    assert plain(values)
    assert json.loads(json.dumps(values)) == values
    assert [b["name"] for b in values["branches"]] == [b.name for b in plan.branches]
    assert values["branches"][0]["gates"][0]["parameter"] == plan.gates[0].parameter


def test_text_of_two_hundred_equal_blocks_is_short() -> None:
    text = str(make_plan(stack(Plain, 200), X))
    assert len(text.splitlines()) <= 4
    assert "200" in text
    assert "0 .. 199" in text


def test_text_names_action_kind_and_gate() -> None:
    text = str(make_plan(nn.Sequential(Scaled(), NormLast()), X))
    for word in ("zero", "scale", "norm", "0.scale", "identity"):
        assert word in text


def test_plan_values_are_frozen_and_hashable() -> None:
    (branch,) = make_plan(Plain(), X).branches
    assert isinstance(branch, Branch)
    assert isinstance(branch.gates[0], Gate)
    with pytest.raises(AttributeError):
        branch.action = "zero"
    assert len({branch, branch}) == 1
