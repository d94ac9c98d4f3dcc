"""Precision, accumulation, clipping, manual optimisation, and optimizers of every temper."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from networks import WIDTH, Classifier, Plain, PreNorm, Scaled, data, stack, trainer
from torch import Tensor, nn

from lit_resinit import GateOptimizerError, GradientError, ResidualInit, ResInitWarning, param_groups


class Using(Classifier):
    """Steps with the optimizer that it is given."""

    def __init__(self, net: nn.Module, build: Any) -> None:
        super().__init__(net)
        self.build = build

    def configure_optimizers(self) -> Any:
        return self.build(self)


def sgd(module: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr)


def our_warnings(run: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if issubclass(w.category, ResInitWarning)]


def moved(module: pl.LightningModule, ours: ResidualInit) -> bool:
    return all(bool(module.get_parameter(g.parameter).detach().any()) for g in ours.plan.gates)


# -------------------------------------------------------------------- precision


@pytest.mark.parametrize("block", [Plain, Scaled], ids=["insert", "zero"])
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true", "16-true"])
def test_every_precision_starts_closed_and_learns(precision: str, block: Any, tmp_path: Path) -> None:
    module, ours = Classifier(stack(block), lr=0.1), ResidualInit()
    trainer(tmp_path, ours, precision=precision).fit(module, data(WIDTH))
    assert ours.identity_report.ok
    assert {g.status for g in ours.gradient_report.gates.values()} == {"alive"}
    assert moved(module, ours)
    dtype = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}.get(precision)
    assert {p.dtype for p in module.parameters()} == {dtype or torch.float32}
    assert ours.history.var_stream.dtype == torch.float32


class Overflowing(torch.amp.GradScaler):
    """Starts so high that its first steps overflow, or all of them."""

    def __init__(self, backoff: float) -> None:
        super().__init__("cpu", init_scale=2.0**100, backoff_factor=backoff)


def scaled(backoff: float) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", Overflowing(backoff))


def test_a_scaler_that_overflows_at_first_is_waited_for(tmp_path: Path) -> None:
    reports: list[Any] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            reports.append(ours.gradient_report)

    module, ours = Classifier(stack(Scaled)), ResidualInit()
    plugin = scaled(2.0**-20)
    trainer(tmp_path, ours, Look(), plugins=[plugin], max_steps=8, max_epochs=-1).fit(module, data(WIDTH))
    assert reports[0] is None
    assert ours.identity_report.ok
    assert ours.gradient_report.ok
    assert moved(module, ours)


def test_waiting_for_a_scaler_is_bounded(tmp_path: Path) -> None:
    module, ours = Classifier(stack(Scaled)), ResidualInit()
    runner = trainer(tmp_path, ours, plugins=[scaled(1.0 - 1e-9)], max_steps=100, max_epochs=-1)
    with pytest.raises(GradientError, match="nonfinite"):
        runner.fit(module, data(WIDTH))
    assert 40 <= runner.global_step <= 60


# -------------------------------------------------------------------- accumulation, clipping, no step


def test_accumulated_batches_are_one_record_with_unclipped_gradients(tmp_path: Path) -> None:
    module, ours = Classifier(stack(Scaled)), ResidualInit()
    seen: list[list[float]] = []

    class Clipped(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen.append([abs(float(pl_module.get_parameter(g.parameter).grad)) for g in ours.plan.gates])

    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 1e-4, "max_steps": 2, "max_epochs": -1}
    trainer(tmp_path, ours, Clipped(), **options).fit(module, data(WIDTH))
    assert ours.history.steps.tolist() == [0, 1]
    assert ours.history.gate_grad.flatten().tolist() == pytest.approx([g for row in seen for g in row])
    assert max(max(row) for row in seen) > 1e-4


def test_steps_that_return_none_are_no_verdict(tmp_path: Path) -> None:
    class Skips(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx < 2 else loss

    module, ours = Skips(stack(Scaled)), ResidualInit()
    trainer(tmp_path, ours).fit(module, data(WIDTH))
    assert ours.identity_report.ok
    assert ours.gradient_report.ok
    assert moved(module, ours)


class Warmup(Classifier):
    """The learning rate is zero for the first five steps, behind a zero head."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step < 5 else 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_warmup_from_zero_uses_no_patience(tmp_path: Path) -> None:
    net = stack(Scaled)
    nn.init.zeros_(net[-1].weight)
    module, ours = Warmup(net, lr=0.1), ResidualInit(patience=2)
    trainer(tmp_path, ours, max_steps=9, max_epochs=-1).fit(module, data(WIDTH))
    assert {g.status for g in ours.gradient_report.gates.values()} == {"alive"}
    assert moved(module, ours)


# -------------------------------------------------------------------- manual optimisation


class Manual(Classifier):
    """Two optimizers by hand: the head's first, then the blocks'."""

    def __init__(self, net: nn.Module, raw: bool) -> None:
        super().__init__(net)
        self.automatic_optimization = False
        self.raw = raw

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward() if self.raw else self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        head, blocks = self.net[-1], self.net[:-1]
        return [torch.optim.SGD(head.parameters(), lr=0.1), torch.optim.SGD(blocks.parameters(), lr=0.1)]


@pytest.mark.parametrize("raw", [False, True], ids=["manual_backward", "backward"])
@pytest.mark.parametrize("block", [Plain, Scaled], ids=["insert", "zero"])
def test_two_optimizers_by_hand(block: Any, raw: bool, tmp_path: Path) -> None:
    module, ours = Manual(stack(block), raw), ResidualInit()
    trainer(tmp_path, ours, max_steps=6, max_epochs=-1).fit(module, data(WIDTH))
    assert ours.identity_report.ok
    assert {g.status for g in ours.gradient_report.gates.values()} == {"alive"}
    assert moved(module, ours)
    assert len(ours.history) == 3
    assert set(ours.history.variance_ratio[0].tolist()) == {0.0}


@pytest.mark.parametrize("raw", [False, True], ids=["manual_backward", "backward"])
def test_a_dead_gate_is_found_by_hand_too(raw: bool, tmp_path: Path) -> None:
    class Shut(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.relu(self.scale * self.f(x))

    module = Manual(stack(lambda: Shut(value=0.0)), raw)
    with pytest.raises(GradientError, match=r"net\.0\.scale"):
        trainer(tmp_path, ResidualInit(scheme="observe")).fit(module, data(WIDTH))


# -------------------------------------------------------------------- optimizers


def test_lbfgs_runs_its_closure_several_times(tmp_path: Path) -> None:
    module = Using(stack(Scaled), lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3))
    ours = ResidualInit()
    trainer(tmp_path, ours).fit(module, data(WIDTH))
    assert ours.identity_report.ok
    assert ours.gradient_report.ok
    assert ours.history.steps.tolist() == [0, 1, 2]
    assert moved(module, ours)


class Layerwise(torch.optim.Optimizer):
    """LARS: the step is scaled by the norm of the parameter, so that a zero tensor never moves."""

    def __init__(self, params: Iterator[nn.Parameter], lr: float = 0.1, adapt_zero: bool = False) -> None:
        super().__init__(params, {"lr": lr, "adapt_zero": adapt_zero})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad * p.norm() / (p.grad.norm() + 1e-12))
        return loss


def test_an_optimizer_that_cannot_leave_zero_is_told_once_by_name(tmp_path: Path) -> None:
    module = Using(stack(Scaled), lambda m: Layerwise(m.parameters()))
    ours = ResidualInit()
    run = trainer(tmp_path, ours, max_steps=9, max_epochs=-1)
    (message,) = our_warnings(lambda: run.fit(module, data(WIDTH)))
    for text in ("Layerwise", "net.0.scale", "param_groups"):
        assert text in message


def test_an_optimizer_that_moves_zeros_is_not_told_off(tmp_path: Path) -> None:
    for build in (sgd, lambda m: torch.optim.Adam(m.parameters()), lambda m: torch.optim.RMSprop(m.parameters())):
        module = Using(stack(Scaled), build)
        run = trainer(tmp_path, ResidualInit(), max_steps=9, max_epochs=-1)
        assert our_warnings(lambda run=run, module=module: run.fit(module, data(WIDTH))) == []


@pytest.mark.parametrize("block", [Plain, Scaled], ids=["insert", "zero"])
def test_gates_in_no_optimizer_stop_before_the_first_batch(block: Any, tmp_path: Path) -> None:
    batches: list[int] = []

    class Count(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            batches.append(1)

    module = Using(stack(block), lambda m: torch.optim.SGD(m.net[-1].parameters(), lr=0.1))
    with pytest.raises(GateOptimizerError, match=r"net\.0\."):
        trainer(tmp_path, ResidualInit(), Count()).fit(module, data(WIDTH))
    assert batches == []


def test_default_adamw_on_inserted_gates_is_told_once(tmp_path: Path) -> None:
    module = Using(stack(Plain, 4), lambda m: torch.optim.AdamW(m.parameters()))
    run = trainer(tmp_path, ResidualInit(), max_steps=6, max_epochs=-1)
    (message,) = our_warnings(lambda: run.fit(module, data(WIDTH)))
    assert "param_groups" in message
    assert "4 gates" in message


def test_decay_on_norm_gates_is_everyday_and_not_told(tmp_path: Path) -> None:
    class NormLast(PreNorm):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.f(x))

    module = Using(stack(NormLast), lambda m: torch.optim.AdamW(m.parameters()))
    run, ours = None, ResidualInit()
    run = trainer(tmp_path, ours)
    assert our_warnings(lambda: run.fit(module, data(WIDTH))) == []
    assert {g.kind for g in ours.plan.gates} == {"norm"}


def test_param_groups_end_the_warning(tmp_path: Path) -> None:
    ours = ResidualInit()
    module = Using(stack(Plain), lambda m: torch.optim.AdamW(param_groups(m, ours.plan, weight_decay=0.1)))
    run = trainer(tmp_path, ours)
    assert our_warnings(lambda: run.fit(module, data(WIDTH))) == []
