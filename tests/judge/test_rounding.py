"""What rounding leaves is no gradient, and what is merely small is one."""

import pytest
import torch
from marks import line_of
from networks import WIDTH, Scaled, mlp, stack
from test_trial import Loop, zero_head
from torch import Tensor, nn


class Before(Scaled):
    """Closed by its last layer, which multiplies what is nothing but rounding: a sum of probabilities less one."""

    def forward(self, x: Tensor) -> Tensor:
        v = self.f[0](x).softmax(-1).sum(-1, keepdim=True) - 1.0  # it cancels before
        return x + self.f[2](v * x)


class Behind(Scaled):
    """Such a sum behind the gate."""

    def forward(self, x: Tensor) -> Tensor:
        v = self.scale * self.f(x)
        return x + (v.softmax(-1).sum(-1, keepdim=True) - 1.0) * x  # it cancels behind


class Small(Scaled):
    """A healthy branch with a small constant factor."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-7 * self.scale * self.f(x)


class Difference(Scaled):
    """Two nearly equal halves, whose difference is small and no rounding."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * (self.f(x * 1.0001) - self.f(x))


def closed(build: type[Scaled]) -> Scaled:
    torch.manual_seed(0)
    block = build(value=0.0)
    if build is Before:
        block.f = mlp()
        nn.init.zeros_(block.f[2].weight)
        nn.init.zeros_(block.f[2].bias)
    return block


@pytest.mark.parametrize("build", [Before, Behind])
@pytest.mark.parametrize("head", [True, False], ids=["zero head", "any head"])
def test_rounding_wakes_no_gate_and_ends_in_its_line(build: type[Scaled], head: bool) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), closed(build), nn.Linear(WIDTH, 2))
    loop = Loop(zero_head(net) if head else net, scheme="observe")
    said = []
    for seed in range(8):
        said += loop.step(torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed)))
    (finding,) = said
    assert finding.about == "gradient"
    assert line_of(__file__, f"it cancels {build.__name__.lower()}") in finding.message


@pytest.mark.parametrize("build", [Small, Difference])
@pytest.mark.parametrize("head", [True, False], ids=["zero head", "any head"])
def test_a_small_gradient_ends_alive(build: type[Scaled], head: bool) -> None:
    net = stack(lambda: build(value=0.0))
    loop = Loop(zero_head(net) if head else net, scheme="observe")
    said = [f.message for _ in range(8) for f in loop.step()]
    assert [text for text in said if "slow start" not in text] == []
    assert {g.status for g in loop.trial.gradients.gates.values()} == {"alive"}
    assert loop.phases == ["AWAKE"] * 4


class Lost(Scaled):
    """A gradient so small that the optimizer's step is below every number."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-20 * (1e-20 * self.scale) * self.f(x)


def test_no_optimizer_is_blamed_for_a_step_that_no_number_holds() -> None:
    loop = Loop(stack(lambda: Lost(value=0.0)), scheme="observe", lr=1e-6)
    said = [f.message for _ in range(6) for f in loop.step()]
    assert loop.net[0].scale.grad.abs() > 0.0
    assert loop.net[0].scale == 0.0
    assert [text for text in said if "has not moved" in text] == []


class Tiny(Scaled):
    """A branch so small that its gradient is that of rounding, on whose way nothing rounds an error away."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * (1e-9 * self.f(x))


def test_where_nothing_cancels_a_small_gradient_wakes_its_gate_at_once() -> None:
    loop = Loop(zero_head(stack(lambda: Tiny(value=0.0))), scheme="observe")
    loop.step()
    assert {g.status for g in loop.trial.gradients.gates.values() if g.role == "gate"} == {"asleep"}
    loop.step()
    assert {g.status for g in loop.trial.gradients.gates.values()} == {"alive"}
