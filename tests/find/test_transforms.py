"""Branches that work in another basis: Fourier transforms, complex weights, sums along an axis."""

from collections.abc import Callable

import pytest
import torch
from networks import WIDTH
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lit_resinit import ResidualPlan, apply_, attribute, check_identity, make_plan, observe
from lit_resinit.errors import TrainedWeightsError
from lit_resinit.watch.gates import gate_statistics

FREQUENCIES = WIDTH // 2 + 1
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Filtered(nn.Module):
    """``x + F^-1(w * F(x))`` in two blocks; ``w`` is complex, or two real numbers for each."""

    def __init__(self, *, real: bool = False) -> None:
        super().__init__()
        values = [torch.randn(FREQUENCIES, 2) * 0.3 for _ in range(2)]
        self.filters = nn.ParameterList(v if real else torch.view_as_complex(v) for v in values)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for w in self.filters:
            w = w if w.is_complex() else torch.view_as_complex(w)
            x = x + torch.fft.irfft(torch.fft.rfft(x) * w, n=WIDTH)
        return self.head(x)


class InOneParameter(Filtered):
    """The filters of both blocks in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(2, FREQUENCIES, dtype=torch.cfloat))


class AllComplex(nn.Module):
    """Complex layers on a complex stream."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(torch.cfloat)
        for layer in self.layers:
            z = z + layer(z * z.abs())
        return self.head(z.abs())


class Summed(nn.Module):
    """A branch that is summed up along an axis, and one of which a triangle is left."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layers[0](x.relu()).cumsum(0)
        return self.head(x + self.layers[1](x.relu()).tril())


class ViewedInPlace(nn.Module):
    """Views that are taken in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x.relu())
            y.unsqueeze_(1).transpose_(1, 2).swapaxes_(1, 2).squeeze_(1)
            x = x + y
        return self.head(x)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "complex": Filtered,
    "two real numbers": lambda: Filtered(real=True),
    "one parameter": InOneParameter,
    "complex layers": AllComplex,
    "sums and triangles": Summed,
    "views in place": ViewedInPlace,
}


def closed(build: Callable[[], nn.Module]) -> tuple[nn.Module, ResidualPlan]:
    torch.manual_seed(0)
    model = build()
    plan = make_plan(model, X)
    return apply_(model, plan), plan


@pytest.mark.parametrize("name", NETWORKS)
def test_both_branches_are_closed_and_alive(name: str) -> None:
    model, plan = closed(NETWORKS[name])
    assert len(plan) == 2
    assert check_identity(model, plan, X).ok
    with observe(model, plan, X) as seen:
        model(X).square().mean().backward()
    assert {g.status for g in seen.gradients.gates.values()} == {"alive"}


def test_a_filter_is_a_layer_however_its_values_lie() -> None:
    model = Filtered()
    assert {g.kind for g in make_plan(model, X).gates} == {"layer"}
    apply_(model, make_plan(model, X))  # random values of a scale would look trained


def test_a_scale_without_a_transform_after_it_is_none() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.scale * torch.fft.fft(self.layer(x)).real

    model = nn.Sequential(Scaled(), nn.Linear(WIDTH, 2))
    assert [g.kind for g in make_plan(model, X).gates] == ["scale"]
    with pytest.raises(TrainedWeightsError, match="looks trained"):
        apply_(model, make_plan(model, X))


def test_a_complex_gate_has_the_numbers_of_its_two_real_ones() -> None:
    found, paths, labels = [], [], torch.tensor([0, 1, 0, 1])
    for real in (False, True):
        model, plan = closed(lambda real=real: Filtered(real=real))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            cross_entropy(model(X), labels).backward()
            optimizer.step()
        found.append(gate_statistics(model, plan))
        path = attribute(model, plan, [X], lambda module, batch: cross_entropy(module(batch), labels))
        paths.append(torch.tensor(list(path.values())))
    assert found[0][1].gt(0).all()
    torch.testing.assert_close(found[0], found[1])
    assert paths[0].abs().gt(0).all()
    torch.testing.assert_close(*paths)
