"""Kinds of tensors and modules, and arguments, that are met in the field."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import WIDTH, Plain, stack
from torch import Tensor, nn

from lit_resinit import apply_, check_gradients, check_identity, fold_, make_plan, observe

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Tag(torch.Tensor):
    """The most ordinary subclass: it stays one through every operation."""


def test_a_batch_of_a_tensor_subclass_is_judged() -> None:
    model, x = stack(Plain), X.clone().as_subclass(Tag)
    plan = make_plan(model, x)
    apply_(model, plan)
    with observe(model, plan, x) as seen:
        model(x).square().mean().backward()
    assert seen.identity.ok
    assert seen.gradients.ok, seen.gradients
    assert {g.status for g in seen.gradients.gates.values()} == {"alive"}


def test_a_dead_gate_is_seen_behind_a_tensor_subclass() -> None:
    model, x = stack(Plain), X.clone().as_subclass(Tag)
    plan = make_plan(model, x)
    apply_(model, plan)
    with observe(model, plan, x) as seen:
        (model(x).detach() * model[2].weight.sum()).mean().backward()
    assert not seen.gradients.ok


def test_jagged_tensors_are_measured() -> None:
    model = stack(Plain)
    ragged = torch.nested.nested_tensor([X[:1], X[1:]], layout=torch.jagged)
    plan = make_plan(model, ragged)
    apply_(model, plan)
    with observe(model, plan, ragged) as seen:
        model(ragged).values().square().mean().backward()
    assert seen.identity.ok
    assert seen.gradients.ok, seen.gradients
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "residual_gate" in n).fill_(1.0)
    assert not check_identity(model, plan, ragged).ok


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_part_takes_no_hook() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    model = nn.Sequential(scripted, Plain(), Plain(), nn.Linear(WIDTH, 2))
    plan = make_plan(model, X)
    assert [b.name for b in plan.branches] == ["1", "2"]
    apply_(model, plan)
    assert check_identity(model, plan, X).ok
    with observe(model, plan, X) as seen:
        model(X).square().mean().backward()
    assert seen.gradients.ok


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_branch_gets_no_scalar() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.f(x)

    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2))
    plan = make_plan(model, X)
    assert [b.action for b in plan.branches] == ["last_layer", "last_layer"]
    assert check_identity(apply_(model, plan), plan, X).ok


def test_gradients_from_before_are_no_verdict() -> None:
    model = stack(Plain)
    plan = make_plan(model, X)
    apply_(model, plan)
    model(X).square().mean().backward()
    assert check_gradients(model, plan).ok
    with observe(model, plan, X) as nothing:
        pass
    assert not nothing.gradients.ok
    with observe(model, plan, X) as other:
        stack(Plain)(X).square().mean().backward()
    assert {g.status for g in other.gradients.gates.values()} == {"missing"}
    assert "an earlier step" in str(other.gradients)


def test_gates_made_in_inference_mode_learn() -> None:
    model = stack(Plain)
    with torch.inference_mode():
        x = X.clone()
        plan = make_plan(model, x)
        apply_(model, plan)
        assert check_identity(model, plan, x).ok
    model(X).square().mean().backward()
    assert check_gradients(model, plan).ok


MODEL = stack(Plain)
PLAN = make_plan(MODEL, X)
CALLS: dict[str, Callable[[Any, Any], object]] = {
    "apply_": apply_,
    "check_identity": lambda model, plan: check_identity(model, plan, X),
    "check_gradients": check_gradients,
    "observe": lambda model, plan: observe(model, plan, X).__enter__(),
}


@pytest.mark.parametrize("call", CALLS)
def test_none_in_place_of_an_argument_is_told(call: str) -> None:
    with pytest.raises(TypeError, match=r"Expected argument `plan` to be a ResidualPlan but got NoneType"):
        CALLS[call](MODEL, None)
    with pytest.raises(TypeError, match=r"Expected argument `model` to be a torch\.nn\.Module but got NoneType"):
        CALLS[call](None, PLAN)


def test_folding_none_is_told() -> None:
    with pytest.raises(TypeError, match="Expected argument `model`"):
        fold_(None)  # type: ignore[arg-type]
