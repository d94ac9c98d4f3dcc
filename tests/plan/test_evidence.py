"""What counts as a sign that a block was trained already."""

import copy
from collections.abc import Callable

import pytest
import torch
from networks import WIDTH, PreNorm, RootMeanSquare, mlp
from torch import Tensor, nn

from lit_resinit import TrainedWeightsError, apply_, make_plan

X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))


# -------------------------------------------------------------------- evidence of training


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.f = norm, mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.norm(x))


@pytest.mark.parametrize("norm", [lambda: nn.RMSNorm(WIDTH), RootMeanSquare, lambda: nn.LayerNorm(WIDTH)])
@pytest.mark.parametrize("inline", [False, True])
def test_any_trained_norm_is_evidence(norm: Callable[[], nn.Module], inline: bool) -> None:
    torch.manual_seed(0)
    model = Normed(norm()) if inline else nn.Sequential(Normed(norm()), Normed(norm()))
    make_plan(model, X)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Normed):
                module.norm.weight.add_(0.1 * torch.randn(WIDTH))
    plan = make_plan(model, X)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TrainedWeightsError, match=r"norm\.weight"):
        apply_(model, plan)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_a_network_fed_by_noise_does_not_look_trained() -> None:
    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.Sequential(PreNorm(), PreNorm())

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(self.stem(torch.randn(len(x), WIDTH)))

    model, x = Generator(), torch.randn(4, WIDTH)
    plan = make_plan(model, x)
    assert len(plan) == 2
    apply_(model, plan)
