"""Copies of the parameters that a module keeps itself."""

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import WIDTH, Plain, stack
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lit_resinit import ResInitError, make_plan
from lit_resinit.trainer.copies import copies_without_scalars, fitting_plan

X = torch.randn(4, WIDTH)


class Shadow(nn.Module):
    """The moving average of latent diffusion: buffers, named without dots."""

    def __init__(self, net: nn.Module, factor: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("decay", torch.tensor(0.999))
        for name, parameter in net.named_parameters():
            self.register_buffer(name.replace(".", ""), parameter.detach() * factor)


class Average:
    """The moving average of torch_ema: a plain object with a list."""

    def __init__(self, net: nn.Module) -> None:
        self.shadow = [p.detach().clone() for p in net.parameters()]


def named(net: nn.Module, factor: float = 1.0) -> dict[str, Tensor]:
    return {n: p.detach() * factor for n, p in net.named_parameters()}


class Net(nn.Module):
    def __init__(self, keep: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.net = stack(Plain)
        self.kept = keep(self.net)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "dict": named,
    "dict of other values": lambda net: named(net, 0.5),
    "nested": lambda net: {"averages": [named(net)]},
    "list": lambda net: [p.detach().clone() for p in net.parameters()],
    "deque": lambda net: deque([p.detach().clone() for p in net.parameters()]),
    "object": Average,
    "buffers": Shadow,
    "buffers of other values": lambda net: Shadow(net, 0.5),
    "module": copy.deepcopy,
    "averaged model": AveragedModel,
    "state dict": lambda net: copy.deepcopy(net.state_dict()),
    "parameters": lambda net: nn.ParameterList(p.detach().clone() for p in net.parameters()),
}
OTHERS: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda net: None,
    "the parameters themselves": lambda net: list(net.parameters()),
    "the module again": lambda net: [net],
    "tensors of the same shapes": lambda net: [torch.randn_like(p) for p in net.parameters()],
    "zeros of the same shapes": lambda net: {"a": torch.zeros(WIDTH, WIDTH), "b": torch.zeros(WIDTH)},
    "another network": lambda net: stack(Plain),
    "names": lambda net: [n for n, _ in net.named_parameters()],
    "an optimizer": lambda net: torch.optim.Adam(net.parameters()),
}


@pytest.mark.parametrize("kind", COPIES)
def test_copies_are_found(kind: str) -> None:
    model = Net(COPIES[kind])
    found = copies_without_scalars(model, make_plan(model, X))
    assert found
    assert all("kept" in place for place in found)


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_copy_is_left_alone(kind: str) -> None:
    model = Net(OTHERS[kind])
    plan = make_plan(model, X)
    assert copies_without_scalars(model, plan) == []
    assert fitting_plan(model, plan, lambda scheme: pytest.fail("planned again")) is plan


def test_a_copy_that_runs_gets_its_own_scalars() -> None:
    class Target(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) + self.kept(x).detach()

    model = Target(copy.deepcopy)
    assert copies_without_scalars(model, make_plan(model, X)) == []


def test_blocks_cloned_from_one_are_no_copies_of_each_other() -> None:
    block = Plain()
    model = nn.Sequential(*(copy.deepcopy(block) for _ in range(3)))
    assert copies_without_scalars(model, make_plan(model, X, include="0")) == []


def test_auto_closes_last_layers_instead() -> None:
    model = Net(named)
    plan = fitting_plan(model, make_plan(model, X), lambda scheme: make_plan(model, X, scheme=scheme))
    assert [b.action for b in plan.branches] == ["last_layer", "last_layer"]


def test_scalars_that_were_asked_for_are_refused_in_words() -> None:
    model = Net(named)
    with pytest.raises(ResInitError, match=r"`kept`.*on_fit_start.*last_layer") as caught:
        fitting_plan(model, make_plan(model, X, scheme="insert"), lambda scheme: pytest.fail("planned again"))
    assert "Nothing was changed" in str(caught.value)


def test_where_only_a_scalar_closes_the_message_says_so() -> None:
    class Rectified(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.f.append(nn.ReLU())

    model = Net(lambda net: None)
    model.net = stack(Rectified)
    model.kept = named(model.net)
    with pytest.raises(ResInitError, match="is not possible"):
        fitting_plan(model, make_plan(model, X), lambda scheme: make_plan(model, X, scheme=scheme))
