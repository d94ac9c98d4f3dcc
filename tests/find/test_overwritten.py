"""A block that writes over the stream is not the identity of its input."""

from collections.abc import Callable

import pytest
import torch
from networks import WIDTH
from torch import Tensor, nn
from torch.nn import functional

from lit_resinit import IdentityError, apply_, check_identity, make_plan

X = torch.randn(4, WIDTH)


class Block(nn.Module):
    """A block written as a function of its input and of its layers."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.relu = forward, nn.ReLU(inplace=True)
        self.first, self.second, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def refine(net: nn.Module, x: Tensor) -> Tensor:
    out = net.first(net.relu(x))
    return net.second(net.relu(out)) + x


def sums_in_place(net: nn.Module, x: Tensor) -> Tensor:
    x = net.norm(x)
    x += net.first(x)
    x += net.second(x)
    return x


OVERWRITES = {
    "pre-activation": lambda net, x: x + net.first(net.relu(x)),
    "two activations": refine,
    "a factor": lambda net, x: x + net.first(x.mul_(0.5)),
    "dropout": lambda net, x: x + net.first(functional.dropout(x, 0.1, inplace=True)),
    "a view": lambda net, x: x + net.first(x.view(-1).tanh_().view_as(x)),
}
LEAVES = {
    "activation of what the block made": lambda net, x: x + net.second(net.relu(net.first(x))),
    "activation of the sum": lambda net, x: net.relu(x + net.first(x)),
    "activation of a copy": lambda net, x: x + net.first(net.relu(x.clone())),
    "activation between two sums": lambda net, x: (lambda y: y + net.second(y))(net.relu(x + net.first(x))),
    "a mask": lambda net, x: x.masked_fill_(x.abs().sum(-1, keepdim=True) > 99.0, 0.0) + net.first(x),
    "sums in place": sums_in_place,
}


def network(block: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(block), Block(block))


@pytest.mark.parametrize("name", OVERWRITES)
def test_a_block_that_writes_over_its_input_is_open_with_the_line(name: str) -> None:
    model = network(OVERWRITES[name])
    plan = make_plan(model, X)
    assert "writes over the stream" in str(plan)
    report = check_identity(apply_(model, plan), plan, X)
    assert [(b.status, b.cause) for b in report.branches] == [("open", "stream changed")] * 2
    assert all(b.source == p.overwritten_at != "" for b, p in zip(report.branches, plan.branches, strict=True))
    with pytest.raises(IdentityError, match="stream changed"):
        report.raise_if_open()


@pytest.mark.parametrize("name", LEAVES)
def test_what_a_block_made_it_may_write_over(name: str) -> None:
    model = network(LEAVES[name])
    plan = make_plan(model, X)
    assert [b.overwritten_by for b in plan.branches] == [""] * len(plan)
    assert check_identity(apply_(model, plan), plan, X).ok


def test_a_second_relu_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), Block(OVERWRITES["pre-activation"]))
    plan = make_plan(model, X)
    assert plan.branches[0].overwritten_by == ""
    assert check_identity(apply_(model, plan), plan, X).ok


def test_the_module_that_writes_is_named_from_a_parent_too() -> None:
    plan = make_plan(network(OVERWRITES["pre-activation"]), X).below("net")
    assert [b.overwritten_in for b in plan.branches] == ["net.1.relu", "net.2.relu"]
