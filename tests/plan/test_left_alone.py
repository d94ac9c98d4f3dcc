"""What a plan leaves as it is: sums that nobody reads, modules that did not run, branches that are zero."""

import json

import pytest
import torch
from networks import WIDTH, Plain, mlp, stack
from torch import Tensor, nn

from lit_resinit import NoBranchError, apply_, check_identity, make_plan, observe

X = torch.randn(4, WIDTH)


class Wave(nn.Module):
    """Adds to the stream, and to a second sum that alone leaves the network."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.skip, self.residual = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.f(x).tanh()
        return x + self.residual(h), self.skip(h)


class WaveNet(nn.Module):
    """The last sum of its stream is computed, and nobody reads it."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wave() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for block in self.blocks:
            x, skip = block(x)
            total = total + skip
        return total


def test_a_last_sum_that_nobody_reads_is_neither_closed_nor_judged() -> None:
    model = WaveNet(3)
    before = model.blocks[2].residual.weight.clone()
    plan = make_plan(model, X)
    assert ([b.name for b in plan.branches], plan.unread) == (["blocks.0", "blocks.1"], ("blocks.2",))
    assert "unread" in str(plan)
    assert json.loads(json.dumps(plan.below("net").to_dict()))["unread"] == ["net.blocks.2"]
    apply_(model, plan)
    with observe(model, plan, X) as seen:
        model(X).square().mean().backward()
    assert seen.identity is not None
    assert seen.identity.ok
    assert {g.status for g in seen.gradients.gates.values()} == {"alive"}
    assert torch.equal(model.blocks[2].residual.weight, before)


def test_one_block_whose_sum_nobody_reads_is_no_residual_network() -> None:
    with pytest.raises(NoBranchError, match=r"but blocks\.0, from which no output of the network is computed"):
        make_plan(WaveNet(1), X)


class Kept(nn.Module):
    """What a plain object holds is an output too."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.net, self.last = stack(Plain), last

    def forward(self, x: Tensor) -> object:
        result = type("Result", (), {})()
        result.sum = self.net(x)
        return (x.mean(), result) if self.last else result


@pytest.mark.parametrize("last", [True, False])
def test_a_sum_that_an_object_holds_is_read(last: bool) -> None:
    assert make_plan(Kept(last), X).unread == ()


class Experts(nn.Module):
    """One of several experts runs; the head is tied to what runs, and another part waits for later."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Plain() for _ in range(4))
        self.tied, self.later, self.free = nn.Linear(WIDTH, WIDTH, bias=False), nn.Sequential(mlp()), nn.Dropout()
        self.tied.weight = self.experts[1].f[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[1](x)


def test_modules_that_did_not_run_are_named_by_the_outermost_of_them() -> None:
    plan = make_plan(Experts(), X)
    assert plan.idle == ("experts.0", "experts.2", "experts.3", "later")
    assert "did not run" in str(plan)
    assert plan.below("net").idle[0] == "net.experts.0"
    assert make_plan(stack(Plain), X).idle == ()


class Context(nn.Module):
    """A block over zeros without biases: its branch is zero for every batch, and learns through its biases."""

    def __init__(self) -> None:
        super().__init__()
        self.context, self.body = Plain(), Plain()
        for layer in (self.context.f[0], self.context.f[2]):
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        context = self.context(torch.zeros_like(x))
        return x + self.body.f(x + context)


@pytest.mark.parametrize("scheme", ["auto", "insert", "last_layer"])
def test_a_branch_over_zeros_gets_no_second_zero(scheme: str) -> None:
    model = Context()
    plan = make_plan(model, X, scheme=scheme)
    (context, body) = plan.branches
    assert (context.action, context.gates) == ("already_closed", ())
    assert body.gates
    assert "a second zero would keep it so for good" in str(plan)
    apply_(model, plan)
    assert check_identity(model, plan, X).ok
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (model(X) - X.flip(0)).square().mean().backward()
        optimizer.step()
    assert model.context(torch.zeros_like(X)).abs().max() > 0
