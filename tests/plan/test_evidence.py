"""What counts as a sign that a block was trained already."""

import copy
from collections.abc import Callable

import pytest
import torch
from networks import (
    WIDTH,
    ConvBlock,
    NormLast,
    PreNorm,
    RootMeanSquare,
    Scaled,
    mlp,
    stack,
)
from torch import Tensor, nn

from lit_resinit import (
    TrainedWeightsError,
    apply_,
    check_identity,
    make_plan,
)

X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))


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


def trained(build: Callable[[], nn.Module], name: str) -> nn.Module:
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        parameter = model.get_parameter(name)
        parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
    return model


@pytest.mark.parametrize(
    ("build", "name", "scheme"),
    [
        *((lambda: stack(NormLast), "0.norm.weight", scheme) for scheme in ("auto", "insert", "last_layer")),
        *((lambda: stack(NormLast), "0.norm.bias", scheme) for scheme in ("auto", "insert", "last_layer")),
        *((lambda: stack(PreNorm), "1.norm.weight", scheme) for scheme in ("auto", "insert", "last_layer")),
        *((lambda: stack(lambda: Scaled(size=WIDTH)), "1.scale", scheme) for scheme in ("auto", "zero")),
    ],
)
def test_trained_block_is_refused_whichever_way_it_would_be_closed(
    build: Callable[[], nn.Module], name: str, scheme: str
) -> None:
    model = trained(build, name)
    plan = make_plan(model, X, scheme=scheme)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TrainedWeightsError, match=name.rpartition(".")[0]):
        apply_(model, plan)
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert check_identity(apply_(model, plan, overwrite_trained=True), plan, X).ok


def scalars(*values: float) -> nn.Sequential:
    return nn.Sequential(*(Scaled(value=v) for v in values))


def test_scalars_that_differ_from_block_to_block_are_trained() -> None:
    model = scalars(0.31, 0.28, 0.55)
    with pytest.raises(TrainedWeightsError, match=r"0\.scale with value 0\.31, another in every block and 2 more"):
        apply_(model, make_plan(model, X))
    assert [round(b.scale.item(), 2) for b in model] == [0.31, 0.28, 0.55]


@pytest.mark.parametrize(
    "values",
    [(0.5, 0.5, 0.5), (1.0, 0.7, 0.6, 0.5), (0.3,), (1.0, 0.7), (0.7, 1.0, 0.7), (0.123, 0.456, 0.456, 0.123)],
)
def test_scalars_that_somebody_wrote_are_an_initialisation(values: tuple[float, ...]) -> None:
    model = scalars(*values)
    apply_(model, make_plan(model, X))
    assert not any(b.scale.item() for b in model)


def test_include_picks_the_new_branches_of_a_trained_network() -> None:
    model = trained(lambda: stack(NormLast), "0.norm.weight")
    plan = make_plan(model, X, include="1")
    assert check_identity(apply_(model, plan), plan, X).ok


def test_a_warm_up_forward_is_no_evidence_of_training() -> None:
    model = nn.Sequential(ConvBlock(3, 3), ConvBlock(3, 3))
    x = torch.randn(4, 3, 5, 5)
    for _ in range(3):
        model(x)
    plan = make_plan(model, x)
    assert check_identity(apply_(model, plan), plan, x).ok


def test_norms_that_start_at_another_constant_are_no_evidence() -> None:
    model = stack(NormLast)
    nn.init.constant_(model[0].norm.weight, 0.1)
    assert len(apply_(model, make_plan(model, X))) == 3
