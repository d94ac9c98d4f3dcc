"""Folding an inserted gate into the weights before it."""

import pytest
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


class Halves(nn.Module):
    """``a * sigmoid(b)`` of the two halves of one layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value, opening = self.both(x).chunk(2, -1)
        return value * opening.sigmoid()


class Fused(Halves):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.glu(self.both(x))


class Largest(nn.Module):
    """The largest of three neighbours, which is another one when the gate is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.max_pool1d(self.layer(x)[None], 3, 1, 1)[0]


class LargestOfAll(Largest):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).amax(-1, keepdim=True)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.opening = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.value(x) * nn.functional.silu(self.opening(x))


class Around(nn.Module):
    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


@pytest.mark.parametrize("build", [Halves, Fused, Largest, LargestOfAll, TwoLayers])
@pytest.mark.parametrize("opened", [0.7, -0.7])
def test_whatever_folds_computes_the_same(build: type[nn.Module], opened: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Around(build()), nn.Linear(WIDTH, 2))
    plan = make_plan(model, X)
    apply_(model, plan)
    (gate,) = plan.gates
    with torch.no_grad():
        model.get_parameter(gate.parameter).fill_(opened)
    before = model(X)
    if gate.module:  # a last layer has nothing to fold
        assert gate.folds_into
        fold_(model)
    torch.testing.assert_close(model(X), before)


@pytest.mark.parametrize("build", [Halves, Fused])
def test_a_scalar_behind_a_product_of_one_layer_with_itself_folds_into_nothing(build: type[nn.Module]) -> None:
    """A multiple of the layer is no multiple of the product; where there is a choice, the layer itself is closed."""
    model = nn.Sequential(Around(build()), nn.Linear(WIDTH, 2))
    assert [g.folds_into for g in make_plan(model, X, scheme="insert").gates] == [()]
    assert [b.action for b in make_plan(model, X).branches] == ["last_layer"]


class WrittenNorm(Largest):
    """A norm without weights, written out: no multiple of the layer before it changes its output."""

    def forward(self, x: Tensor) -> Tensor:
        v = self.layer(x)
        return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)


class Divided(Largest):
    def forward(self, x: Tensor) -> Tensor:
        v = self.layer(x)
        return v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt()


class Power(Largest):
    def forward(self, x: Tensor) -> Tensor:
        v = self.layer(x)
        return v * (v.square().mean(-1, keepdim=True) + 1e-6).pow(-0.5)


@pytest.mark.parametrize("build", [WrittenNorm, Divided, Power])
@pytest.mark.parametrize("scheme", ["auto", "insert"])
def test_a_scalar_behind_a_norm_stays_a_scalar(build: type[nn.Module], scheme: str) -> None:
    """A zero layer before it would have a gradient a thousand times too large."""
    plan = make_plan(nn.Sequential(Around(build()), nn.Linear(WIDTH, 2)), X, scheme=scheme)
    assert [(b.action, g.parameter, g.folds_into) for b in plan.branches for g in b.gates] == [
        ("insert", "0.f.residual_gate", ())
    ]
