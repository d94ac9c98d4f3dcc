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
