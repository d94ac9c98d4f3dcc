import gc
import json
import pickle
import re
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchvision
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from marks import line_of
from networks import (
    WIDTH,
    Classifier,
    ConvBlock,
    InPlace,
    NormLast,
    Plain,
    PreActivation,
    Scaled,
    data,
    encoder,
    mlp,
    stack,
    trainer,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

from lit_resinit import (
    GradientError,
    History,
    IdentityError,
    NoBranchError,
    ResidualInit,
    ResInitError,
    ResInitWarning,
    TraceError,
    TrainedWeightsError,
    apply_,
    make_plan,
    param_groups,
)

# -------------------------------------------------------------------- networks, untouched

ResNet, Vit = torchvision.models.resnet, torchvision.models.VisionTransformer


def small_vit() -> nn.Module:
    return Vit(image_size=16, patch_size=8, num_layers=2, num_heads=2, hidden_dim=WIDTH, mlp_dim=16, num_classes=2)


def preactivation_cnn(depth: int = 200) -> nn.Module:
    blocks = (PreActivation(4) for _ in range(depth))
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


IMAGE = (3, 16, 16)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, str]] = {
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=2), IMAGE, 8, "norm"),
    "resnet50": (lambda: torchvision.models.resnet50(num_classes=2), IMAGE, 16, "norm"),
    "convnext_tiny": (lambda: torchvision.models.convnext_tiny(num_classes=2), (3, 32, 32), 18, "scale"),
    "swin_t": (lambda: torchvision.models.swin_t(num_classes=2), (3, 32, 32), 24, "inserted"),
    "vision_transformer": (small_vit, IMAGE, 4, "inserted"),
    "encoder_norm_first": (encoder, (5, WIDTH), 4, "inserted"),
    "encoder_norm_last": (lambda: encoder(norm_first=False), (5, WIDTH), 4, "inserted"),
    "preactivation_cnn_200": (preactivation_cnn, (3, 8, 8), 200, "inserted"),
    "rezero_mlp_200": (lambda: stack(Scaled, 200), (WIDTH,), 200, "scale"),
    "plain_mlp_200": (lambda: stack(Plain, 200), (WIDTH,), 200, "inserted"),
    "in_place": (lambda: stack(InPlace), (WIDTH,), 2, "inserted"),
}


LARGE = {"swin_t", "convnext_tiny", "preactivation_cnn_200", "plain_mlp_200", "rezero_mlp_200"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in NETWORKS])
@pytest.mark.filterwarnings("ignore:the stream from:lit_resinit.ResInitWarning")  # post-norm and ReLU after the sum
def test_network_starts_closed_learns_and_is_watched(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)  # some drop layers at random, and a dropped one has no variance
    build, shape, count, kind = NETWORKS[name]
    module, ours = Classifier(build(), lr=1e-3), ResidualInit()
    trainer(tmp_path, ours).fit(module, data(*shape))
    assert len(ours.plan) == count
    assert {g.kind for g in ours.plan.gates} == {kind}
    assert [b.status for b in ours.identity_report.branches] == ["closed"] * count
    assert {g.status for g in ours.gradient_report.gates.values()} == {"alive"}
    gates = [module.get_parameter(g.parameter) for g in ours.plan.gates]
    assert all(bool(g.detach().any()) for g in gates)
    assert ours.history.steps.tolist() == [0, 1, 2]
    assert ours.history.variance_ratio[0].tolist() == [0.0] * count
    assert bool((ours.history.variance_ratio[2] > 0).all())
    assert bool((ours.history.var_stream > 0).all())


# -------------------------------------------------------------------- inputs of the trace


class Counting(Classifier):
    """Counts its training steps and its loaders."""

    def __init__(self, loader: Any) -> None:
        super().__init__(stack(Plain))
        self.loader, self.steps, self.loaders = loader, 0, 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        self.loaders += 1
        return self.loader


def test_training_step_and_loader_run_as_often_as_without(tmp_path: Path) -> None:
    module = Counting(data(WIDTH))
    trainer(tmp_path, ResidualInit()).fit(module)
    assert (module.steps, module.loaders) == (3, 1)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return ((torch.ones(WIDTH) * i, i % 2) for i in range(12))


def test_iterable_dataset_gives_the_trace_its_batch(tmp_path: Path) -> None:
    ours = ResidualInit()
    trainer(tmp_path, ours).fit(Classifier(stack(Plain)), DataLoader(Stream(), batch_size=4))
    assert len(ours.plan) == 2


def test_datamodule_gives_the_trace_its_batch(tmp_path: Path) -> None:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return data(WIDTH)

    ours = ResidualInit()
    trainer(tmp_path, ours).fit(Classifier(stack(Plain)), datamodule=Data())
    assert len(ours.plan) == 2


def test_example_inputs_come_before_the_data(tmp_path: Path) -> None:
    ours = ResidualInit(example_inputs=torch.randn(2, WIDTH))
    module = Counting(data(WIDTH))
    trainer(tmp_path, ours).fit(module)
    assert len(ours.plan) == 2


def test_example_input_array_is_used(tmp_path: Path) -> None:
    module, ours = Classifier(stack(Plain)), ResidualInit()
    module.example_input_array = torch.randn(2, WIDTH)
    trainer(tmp_path, ours).fit(module, data(WIDTH))
    assert len(ours.plan) == 2


def test_a_batch_that_cannot_be_traced_says_what_was_tried(tmp_path: Path) -> None:
    module = Classifier(stack(Plain))
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    with pytest.raises(TraceError, match=r"example_inputs") as caught:
        trainer(tmp_path, ResidualInit(example_inputs=torch.randn(2, WIDTH + 1))).fit(module, data(WIDTH))
    assert str((2, WIDTH + 1)) in str(caught.value)
    assert all(torch.equal(before[n], p) for n, p in module.named_parameters())


# -------------------------------------------------------------------- identity errors


def fit_to_error(module: pl.LightningModule, error: type[Exception], root: Path, **options: Any) -> Exception:
    """The error that stops the run, after checking that no weight was changed by it."""
    before: dict[str, Tensor] = {}

    class Before(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            before.update({n: p.detach().clone() for n, p in pl_module.named_parameters()})

    with pytest.raises(error) as caught:
        trainer(root, ResidualInit(**options), Before()).fit(module, data(WIDTH))
    assert before
    assert all(torch.equal(before[n], p) for n, p in module.named_parameters())
    return caught.value


def test_one_scale_not_at_zero_is_named(tmp_path: Path) -> None:
    net = stack(lambda: Scaled(value=0.0), 3)
    with torch.no_grad():
        net[1].scale.fill_(0.5)
    error = fit_to_error(Classifier(net), IdentityError, tmp_path, scheme="observe")
    (row,) = [b for b in error.report.branches if b.status == "open"]
    assert (row.name, row.cause, row.culprit) == ("net.1", "unzeroed scale", "net.1.scale")
    assert all(text in str(error) for text in (row.name, row.cause, row.culprit))


def test_a_bias_after_the_scale_is_named(tmp_path: Path) -> None:
    net = stack(NormLast, 2)
    with torch.no_grad():
        net[0].norm.weight.zero_()
        net[0].norm.bias.fill_(0.1)
        net[1].norm.weight.zero_()
    error = fit_to_error(Classifier(net), IdentityError, tmp_path, scheme="observe")
    (row,) = [b for b in error.report.branches if b.status == "open"]
    assert (row.name, row.cause, row.culprit) == ("net.0", "bias after scale", "net.0.norm.bias")
    assert all(text in str(error) for text in (row.name, row.cause, row.culprit))


class HalfGated(Scaled):
    """Two branches, one of them not gated by the parameter that is zero."""

    def __init__(self) -> None:
        super().__init__(value=0.0)
        self.free = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + torch.sigmoid(self.free(x))


def test_a_branch_without_the_gate_is_named(tmp_path: Path) -> None:
    error = fit_to_error(Classifier(stack(HalfGated, 1)), IdentityError, tmp_path, scheme="observe")
    (row,) = [b for b in error.report.branches if b.status == "open"]
    assert (row.name, row.cause) == ("net.0.free", "ungated branch")
    assert all(text in str(error) for text in (row.name, row.cause, row.culprit))


def test_identity_policy_decides(tmp_path: Path) -> None:
    with pytest.warns(ResInitWarning, match="unzeroed scale"):
        trainer(tmp_path, ResidualInit(scheme="observe", identity="warn")).fit(Classifier(stack(Scaled)), data(WIDTH))
    ours = ResidualInit(scheme="observe", identity="ignore")
    trainer(tmp_path, ours).fit(Classifier(stack(Scaled)), data(WIDTH))
    assert not ours.identity_report.ok


def test_a_norm_on_the_stream_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(ResInitWarning, match=r"the stream from .*norm1"):
        trainer(tmp_path, ResidualInit()).fit(Classifier(encoder(norm_first=False)), data(5, WIDTH))


def test_a_relu_after_the_sum_is_a_warning(tmp_path: Path) -> None:
    net = nn.Sequential(ConvBlock(3, 3), ConvBlock(3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.warns(ResInitWarning, match=r"the stream from .*relu"):
        trainer(tmp_path, ResidualInit()).fit(Classifier(net), data(3, 4, 4))


# -------------------------------------------------------------------- gradient errors


def guarded_to_zero(k: Tensor, v: Tensor, bound: float = 2.0) -> Tensor:
    length = v.norm(dim=-1, keepdim=True)
    k = torch.where(length > 0, bound * torch.tanh(length / bound) / length.clamp(min=1e-12), 0.0 * k)
    return k * v  # dead


def guarded_to_one(k: Tensor, v: Tensor, bound: float = 2.0) -> Tensor:
    length = v.norm(dim=-1, keepdim=True)
    k = torch.where(length > 0, bound * torch.tanh(length / bound) / length, torch.ones_like(length))  # nonfinite
    return k * v


def safe(k: Tensor, v: Tensor, bound: float = 2.0) -> Tensor:
    length = v.norm(dim=-1, keepdim=True)
    zero = length == 0
    divisor = torch.where(zero, torch.ones_like(length), length)
    return torch.where(zero, torch.ones_like(length), bound * torch.tanh(divisor / bound) / divisor) * v


class Bounded(pl.LightningModule):
    """A regression net with a zero output layer and a soft bound on what it returns."""

    def __init__(self, bound: Callable[[Tensor, Tensor], Tensor], residual: bool = False) -> None:
        super().__init__()
        self.bound, self.residual = bound, residual
        self.features = nn.Sequential(nn.Linear(2, 16), nn.Tanh())
        self.out = nn.Linear(16, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        v = self.out(self.features(x))
        bounded = self.bound(torch.ones_like(v[..., :1]), v)
        return x + bounded if self.residual else bounded

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        x = torch.rand(32, 2, generator=generator) - 0.5
        y = torch.stack([x[:, 0] * 0.8 + 0.3, x[:, 1].square()], dim=1)
        return DataLoader(TensorDataset(x, y + x if self.residual else y), batch_size=32)


@pytest.mark.parametrize("residual", [False, True], ids=["no_skip", "in_a_block"])
@pytest.mark.parametrize(("bound", "status"), [(guarded_to_zero, "dead"), (guarded_to_one, "nonfinite")])
def test_soft_bound_that_breaks_the_gradient_stops_the_run(
    bound: Callable, status: str, residual: bool, tmp_path: Path
) -> None:
    module, ours = Bounded(bound, residual), ResidualInit(scheme="observe")
    with pytest.raises(GradientError, match=r"out\.weight") as caught:
        trainer(tmp_path, ours, max_steps=400).fit(module)
    verdict = ours.gradient_report.gates["out.weight"]
    assert len(module.losses) == 1
    assert verdict.status == status
    assert verdict.source.endswith(line_of(__file__, status))
    assert line_of(__file__, status) in str(caught.value)


@pytest.mark.parametrize("residual", [False, True], ids=["no_skip", "in_a_block"])
def test_safe_soft_bound_trains(residual: bool, tmp_path: Path) -> None:
    pl.seed_everything(0, verbose=False)
    module, ours = Bounded(safe, residual), ResidualInit(scheme="observe", log_every_n_steps=0)
    trainer(tmp_path, ours, max_epochs=-1, max_steps=400).fit(module)
    assert ours.gradient_report.gates["out.weight"].status == "alive"
    assert module.losses[-1] < module.losses[0] / 1000


def test_zero_head_sleeps_then_wakes_and_the_run_goes_on(tmp_path: Path) -> None:
    net = stack(Plain)
    nn.init.zeros_(net[-1].weight)
    statuses: list[str] = []

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
            statuses.append(ours.gradient_report.gates[ours.plan.gates[0].parameter].status)

    ours = ResidualInit(scheme="insert")
    trainer(tmp_path, ours, Note()).fit(Classifier(net), data(WIDTH))
    assert statuses == ["asleep", "alive", "alive"]


class Shut(Scaled):
    """A zero scale before a ReLU: it can never learn."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.scale * self.f(x))


def test_a_gate_before_a_relu_stops_the_run_at_the_first_backward(tmp_path: Path) -> None:
    error = fit_to_error(Classifier(stack(lambda: Shut(value=0.0))), GradientError, tmp_path, scheme="observe")
    assert {g.status for g in error.report.alarms} == {"dead"}
    assert "net.0.scale" in str(error)


def test_gradient_policy_decides(tmp_path: Path) -> None:
    module = Classifier(stack(lambda: Shut(value=0.0)))
    with pytest.warns(ResInitWarning, match="dead"):
        trainer(tmp_path, ResidualInit(scheme="observe", gradient="warn")).fit(module, data(WIDTH))
    ours = ResidualInit(scheme="observe", gradient="ignore")
    trainer(tmp_path, ours).fit(module, data(WIDTH))
    assert not ours.gradient_report.ok


class Masked(Scaled):
    """The branch is multiplied by the last feature."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.f(x) * x[..., -1:]


def test_patience_ends_in_an_error(tmp_path: Path) -> None:
    inputs = torch.randn(12, WIDTH)
    inputs[:, -1] = 0.0
    masked = DataLoader(TensorDataset(inputs, torch.arange(12) % 3 // 2), batch_size=4)
    module = Classifier(nn.Sequential(Masked(value=0.0), nn.Linear(WIDTH, 2)))
    ours = ResidualInit(scheme="observe", patience=2)
    with pytest.raises(GradientError, match="slept through 2 optimizer steps"):
        trainer(tmp_path, ours, max_steps=10, max_epochs=-1).fit(module, masked)
    assert ours.gradient_report.gates["net.0.scale"].status == "dead"


class Expert(Masked):
    """A masked branch for the rows whose first feature is positive."""

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero()[:, 0]
        return x.index_add(0, rows, super().forward(x[rows]) - x[rows])


def test_batches_without_a_row_for_an_expert_do_not_use_up_its_patience(tmp_path: Path) -> None:
    inputs = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0)).abs()
    inputs[:32, 0] *= -1.0
    batches = DataLoader(TensorDataset(inputs, torch.arange(40) % 3 // 2), batch_size=4)
    module = Classifier(nn.Sequential(Expert(value=0.0), nn.Linear(WIDTH, 2)))
    ours = ResidualInit(scheme="observe", patience=2, example_inputs=inputs[-4:])
    trainer(tmp_path, ours, max_steps=10).fit(module, batches)
    assert ours.gradient_report.gates["net.0.scale"].status == "alive"


def test_a_forward_that_runs_again_in_the_backward_is_seen_through(tmp_path: Path) -> None:
    """The recorder has gone by then: reentrant activation checkpointing in a Trainer."""

    class Recomputed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for block in self:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    blocks = Recomputed(Scaled(value=0.0), Shut(value=0.0), Scaled(value=0.0))
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), blocks, nn.Linear(WIDTH, 2))
    error = fit_to_error(Classifier(net), GradientError, tmp_path, scheme="observe")
    assert [g.parameter for g in error.report.alarms] == ["net.1.1.scale"]
    assert "`relu` has slope zero" in str(error)


def test_an_optimizer_that_steps_in_the_backward_is_no_fault(tmp_path: Path) -> None:
    """Neither for a gate with a gradient nor for those that sleep until a zero head has moved."""

    class Fused(Classifier):
        def on_fit_start(self) -> None:
            for parameter in self.parameters():
                parameter.register_post_accumulate_grad_hook(self.step)

        def step(self, parameter: Tensor) -> None:
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None

    module = Fused(stack(lambda: Scaled(value=0.0)))
    nn.init.zeros_(module.net[-1].weight)
    ours = ResidualInit(scheme="observe", patience=3)
    trainer(tmp_path, ours, max_steps=6, max_epochs=-1).fit(module, data(WIDTH))
    assert {g.status for g in ours.gradient_report.gates.values()} == {"alive"}


# -------------------------------------------------------------------- refusals


def test_no_skip_is_refused_before_any_weight_changed(tmp_path: Path) -> None:
    module = Classifier(nn.Sequential(mlp(), nn.Linear(WIDTH, 2)))
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    with pytest.raises(NoBranchError):
        trainer(tmp_path, ResidualInit()).fit(module, data(WIDTH))
    assert all(torch.equal(before[n], p) for n, p in module.named_parameters())


def test_trained_blocks_are_refused_unless_consented(tmp_path: Path) -> None:
    def trained() -> Classifier:
        net = stack(NormLast)
        with torch.no_grad():
            net[0].norm.weight.copy_(torch.linspace(0.5, 1.5, WIDTH))
        return Classifier(net)

    with pytest.raises(TrainedWeightsError, match=r"net\.0\.norm\.weight"):
        trainer(tmp_path, ResidualInit()).fit(trained(), data(WIDTH))
    ours = ResidualInit(overwrite_trained=True)
    trainer(tmp_path, ours).fit(trained(), data(WIDTH))
    assert ours.identity_report.ok


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"scheme": "none"}, "scheme"),
        ({"identity": "stop"}, "identity"),
        ({"gradient": True}, "gradient"),
        ({"include": [1]}, "include"),
        ({"exclude": [None]}, "exclude"),
        ({"patience": 0}, "patience"),
        ({"on_ratio": 0.0}, "on_ratio"),
        ({"on_ratio": "x"}, "on_ratio"),
        ({"log_every_n_steps": -1}, "log_every_n_steps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"`{named}`"):
        ResidualInit(**options)


# -------------------------------------------------------------------- watching

QUANTITIES = ("gate", "gate_max", "gate_grad", "var_stream", "var_branch", "variance_ratio", "saliency")


def test_every_logger_receives_every_key(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "tb")]
    ours = ResidualInit()
    trainer(tmp_path, ours, logger=loggers).fit(Classifier(stack(Scaled)), data(WIDTH))
    wanted = {f"resinit/{q}/net.{i}" for q in QUANTITIES for i in range(2)}
    wanted |= {f"resinit/{n}" for n in ("switched_on", "gate_max", "variance_ratio_max", "variance_ratio_min")}
    header = (Path(loggers[0].log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert wanted <= set(header)
    events = EventAccumulator(loggers[1].log_dir)
    events.Reload()
    assert wanted <= set(events.Tags()["scalars"])
    assert [e.step for e in events.Scalars("resinit/gate/net.0")] == [e.step for e in events.Scalars("loss")]
    found = [e.value for e in events.Scalars("resinit/variance_ratio/net.1")]
    assert found == pytest.approx(ours.history.variance_ratio[:, 1].tolist())


def test_keys_have_only_plain_characters(tmp_path: Path) -> None:
    class Root(Plain):
        def forward(self, x: Tensor) -> Tensor:
            x = x + torch.sigmoid(x) * self.f[0](x)
            return x + self.f[2](x)

    logger = CSVLogger(tmp_path, "csv")
    ours = ResidualInit(scheme="observe", identity="ignore", gradient="ignore")
    trainer(tmp_path, ours, logger=logger).fit(Classifier(Root()), data(WIDTH))
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    ours_keys = [key for key in header if key.startswith("resinit/")]
    assert ours_keys
    assert all(re.fullmatch(r"[A-Za-z0-9_./-]+", key) for key in ours_keys)


def test_records_only_on_the_steps_asked_for(tmp_path: Path) -> None:
    ours = ResidualInit(log_every_n_steps=3)
    trainer(tmp_path, ours, max_steps=9, max_epochs=-1).fit(Classifier(stack(Plain)), data(WIDTH))
    assert ours.history.steps.tolist() == [0, 2, 5, 8]


def test_silent_steps_have_no_mode_and_no_hook(tmp_path: Path) -> None:
    class Look(pl.Callback):
        def __init__(self) -> None:
            self.modes: list[int] = []
            self.hooks: list[int] = []

        def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
            self.hooks.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in pl_module.modules()))

    class Spy(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            look.modes.append(torch._C._len_torch_dispatch_stack())
            return super().forward(x)

    look, module = Look(), Spy(stack(Scaled))
    trainer(tmp_path, ResidualInit(log_every_n_steps=4), look, max_steps=6, max_epochs=-1).fit(module, data(WIDTH))
    # one fake forward, one observed, two silent, one logged, two silent
    assert [modes > 0 for modes in look.modes] == [True, True, False, False, True, False, False]
    assert set(look.hooks) == {0}


def test_callback_metrics_carry_the_aggregates(tmp_path: Path) -> None:
    runner = trainer(tmp_path, ResidualInit())
    runner.fit(Classifier(stack(Plain)), data(WIDTH))
    names = [n for n in runner.callback_metrics if n.startswith("resinit/")]
    assert sorted(names) == [
        f"resinit/{n}" for n in ("gate_max", "switched_on", "variance_ratio_max", "variance_ratio_min")
    ]


def test_table_at_the_end_names_every_branch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    ours = ResidualInit(on_ratio=1e-9)
    trainer(tmp_path, ours).fit(Classifier(stack(Scaled)), data(WIDTH))
    printed = capsys.readouterr().out
    for text in ("net.0", "net.1", "scale", "gate kind", "variance ratio", "order", "2 of 2"):
        assert text in printed


def test_table_of_a_short_run_says_which_number_is_of_when(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = ResidualInit(log_every_n_steps=50)
    module = Classifier(stack(Scaled))
    trainer(tmp_path, ours, max_steps=6, max_epochs=-1).fit(module, data(WIDTH))
    printed = capsys.readouterr().out
    assert len(ours.history) == 1
    for text in ("after 6 steps", "1 record", "at step 0", f"{abs(module.net[0].scale.item()):.3g}"):
        assert text in printed


def test_table_of_a_run_recorded_to_the_end_needs_no_explanation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path, ResidualInit()).fit(Classifier(stack(Scaled)), data(WIDTH))
    assert "log_every_n_steps" not in capsys.readouterr().out


class SlowGate(Classifier):
    """The first gate has a learning rate of its own."""

    slow = 1e-9

    def configure_optimizers(self) -> torch.optim.Optimizer:
        slow = [p for n, p in self.named_parameters() if n == "net.0.scale"]
        rest = [p for n, p in self.named_parameters() if n != "net.0.scale"]
        return torch.optim.SGD([{"params": slow, "lr": self.slow, "weight_decay": 0.5}, {"params": rest}], lr=0.1)


@pytest.mark.filterwarnings("ignore:weight_decay pulls")
def test_a_gate_that_never_moved_is_named_with_its_settings(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours = ResidualInit()
    with pytest.warns(ResInitWarning, match="moved less than 1% of the median") as caught:
        trainer(tmp_path, ours, max_steps=6, max_epochs=-1).fit(SlowGate(stack(Scaled, 3)), data(WIDTH))
    text = next(str(w.message) for w in caught if "moved less" in str(w.message))
    assert text.startswith("1 gate with")
    assert "net.0.scale (learning rate 1e-09, weight decay 0.5, float32)" in text
    assert "net.1.scale" not in text


@pytest.mark.filterwarnings("ignore:weight_decay pulls")
def test_gates_that_move_as_the_others_do_are_no_reason_to_warn(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = SlowGate(stack(Scaled, 3))
    module.slow = 0.1
    with warnings.catch_warnings(record=True) as caught:
        trainer(tmp_path, ResidualInit(), max_steps=6, max_epochs=-1).fit(module, data(WIDTH))
    assert not [w for w in caught if "moved less" in str(w.message)]


@pytest.mark.filterwarnings("ignore:weight_decay pulls")
def test_two_records_are_too_few_to_call_a_small_gate_still(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = SlowGate(stack(Scaled, 3))
    with warnings.catch_warnings(record=True) as caught:
        ours = ResidualInit(log_every_n_steps=50)
        trainer(tmp_path, ours, max_steps=6, max_epochs=-1).fit(module, data(WIDTH))
    assert len(ours.history) == 1
    assert module.net[0].scale.abs() > 0
    assert not [w for w in caught if "moved less" in str(w.message)]


def test_report_and_usefulness_are_written_when_asked_for(tmp_path: Path) -> None:
    ours = ResidualInit(usefulness=True, report=str(tmp_path / "curves.png"))
    module = Classifier(stack(Scaled))
    trainer(tmp_path, ours).fit(module, data(WIDTH), data(WIDTH))
    assert set(ours.usefulness) == {"net.0", "net.1"}
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("depth", [2, 12])
def test_what_was_measured_of_usefulness_is_printed(
    depth: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = ResidualInit(usefulness=True, on_ratio=1e-12, report=str(tmp_path / "run.html"))
    trainer(tmp_path, ours).fit(Classifier(stack(Scaled, depth)), data(WIDTH), data(WIDTH))
    printed = " ".join(capsys.readouterr().out.split())
    assert len(ours.agreements) == 3
    for agreement in ours.agreements:
        assert str(agreement) in printed
        assert str(agreement) in (tmp_path / "run.html").read_text()
    assert ("no rank correlation over 2 branches" in printed) == (depth == 2)


# -------------------------------------------------------------------- no trace


class Noisy(Classifier):
    """Batch norm, dropout and a metric."""

    def __init__(self) -> None:
        net = nn.Sequential(nn.BatchNorm1d(WIDTH), Plain(), nn.Dropout(0.3), Plain(), nn.Linear(WIDTH, 2))
        super().__init__(net)
        self.mean = MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        return loss


def test_observing_changes_no_bit(tmp_path: Path) -> None:
    def final(*callbacks: pl.Callback) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        pl.seed_everything(3, verbose=False)
        module, dataset = Noisy(), data(WIDTH, rows=20).dataset
        loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
        trainer(tmp_path, *callbacks, max_steps=7, max_epochs=-1).fit(module, loader)
        return module.state_dict(), module.mean.compute(), torch.get_rng_state()

    plain, metric, state = final()
    ours = ResidualInit(scheme="observe", identity="ignore", gradient="ignore")
    watched, watched_metric, watched_state = final(ours)
    assert len(ours.history) == 7
    assert list(plain) == list(watched)
    assert all(torch.equal(plain[k], watched[k]) for k in plain)
    assert torch.equal(metric, watched_metric)
    assert torch.equal(state, watched_state)


def test_scheme_differs_only_by_the_closed_gates(tmp_path: Path) -> None:
    class Start(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.state = {n: v.clone() for n, v in pl_module.state_dict().items()}
            self.rng = torch.get_rng_state()

    def start(*callbacks: pl.Callback) -> Start:
        pl.seed_everything(3, verbose=False)
        look = Start()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResInitWarning)  # dropout on the stream is told, and is none of this test
            trainer(tmp_path, *callbacks, look).fit(Noisy(), data(WIDTH))
        return look

    ours = ResidualInit(scheme="last_layer")
    plain, closed = start(), start(ours)
    gates = {n for g in ours.plan.gates for n in (g.parameter, *g.biases)}
    assert {n for n in plain.state if not torch.equal(plain.state[n], closed.state[n])} == gates
    assert torch.equal(plain.rng, closed.rng)


@pytest.mark.parametrize("steps", [1, 3])  # the first is the one that is observed
def test_nothing_keeps_the_model_alive_after_the_run(steps: int, tmp_path: Path) -> None:
    ours = ResidualInit()

    def run() -> weakref.ref:
        module = Classifier(stack(Plain))
        trainer(tmp_path, ours, max_steps=steps).fit(module, data(WIDTH))
        return weakref.ref(module)

    alive = run()
    gc.collect()
    assert alive() is None
    assert len(ours.history) == steps


def test_an_exception_leaves_no_mode_behind(tmp_path: Path) -> None:
    class Breaks(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.trainer.global_step == 0 and torch._C._len_torch_dispatch_stack() and not is_fake(loss):
                raise KeyError("user error")
            return loss

    def is_fake(tensor: Tensor) -> bool:
        return type(tensor) is not Tensor

    with pytest.raises(KeyError, match="user error"):
        trainer(tmp_path, ResidualInit()).fit(Breaks(stack(Plain)), data(WIDTH))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.nn.modules.module._global_forward_hooks


# -------------------------------------------------------------------- state and settings


def test_checkpoint_holds_plain_types_and_continues_the_history(tmp_path: Path) -> None:
    first = ResidualInit()
    runner = trainer(tmp_path, first)
    runner.fit(Classifier(stack(Plain)), data(WIDTH))
    path = tmp_path / "run.ckpt"
    runner.save_checkpoint(path)
    torch.load(path, weights_only=True)
    second = ResidualInit()
    trainer(tmp_path, second, max_steps=5, max_epochs=-1).fit(Classifier(stack(Plain)), data(WIDTH), ckpt_path=path)
    assert second.history.steps.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(second.history.gate[:3], first.history.gate)
    assert bool(second.history.gate[3].any())


def test_a_callback_can_be_pickled_before_and_after_a_run(tmp_path: Path) -> None:
    ours = ResidualInit(include=["*"])
    assert pickle.loads(pickle.dumps(ours)).include == ["*"]
    trainer(tmp_path, ours).fit(Classifier(stack(Plain)), data(WIDTH))
    twin = pickle.loads(pickle.dumps(ours))
    assert torch.equal(twin.history.gate, ours.history.gate)


def test_network_built_late_and_applied_by_hand_is_recognised(tmp_path: Path) -> None:
    class Late(Classifier):
        def __init__(self) -> None:
            super().__init__(nn.Identity())
            self.built = False

        def configure_model(self) -> None:
            if not self.built:
                self.net, self.built = stack(Plain), True
                apply_(self.net, make_plan(self.net, torch.randn(2, WIDTH)))

    ours = ResidualInit()
    trainer(tmp_path, ours).fit(Late(), data(WIDTH))
    assert {g.parameter for g in ours.plan.gates} == {"net.0.f.residual_gate", "net.1.f.residual_gate"}
    assert ours.identity_report.ok
    assert ours.gradient_report.ok
    assert len(ours.history) == 3


def test_weight_decay_on_scalar_gates_is_a_warning(tmp_path: Path) -> None:
    class Decayed(Classifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), weight_decay=0.1)

    with pytest.warns(ResInitWarning, match="weight_decay pulls on 2 gates"):
        trainer(tmp_path, ResidualInit()).fit(Decayed(stack(Scaled)), data(WIDTH))


def test_param_groups_silence_the_weight_decay_warning(tmp_path: Path) -> None:
    ours = ResidualInit()

    class Grouped(Classifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(param_groups(self, ours.plan, weight_decay=0.1))

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResInitWarning)
        trainer(tmp_path, ours).fit(Grouped(stack(Scaled)), data(WIDTH))
    assert ours.gradient_report.ok


def test_options_go_through_json(tmp_path: Path) -> None:
    options = json.loads(json.dumps({"scheme": "last_layer", "include": ["net.*"], "patience": 2, "on_ratio": 1e-2}))
    ours = ResidualInit(**options)
    trainer(tmp_path, ours).fit(Classifier(stack(Plain)), data(WIDTH))
    assert ours.history.on_ratio == 1e-2
    assert {b.action for b in ours.plan.branches} == {"last_layer"}


def test_history_saved_by_the_callback_loads_again(tmp_path: Path) -> None:
    ours = ResidualInit()
    trainer(tmp_path, ours).fit(Classifier(stack(Plain)), data(WIDTH))
    ours.history.save(tmp_path / "history.npz")
    assert torch.equal(History.load(tmp_path / "history.npz").variance_ratio, ours.history.variance_ratio)


@pytest.mark.parametrize("scheme", ["sqrt_depth", "downscale"])
def test_constant_schemes_check_the_growth_of_the_stream(scheme: str, tmp_path: Path) -> None:
    ours = ResidualInit(scheme=scheme)
    trainer(tmp_path, ours).fit(Classifier(stack(Plain, 8)), data(WIDTH))
    assert ours.plan.gates == ()
    assert ours.identity_report.constant
    assert 0.5 <= ours.identity_report.stacks[0].growth <= 2.72


def test_errors_have_a_common_root() -> None:
    for error in (NoBranchError, TraceError, TrainedWeightsError, IdentityError, GradientError):
        assert issubclass(error, ResInitError)
