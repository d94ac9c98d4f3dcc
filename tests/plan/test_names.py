"""What branches are called, and which of them a pattern names."""

import pytest
import torch
from networks import WIDTH, NormLast, Scaled, encoder, stack
from torch import Tensor, nn

from lit_resinit import apply_, make_plan

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


# -------------------------------------------------------------------- include and exclude


def test_include_and_exclude_leave_the_rest_alone() -> None:
    model = stack(Scaled, 4)
    plan = make_plan(model, X, include=["0", "1", "2"], exclude="1")
    assert [b.action for b in plan.branches] == ["zero", "excluded", "zero", "excluded"]
    assert [g.parameter for g in plan.gates] == ["0.scale", "2.scale"]
    apply_(model, plan)
    assert [float(model[i].scale.detach()) for i in range(4)] == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_pattern_that_matches_nothing_lists_the_nearest_names(argument: str) -> None:
    with pytest.raises(ValueError, match=f"`{argument}`") as caught:
        make_plan(encoder(), torch.randn(2, 3, WIDTH), **{argument: "layers.0.self_atn"})
    assert "layers.0.self_attn" in str(caught.value)


# -------------------------------------------------------------------- as text and as plain types


def test_plan_seen_from_a_parent_has_longer_names() -> None:
    plan = make_plan(stack(NormLast), X).below("net")
    assert [b.name for b in plan.branches] == ["net.0", "net.1"]
    assert [b.previous for b in plan.branches] == [None, "net.0"]
    assert plan.gates[0].parameter == "net.0.norm.weight"
    assert plan.gates[0].biases == ("net.0.norm.bias",)


def test_root_of_a_part_is_named_after_the_part() -> None:
    plan = make_plan(Scaled(), X)
    assert [b.name for b in plan.branches] == ["(root)"]
    assert [b.name for b in plan.below("net").branches] == ["net"]


def test_plan_from_a_parent_is_that_of_the_parent() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = stack(NormLast)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    parent = Parent()
    assert make_plan(parent, X).branches == make_plan(parent.net, X).below("net").branches
