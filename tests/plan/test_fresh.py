"""Whether networks without norms and scales are new or trained: the values of their last layers."""

import warnings
from collections.abc import Callable

import pytest
import torch
from networks import Plain, mlp, stack
from torch import Tensor, nn

from lit_resinit import ResInitWarning, TrainedWeightsError, apply_, make_plan
from lit_resinit.plan.fresh import Layer, Look, last_layers, look_of

INITIALISATIONS: dict[str, Callable[[Tensor], object]] = {
    "torch's own": lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
    "uniform": nn.init.xavier_uniform_,
    "normal": nn.init.xavier_normal_,
    "small": lambda w: nn.init.normal_(w, std=0.02),
    "truncated": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "orthogonal": nn.init.orthogonal_,
    "identity": nn.init.eye_,
    "near the bound": lambda w: nn.init.normal_(w, std=0.65 * w.shape[1] ** -0.5),
}
SHAPES = [(8, 8), (16, 64), (64, 16), (128, 128), (3, 100), (64, 14)]


def layers(fill: Callable[[Tensor], object], shape: tuple[int, int], bias: str) -> list[Layer]:
    found = []
    for i in range(4):
        layer = nn.Linear(shape[1], shape[0], bias=bias != "none")
        fill(layer.weight)
        if bias == "zero":
            nn.init.zeros_(layer.bias)
        found.append(Layer(str(i), layer.weight, layer.bias))
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", INITIALISATIONS)
@pytest.mark.parametrize("bias", ["torch's own", "zero", "none"])
def test_no_initialisation_looks_trained(name: str, shape: tuple[int, int], bias: str) -> None:
    torch.manual_seed(1)
    look, _ = look_of(layers(INITIALISATIONS[name], shape, bias))
    few = 4 * shape[0] * shape[1] < 1000
    known = bias != "none" or name in ("torch's own", "uniform") or few
    assert look is (Look.FRESH if known else Look.UNKNOWN)


def fit(optimizer: Callable[..., torch.optim.Optimizer], rate: float) -> nn.Module:
    """Tell directions apart, which takes a hundred steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), *(Plain(128) for _ in range(4)), nn.Linear(128, 10))
    running = optimizer(model.parameters(), lr=rate)
    directions = torch.randn(10, 64)
    for _ in range(100):
        classes = torch.randint(10, (64,))
        running.zero_grad()
        nn.functional.cross_entropy(model(directions[classes] + torch.randn(64, 64)), classes).backward()
        running.step()
    return model


@pytest.mark.parametrize(("optimizer", "rate"), [(torch.optim.SGD, 0.1), (torch.optim.Adam, 1e-2)])
def test_a_trained_network_without_norms_is_refused_and_keeps_every_bit(
    optimizer: Callable[..., torch.optim.Optimizer], rate: float
) -> None:
    model = fit(optimizer, rate)
    before = [p.clone() for p in model.parameters()]
    plan = make_plan(model, torch.randn(4, 64))
    with pytest.raises(TrainedWeightsError, match="without norms and scales") as found:
        apply_(model, plan)
    assert found.value.report == {f"{i}.f.2.weight": str(i) for i in range(1, 5)}
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    apply_(model, plan, overwrite_trained=True)


def test_where_nothing_tells_there_is_one_warning() -> None:
    model = nn.Sequential(Plain(32), Plain(32))
    for block in model:
        nn.init.normal_(block.f[2].weight, std=0.02)
        block.f[2].bias = None
    plan = make_plan(model, torch.randn(4, 32))
    with pytest.warns(ResInitWarning, match="nothing in them tells") as found:
        apply_(model, plan)
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_(stack(Plain), make_plan(stack(Plain), torch.randn(4, 8)))


def test_layers_are_found_among_the_names_of_gates() -> None:
    parameters = dict(mlp().named_parameters())
    found = last_layers([("2.weight", "2.bias"), ("2.weight",), (), ("gone",), ("0.bias",)], parameters)
    assert [(layer.name, layer.bias is parameters["2.bias"]) for layer in found] == [("2.weight", True)]


def test_weights_that_are_zero_or_not_finite_say_nothing() -> None:
    zero, infinite = torch.zeros(4, 4), torch.full((4, 4), torch.inf)
    assert look_of([Layer("zero", zero, None)])[0] is Look.FRESH
    assert look_of([Layer("infinite", infinite, None)])[0] is Look.FRESH
    assert look_of([])[0] is Look.FRESH
