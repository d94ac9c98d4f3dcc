"""What each scheme decides for a branch, and the arguments that are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import WIDTH, ConvBlock, NormLast, Plain, PreNorm, Scaled, mlp, stack
from torch import Tensor, nn

from lit_resinit import NoBranchError, ResInitError, make_plan
from lit_resinit.plan.values import ResidualPlan

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


# -------------------------------------------------------------------- as text and as plain types


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
