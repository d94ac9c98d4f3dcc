"""A sum of what was stacked is an addition of its operands, along whichever dimension."""

import pytest
import torch
from networks import WIDTH, mlp
from torch import Tensor, nn

from lit_resinit import apply_, check_identity, make_plan, observe

X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))


class Stacked(nn.Module):
    def __init__(self, dim: int, first: bool) -> None:
        super().__init__()
        self.f, self.dim, self.first = mlp(), dim, first

    def forward(self, x: Tensor) -> Tensor:
        parts = [x, self.f(x)] if self.first else [self.f(x), x]
        return torch.stack(parts, self.dim).sum(self.dim)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_sum_of_a_stack_is_closed_compared_and_judged(dim: int, first: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Stacked(dim, first), Stacked(dim, first), nn.Linear(WIDTH, 3))
    plan = make_plan(model, X)
    assert [b.name for b in plan.branches] == ["0", "1"]
    assert [b.status for b in check_identity(model, plan, X).branches] == ["open", "open"]
    apply_(model, plan)
    with observe(model, plan) as seen:
        model(X).square().mean().backward()
    assert seen.identity.ok
    assert {g.status for g in seen.gradients.gates.values()} == {"alive"}


class Pooled(nn.Module):
    """Autograd keeps a copy of what the function in place overwrites; that copy reads nothing for the network."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.first, self.second, self.skip = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.silu(self.first(x), inplace=self.in_place)
        return (self.skip(x) + self.second(h)).mean(0)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_function_in_place_changes_no_plan(in_place: bool) -> None:
    plan = make_plan(Pooled(in_place), X)
    assert [(b.name, b.skip) for b in plan.branches] == [("(root)", "projection")]


def test_a_stack_inline_takes_a_scalar_as_a_plain_sum_does() -> None:
    class Inline(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(torch.stack([x, self.f(x)]).sum(0))
            return out

    assert [g.parameter for g in make_plan(Inline(), X).gates] == ["f.residual_gate"]
