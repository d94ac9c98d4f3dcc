import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import WIDTH, ConvBlock, NormLast, Plain, PreNorm, Scaled, encoder, mlp, stack
from torch import Tensor, nn

from lit_resinit import NoBranchError, ResInitError, apply_, make_plan
from lit_resinit.find.gates import Gate
from lit_resinit.plan.values import Branch, ResidualPlan

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


# -------------------------------------------------------------------- schemes


@pytest.mark.parametrize(
    ("build", "scheme", "action", "kind"),
    [
        (lambda: stack(Scaled), "auto", "zero", "scale"),
        (lambda: stack(NormLast), "auto", "zero", "norm"),
        (lambda: stack(Plain), "auto", "insert", "inserted"),
        (lambda: stack(Scaled), "zero", "zero", "scale"),
        (lambda: stack(NormLast), "insert", "insert", "inserted"),
        (lambda: stack(Plain), "last_layer", "last_layer", "layer"),
        (lambda: stack(Plain), "sqrt_depth", "sqrt_depth", "inserted"),
        (lambda: stack(Plain), "downscale", "downscale", "layer"),
        (lambda: stack(Plain), "observe", "observe", "layer"),
    ],
)
def test_scheme_decides_action_and_gate(build: Callable, scheme: str, action: str, kind: str) -> None:
    plan = make_plan(build(), X, scheme=scheme)
    assert plan.scheme == scheme
    assert {b.action for b in plan.branches} == {action}
    assert {g.kind for b in plan.branches for g in b.gates} == {kind}


@pytest.mark.parametrize(("scheme", "block"), [("zero", Plain), ("insert", Scaled)])
def test_scheme_without_anything_to_close_is_an_error_that_says_what_else(scheme: str, block: type) -> None:
    model = stack(block)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(ResInitError, match=r"Nothing was changed") as caught:
        make_plan(model, X, scheme=scheme)
    assert scheme in str(caught.value)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


class Inline(Plain):
    """Ends in a ReLU written in the block's own forward: no module to hang a scalar on."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.f(x))


def test_inline_end_after_a_relu_shows_the_edit_and_the_line() -> None:
    with pytest.raises(ResInitError, match="ScalarGate") as caught:
        make_plan(stack(Inline), X)
    assert f"{Path(__file__).name}:" in str(caught.value)


def test_constant_schemes_have_no_gates_to_judge() -> None:
    assert make_plan(stack(Plain), X, scheme="sqrt_depth").gates == ()
    assert make_plan(stack(Plain), X, scheme="downscale").gates == ()


def test_table_of_a_constant_scheme_names_what_is_multiplied_and_by_what() -> None:
    shown = str(make_plan(stack(Plain, 3), X, scheme="sqrt_depth"))
    assert "#.f times 1/sqrt(3)" in shown
    assert "residual_gate" not in shown
    assert "#.f.2.weight times 1/sqrt(3)" in str(make_plan(stack(Plain, 3), X, scheme="downscale"))


def test_length_counts_the_branches_of_one_stream() -> None:
    assert [b.length for b in make_plan(stack(Plain, 5), X).branches] == [5] * 5


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


def test_zero_layers_outside_the_branches_are_listed_not_written() -> None:
    model = stack(Plain)
    nn.init.zeros_(model[-1].weight)
    plan = make_plan(model, X)
    assert plan.zero_layers == ("2.weight",)
    assert "2.weight" in str(plan)
    assert "2.weight" not in {g.parameter for g in plan.gates}


# -------------------------------------------------------------------- inputs and errors


def test_inputs_may_be_one_tensor_a_tuple_or_keywords() -> None:
    class Two(Plain):
        def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
            return super().forward(x + shift)

    names = [[b.name for b in make_plan(stack(Plain), args).branches] for args in (X, (X,), [X])]
    assert names == [["0", "1"]] * 3
    assert len(make_plan(Two(), X, {"shift": X})) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"model": "resnet"}, TypeError, "model"),
        ({"scheme": "zeros"}, ValueError, "scheme"),
        ({"scheme": None}, ValueError, "scheme"),
        ({"include": [1]}, TypeError, "include"),
        ({"exclude": [2.0]}, TypeError, "exclude"),
        ({"include": 3}, TypeError, "include"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception], named: str) -> None:
    values = {"model": stack(Plain), "args": X} | arguments
    with pytest.raises(error, match=f"`{named}`"):
        make_plan(**values)


@pytest.mark.parametrize("model", [nn.Identity(), nn.Sequential(), nn.ReLU()])
def test_model_without_parameters_is_an_error(model: nn.Module) -> None:
    with pytest.raises(NoBranchError, match="parameters"):
        make_plan(model, X)


@pytest.mark.parametrize("scheme", ["auto", "zero", "insert", "last_layer", "sqrt_depth", "downscale"])
def test_network_without_a_skip_keeps_every_bit(scheme: str) -> None:
    model = nn.Sequential(mlp(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2))
    before = {n: v.clone() for n, v in model.state_dict().items()}
    with pytest.raises(NoBranchError):
        make_plan(model, X, scheme=scheme)
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())


def test_observing_a_network_without_a_skip_needs_a_zero_layer() -> None:
    model = mlp()
    with pytest.raises(NoBranchError):
        make_plan(model, X, scheme="observe")
    nn.init.zeros_(model[2].weight)
    plan = make_plan(model, X, scheme="observe")
    assert (len(plan), plan.zero_layers) == (0, ("2.weight",))


def test_planning_changes_nothing() -> None:
    model, x = nn.Sequential(ConvBlock(3, 3), ConvBlock(3, 4)), torch.randn(2, 3, 5, 5)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    for scheme in ("auto", "last_layer", "insert", "sqrt_depth", "downscale", "observe"):
        assert isinstance(make_plan(model, x, scheme=scheme), ResidualPlan)
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())


def test_plans_of_equal_models_are_equal() -> None:
    assert make_plan(stack(PreNorm), X) == make_plan(stack(PreNorm), X)
