"""The numbers of gates that share one parameter."""

from pathlib import Path

import pytest
import torch
from networks import WIDTH, Classifier, data, trainer
from torch import Tensor, nn

from lit_resinit import ResidualInit, make_plan
from lit_resinit.watch.gates import gate_statistics


class Shared(nn.Module):
    """``x + alpha[i] * f_i(x)``: the scales of all blocks in one parameter."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(shape[0]))
        self.alpha = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x + self.alpha[i] * layer(x)
        return x


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, WIDTH)])
def test_each_branch_has_the_numbers_of_its_own_element(shape: tuple[int, ...]) -> None:
    model = Shared(shape)
    plan = make_plan(model, torch.randn(2, WIDTH))
    assert [(g.parameter, g.index) for g in plan.gates] == [("alpha", 0), ("alpha", 1), ("alpha", 2)]
    with torch.no_grad():
        model.alpha.copy_(torch.tensor([0.5, -2.0, 0.0]).view(3, *[1] * (len(shape) - 1)).expand(shape))
    model.alpha.grad = torch.full(shape, 3.0)
    size = model.alpha[0].numel()
    gate, largest, slope, saliency = gate_statistics(model, plan)
    assert gate.tolist() == ([0.5, -2.0, 0.0] if size == 1 else [0.5, 2.0, 0.0])
    assert largest.tolist() == [0.5, 2.0, 0.0]
    assert slope.tolist() == [3.0, 3.0, 3.0]
    assert saliency.tolist() == [1.5 * size, -6.0 * size, 0.0]


class Ends(nn.Module):
    """Keeps the end of the branch, with its error."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), last

    def forward(self, x: Tensor) -> Tensor:
        self.end = self.last(self.inner(x))
        if self.end.requires_grad and not isinstance(self.end, torch._subclasses.FakeTensor):
            self.end.retain_grad()
        return x + self.end


@pytest.mark.parametrize("last", [nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)])
def test_saliency_is_the_product_of_branch_and_error(last: nn.Module) -> None:
    torch.manual_seed(0)
    nn.init.normal_(last.weight)
    nn.init.normal_(last.bias)
    model, x = nn.Sequential(Ends(last), nn.Linear(WIDTH, 2)), torch.randn(6, WIDTH)
    plan = make_plan(model, x, scheme="last_layer" if isinstance(last, nn.Linear) else "auto")
    assert plan.branches[0].gates[0].biases == ("0.last.bias",)
    model(x).square().mean().backward()
    wanted = (model[0].end * model[0].end.grad).sum().item()
    assert abs(wanted) > 1e-3
    assert gate_statistics(model, plan)[3].item() == pytest.approx(wanted, rel=1e-4)


def test_a_bias_without_gradient_counts_only_where_it_is_zero() -> None:
    model, x = nn.Sequential(Ends(nn.LayerNorm(WIDTH)), nn.Linear(WIDTH, 2)), torch.randn(6, WIDTH)
    plan = make_plan(model, x)
    model[0].last.bias.requires_grad_(False)
    model(x).square().mean().backward()
    gate = model[0].last.weight
    assert gate_statistics(model, plan)[3].item() == pytest.approx((gate * gate.grad).sum().item(), rel=1e-4)
    model[0].last.bias.fill_(1.0)
    assert bool(gate_statistics(model, plan)[3].isnan())


def test_scales_in_one_parameter_are_recorded_in_a_run(tmp_path: Path) -> None:
    ours = ResidualInit(log_every_n_steps=1)
    module = Classifier(nn.Sequential(Shared((3,)), nn.Linear(WIDTH, 3)))
    trainer(tmp_path, ours).fit(module, data(WIDTH))
    assert ours.history.gate[0].tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(ours.history.gate_max[-1] > 0, torch.tensor([True] * 3))
