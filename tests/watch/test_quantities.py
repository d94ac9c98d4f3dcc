"""Every recorded quantity against numpy in float64: forward, backward and statistics written out by hand."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from networks import WIDTH, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_resinit import History, ResidualInit, make_plan
from lit_resinit.watch.history import QUANTITIES
from lit_resinit.watch.measure import Watcher
from lit_resinit.watch.moments import Moments

DEPTH, ON_RATIO = 4, 3e-6


class Tanh(nn.Module):
    """``x + scale * tanh(W x + b)``."""

    def __init__(self, size: int = 1, value: float = 1.0) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.full((size,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.layer(x))


class Regression(pl.LightningModule):
    """Remembers weights and batch before each step, in float64."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.net = nn.Sequential(*blocks, nn.Linear(WIDTH, 3))
        self.kept: list[dict[str, Any]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = (part.double().numpy() for part in batch)
        weights = [
            (
                b.scale.detach().double().numpy().copy(),
                *(p.detach().double().numpy().copy() for p in b.layer.parameters()),
            )
            for b in self.net[:-1]
        ]
        head = [p.detach().double().numpy().copy() for p in self.net[-1].parameters()]
        self.kept.append({"x": x, "y": y, "weights": weights, "head": head})
        return nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(48, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, 5.0 * torch.randn(48, 3, generator=generator)), batch_size=8)


def by_hand(kept: dict[str, Any]) -> dict[str, list[Any]]:
    """Stream, branch, gate and gate gradient of every block."""
    x, streams, branches, inner = kept["x"], [], [], []
    for scale, weight, bias in kept["weights"]:
        streams.append(x)
        inner.append(np.tanh(x @ weight.T + bias))
        branches.append(scale * inner[-1])
        x = x + branches[-1]
    weight, bias = kept["head"]
    out = x @ weight.T + bias
    slope = 2.0 * (out - kept["y"]) / out.size @ weight
    gradients = []
    for (scale, weight, _), u in zip(reversed(kept["weights"]), reversed(inner), strict=True):
        by_channel = (slope * u).sum(0)
        gradients.insert(0, by_channel if scale.size > 1 else by_channel.sum(keepdims=True))
        slope = slope + slope * scale * (1.0 - u**2) @ weight
    return {"streams": streams, "branches": branches, "gates": [w[0] for w in kept["weights"]], "gradients": gradients}


def wanted_rows(steps: list[list[dict[str, Any]]]) -> dict[str, np.ndarray]:
    """Every quantity, ``(records, branches)``; a step is a list of the batches that were accumulated."""
    rows: dict[str, list[list[float]]] = {q: [] for q in QUANTITIES}
    for step in steps:
        parts = [by_hand(kept) for kept in step]
        columns: dict[str, list[float]] = {q: [] for q in QUANTITIES}
        for i in range(len(parts[0]["gates"])):
            gate = parts[0]["gates"][i]
            gradient = np.mean([p["gradients"][i] for p in parts], axis=0)
            stream, branch = (np.concatenate([p[k][i].ravel() for p in parts]).var() for k in ("streams", "branches"))
            columns["gate"].append(float(gate[0]) if gate.size == 1 else np.sqrt((gate**2).mean()))
            columns["gate_max"].append(np.abs(gate).max())
            columns["gate_grad"].append(np.sqrt((gradient**2).mean()))
            columns["var_stream"].append(stream)
            columns["var_branch"].append(branch)
            columns["variance_ratio"].append(branch / stream)
            columns["saliency"].append((gate * gradient).sum())
        for quantity, values in columns.items():
            rows[quantity].append(values)
    return {q: np.array(values) for q, values in rows.items()}


def compare(history: History, wanted: dict[str, np.ndarray], rtol: float) -> None:
    for quantity in QUANTITIES:
        scale = np.abs(wanted[quantity]).max()
        found = getattr(history, quantity).numpy()
        np.testing.assert_allclose(found, wanted[quantity], rtol=rtol, atol=1e-6 * scale, err_msg=quantity)


def run(root: Path, blocks: list[nn.Module], **options: Any) -> tuple[Regression, History]:
    module, callback = Regression(blocks), ResidualInit(on_ratio=ON_RATIO)
    trainer(root, callback, **{"max_steps": 6, "max_epochs": -1} | options).fit(module, batches())
    return module, callback.history


@pytest.mark.parametrize("size", [1, WIDTH])
def test_all_quantities_are_those_of_numpy(size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, history = run(tmp_path, [Tanh(size) for _ in range(DEPTH)])
    wanted = wanted_rows([[kept] for kept in module.kept])
    assert history.steps.tolist() == list(range(6))
    compare(history, wanted, rtol=1e-4)
    on = {
        name: next((s for s in range(6) if wanted["variance_ratio"][s, i] >= ON_RATIO), None)
        for i, name in enumerate(history.branches)
    }
    assert history.switched_on() == on
    assert any(step for step in on.values())
    last = dict(zip(history.branches, wanted["variance_ratio"][-1], strict=True))
    assert history.order() == sorted((n for n in on if on[n] is not None), key=lambda n: (on[n], -last[n]))


def test_gradients_are_those_before_clipping(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, history = run(tmp_path, [Tanh() for _ in range(DEPTH)], gradient_clip_val=1e-3)
    compare(history, wanted_rows([[kept] for kept in module.kept]), rtol=1e-4)


def test_accumulated_batches_are_one_record(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, history = run(tmp_path, [Tanh() for _ in range(DEPTH)], accumulate_grad_batches=3)
    assert len(module.kept) == 18
    assert history.steps.tolist() == list(range(6))
    compare(history, wanted_rows([module.kept[i : i + 3] for i in range(0, 18, 3)]), rtol=1e-4)


def test_gradients_are_those_without_the_scaler(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12))
    module, history = run(tmp_path, [Tanh() for _ in range(DEPTH)], plugins=[plugin])
    wanted = wanted_rows([[kept] for kept in module.kept])
    for quantity in ("gate_grad", "saliency"):
        scale = np.abs(wanted[quantity]).max()
        np.testing.assert_allclose(getattr(history, quantity).numpy(), wanted[quantity], rtol=0.02, atol=0.005 * scale)


def test_a_shared_block_has_one_gate_and_moments_of_each_call(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shared = Tanh()
    module, history = run(tmp_path, [shared, Tanh(), shared])
    wanted = wanted_rows([[kept] for kept in module.kept])
    for quantity in ("gate_grad", "saliency"):  # its gradient is the sum over both calls
        del wanted[quantity]
    both = [np.abs(sum(by_hand(kept)["gradients"][i] for i in (0, 2))).item() for kept in module.kept]
    assert len(history.branches) == 3
    for quantity, values in wanted.items():
        found = getattr(history, quantity).numpy()
        np.testing.assert_allclose(found, values, rtol=1e-4, atol=1e-6 * values.max(), err_msg=quantity)
    assert torch.equal(history.gate[:, 0], history.gate[:, 2])
    assert not torch.equal(history.var_stream[:, 0], history.var_stream[:, 2])
    np.testing.assert_allclose(history.gate_grad[:, 0].numpy(), both, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [16, 4096])
def test_half_precision_of_three_hundred_is_finite_and_right(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (300.0 * torch.randn(rows, WIDTH, generator=generator).sign()).to(dtype)
    model = nn.Sequential(Tanh(value=300.0)).to(dtype)
    plan = make_plan(model, x, scheme="observe")
    with Watcher(model, plan) as watcher:
        model(x)
    moments = Moments(2)
    moments.update(*watcher.moments())
    with torch.no_grad():
        branch = model[0].scale * torch.tanh(model[0].layer(x))
    wanted = [part.double().numpy().var() for part in (x, branch)]
    assert wanted[0] > torch.finfo(torch.float16).max
    np.testing.assert_allclose(moments.compute().numpy(), wanted, rtol=1e-4)
