"""Folding an inserted gate into the weights before it."""

import torch
from networks import WIDTH
from torch import Tensor, nn

from lit_resinit import apply_, fold_, make_plan

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class GatedWithBias(nn.Module):
    """A product of two values of data, and a bias added after it: the bias takes the gate's value too."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.open = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.value(x) * torch.sigmoid(self.open(x)) + self.bias


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = GatedWithBias()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


def test_a_bias_after_a_product_of_data_is_folded_too() -> None:
    model = nn.Sequential(Block(), nn.Linear(WIDTH, 2))
    plan = make_plan(model, X)
    assert plan.gates[0].folds_into == ("0.f.value.weight", "0.f.value.bias", "0.f.bias")
    apply_(model, plan)
    with torch.no_grad():
        model[0].f.residual_gate.fill_(0.7)
        opened = model(X)
        assert fold_(model) == ["0.f.residual_gate"]
        assert torch.allclose(model(X), opened, atol=1e-6)
