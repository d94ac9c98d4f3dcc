"""Values times the number zero, which keep parameters in use, and states that start at zero: they add nothing."""

import pytest
import torch
from networks import WIDTH, mlp
from torch import Tensor, nn

from lit_resinit import apply_, check_identity, make_plan, observe

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Two(nn.Module):
    """Two residual blocks, a layer that must not matter, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g, self.unused, self.head = mlp(), mlp(), nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)
        self.wide = nn.Linear(WIDTH, WIDTH)


class InStream(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        x = x + 0.0 * self.unused(x).sum()
        return self.head(x + self.g(x))


class AmongOutputs(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        early = self.unused(x)
        return self.head(x + self.g(x)) + 0 * early


class InBranch(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = x + (self.f(x) + 0 * self.wide(x))
        return self.head(x + self.g(x))


class OfParameters(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x) + 0.0 * sum(p.sum() for p in self.unused.parameters())
        return self.head(x + self.g(x))


class Velocity(Two):
    """``v = 0.9 v + 0.1 f(x); x = x + v`` from a velocity of zero."""

    def forward(self, x: Tensor) -> Tensor:
        v = torch.zeros_like(x)
        for f in (self.f, self.g):
            v = 0.9 * v + 0.1 * f(x)
            x = x + v
        return self.head(x)


@pytest.mark.parametrize("build", [InStream, AmongOutputs, InBranch, OfParameters, Velocity])
def test_the_two_blocks_are_closed_and_alive(build: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = build()
    plan = make_plan(model, X)
    assert len(plan) == 2
    assert {g.parameter for g in plan.gates} == {"f.residual_gate", "g.residual_gate"}
    apply_(model, plan)
    assert check_identity(model, plan, X).ok
    with observe(model, plan, X) as seen:
        model(X).square().mean().backward()
    assert {g.status for g in seen.gradients.gates.values()} == {"alive"}
