"""A branch that is zero whatever the reason gets no second zero."""

import pytest
import torch
from networks import WIDTH
from torch import Tensor, nn
from torch.nn import functional

from lit_resinit import apply_, check_identity, make_plan, observe


class Ternary(nn.Module):
    """A branch that ends in a weight which is quantised with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.zeros_(self.outer.weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.outer.weight
        size = weight.abs().mean().clamp(min=1e-5)
        rounded = (weight / size).round().clamp(-1, 1) * size
        return x + functional.linear(functional.gelu(self.inner(x)), weight + (rounded - weight).detach())


class Turned(nn.Module):
    """``x + cross(head(x), x)`` with a zero head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        for parameter in self.head[2].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.linalg.cross(self.head(x), x, dim=-1)


@pytest.mark.parametrize(("block", "width", "gate"), [(Ternary, WIDTH, "outer.weight"), (Turned, 3, "head.2.weight")])
def test_a_branch_that_arrives_closed_is_left_as_it_is(block: type[nn.Module], width: int, gate: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(block(), block()), torch.randn(16, width)
    plan = make_plan(model, x)
    assert [(b.action, b.gates[0].parameter) for b in plan.branches] == [
        ("already_closed", f"0.{gate}"),
        ("already_closed", f"1.{gate}"),
    ]
    apply_(model, plan)
    assert check_identity(model, plan, x).ok
    with observe(model, plan, x) as seen:
        functional.mse_loss(model(x), torch.randn(16, width)).backward()
    assert {seen.gradients.gates[f"{i}.{gate}"].status for i in (0, 1)} == {"alive"}


class ReadsWhatAttentionAdded(nn.Module):
    """Post-norm, with a feed-forward part that reads what attention added."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ff = (nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) for _ in range(2))
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attn(x)
        x = self.norm1(x + y)
        return self.norm2(x + self.ff(y))


def test_a_value_that_another_closed_branch_reads_may_be_closed() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), ReadsWhatAttentionAdded(), nn.Linear(WIDTH, 1)),
        torch.randn(8, WIDTH),
    )
    plan = make_plan(model, x)
    assert len(plan) == 2
    apply_(model, plan)
    assert check_identity(model, plan, x).ok
    with observe(model, plan, x) as seen:
        functional.mse_loss(model(x), torch.randn(8, 1)).backward()
    assert {g.status for g in seen.gradients.gates.values()} == {"alive"}
