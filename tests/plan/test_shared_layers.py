"""One layer makes the shifts and factors of several branches: no branch gets two zeros in series."""

import pytest
import torch
from networks import WIDTH, mlp
from torch import Tensor, nn

from lit_resinit import apply_, check_identity, make_plan, observe
from lit_resinit.plan.values import Scheme

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Modulated(nn.Module):
    """``x + g * first(norm(x) * (1 + b) + a)``, and an MLP alike; one layer makes all six from the condition."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.first, self.second = first, mlp()
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        a, b, g, d, e, h = self.ada(condition).chunk(6, -1)
        x = x + g * self.first(self.norm(x) * (1 + b) + a)
        return x + h * self.second(self.norm(x) * (1 + e) + d)


class ConditionedOnItself(nn.Module):
    """The condition is computed from the value with which the stream starts."""

    def __init__(self, first: type[nn.Module]) -> None:
        super().__init__()
        self.condition, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Modulated(first()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        condition = self.condition(x)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x)


class Rolled(nn.Module):
    """Mixes, and learns nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, -1)


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


def all_alive(model: nn.Module, scheme: Scheme) -> list[tuple[str, str]]:
    """The branches with their gates, once the network is closed and each gate has a gradient."""
    plan = make_plan(model, X, scheme=scheme)
    apply_(model, plan)
    with observe(model, plan, X) as seen:
        model(X).square().mean().backward()
    assert check_identity(model, plan, X).ok
    assert {seen.gradients.gates[g.parameter].status for g in plan.gates} == {"alive"}
    return [(b.name, g.parameter) for b in plan.branches for g in b.gates]


def test_the_factor_of_the_branchs_own_is_closed_and_not_the_layer_that_makes_all() -> None:
    torch.manual_seed(0)
    gates = all_alive(ConditionedOnItself(Layer), "last_layer")
    assert gates[:2] == [("blocks.0.first", "blocks.0.first.weight"), ("blocks.0.second", "blocks.0.second.2.weight")]


@pytest.mark.parametrize("scheme", ["auto", "last_layer"])
def test_a_branch_that_another_ones_gate_closes_gets_no_gate_of_its_own(scheme: Scheme) -> None:
    torch.manual_seed(0)
    gates = dict(all_alive(ConditionedOnItself(Rolled), scheme))
    assert gates["blocks.0.ada"] == gates["blocks.0.second"] == "blocks.0.ada.1.weight"
    assert gates["blocks.1"].startswith("blocks.1.second")
