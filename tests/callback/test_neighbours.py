"""Other callbacks, loggers, profilers and the tuner next to this one."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from networks import WIDTH, Classifier, Plain, Scaled, data, stack, trainer
from torch import Tensor, nn

from lit_resinit import GradientError, ResidualInit, ResInitError, ResInitWarning

BLOCKS = pytest.mark.parametrize("block", [Plain, Scaled], ids=["insert", "zero"])


def assert_good(module: pl.LightningModule, ours: ResidualInit) -> None:
    assert ours.identity_report.ok
    assert ours.gradient_report.ok
    assert all(bool(module.get_parameter(g.parameter).detach().any()) for g in ours.plan.gates)


# -------------------------------------------------------------------- copies of the weights


@BLOCKS
def test_exponential_averages_hold_the_gates(block: Any, tmp_path: Path) -> None:
    module, ours, average = Classifier(stack(block)), ResidualInit(), EMAWeightAveraging(decay=0.5)
    trainer(tmp_path, ours, average, max_steps=6, max_epochs=-1).fit(module, data(WIDTH), data(WIDTH))
    assert_good(module, ours)  # the averaged weights replace the others at the end
    assert len(ours.history) == 6


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@BLOCKS
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_stochastic_weight_averaging(first: bool, block: Any, tmp_path: Path) -> None:
    module, ours, swa = Classifier(stack(block)), ResidualInit(), StochasticWeightAveraging(0.1, swa_epoch_start=1)
    run = trainer(tmp_path, *([ours, swa] if first else [swa, ours]), max_steps=-1, max_epochs=3)
    if first or block is Scaled:
        run.fit(module, data(WIDTH))
        assert_good(module, ours)
    else:
        with pytest.raises(ResInitError, match="StochasticWeightAveraging"):
            run.fit(module, data(WIDTH))


@BLOCKS
def test_pruning_leaves_gates_learning(block: Any, tmp_path: Path) -> None:
    module, ours = Classifier(stack(block)), ResidualInit()
    targets = [(module.net[0].f[0], "weight"), (module.net[-1], "weight")]
    pruning = ModelPruning("l1_unstructured", parameters_to_prune=targets, amount=0.25)
    run = trainer(tmp_path, ours, pruning, max_steps=-1, max_epochs=3)
    run.fit(module, data(WIDTH))
    assert_good(module, ours)
    assert len(ours.history) == 9


# -------------------------------------------------------------------- monitors


def test_aggregates_can_be_monitored(tmp_path: Path) -> None:
    ours = ResidualInit(on_ratio=1e-12)
    best = ModelCheckpoint(tmp_path, monitor="resinit/gate_max", mode="max", filename="best")
    stop = EarlyStopping(
        "resinit/switched_on", mode="max", stopping_threshold=1.5, patience=50, check_on_train_epoch_end=True
    )
    run = trainer(tmp_path, ours, stop, best, max_steps=-1, max_epochs=20, enable_checkpointing=True)
    run.fit(Classifier(stack(Scaled), lr=0.1), data(WIDTH))
    assert run.current_epoch < 19
    assert best.best_model_score == pytest.approx(float(ours.history.gate_max[-1].max()))


def test_the_usual_company(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loggers = [CSVLogger(tmp_path, "a"), CSVLogger(tmp_path, "b")]
    module, ours = Classifier(stack(Plain)), ResidualInit()
    company = [LearningRateMonitor(), ModelSummary(max_depth=3), Timer()]
    trainer(tmp_path, *company, ours, logger=loggers).fit(module, data(WIDTH), data(WIDTH))
    assert_good(module, ours)
    heads = [(Path(one.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",") for one in loggers]
    assert heads[0] == heads[1]
    assert {"lr-SGD", "resinit/gate/net.0", "loss"} <= set(heads[0])


@pytest.mark.parametrize("build", [SimpleProfiler, AdvancedProfiler, PyTorchProfiler], ids=lambda b: b.__name__)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_profilers(build: Any, tmp_path: Path) -> None:
    module, ours = Classifier(stack(Plain)), ResidualInit()
    trainer(tmp_path, ours, profiler=build(dirpath=str(tmp_path), filename="profile")).fit(module, data(WIDTH))
    assert_good(module, ours)


# -------------------------------------------------------------------- frozen, then unfrozen


class Tuned(Classifier):
    """A backbone and a head, as BackboneFinetuning wants them."""

    def __init__(self, block: Any) -> None:
        super().__init__(nn.Identity())
        self.backbone, self.head = nn.Sequential(block(), block()), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.filterwarnings("ignore:The provided params to be frozen:UserWarning")
@BLOCKS
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_backbone_that_is_unfrozen_later_is_judged_then(first: bool, block: Any, tmp_path: Path) -> None:
    verdicts: list[set[str]] = []

    class Look(pl.Callback):
        def on_train_epoch_end(self, *args: Any) -> None:
            verdicts.append({g.status for g in ours.gradient_report.gates.values()})

    module, ours = Tuned(block), ResidualInit(patience=2)
    tuning = BackboneFinetuning(unfreeze_backbone_at_epoch=2, verbose=False)
    pair = [ours, tuning] if first else [tuning, ours]
    trainer(tmp_path, *pair, Look(), max_steps=-1, max_epochs=4).fit(module, data(WIDTH))
    if first or block is Scaled:
        assert verdicts == [{"asleep"}, {"asleep"}, {"alive"}, {"alive"}]
    else:  # inserted into a frozen backbone, the scalars learn from the start
        assert verdicts == [{"alive"}] * 4
    assert_good(module, ours)


@BLOCKS
def test_a_backbone_that_is_never_unfrozen_is_told_at_the_end(block: Any, tmp_path: Path) -> None:
    module, ours = Tuned(block), ResidualInit(patience=2)
    tuning = BackboneFinetuning(unfreeze_backbone_at_epoch=9, verbose=False)
    with pytest.warns(ResInitWarning, match="still frozen"):
        trainer(tmp_path, ours, tuning, max_steps=-1, max_epochs=2).fit(module, data(WIDTH))


class Shut(Scaled):
    """A gate before a ReLU: dead."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.scale * self.f(x))


def test_a_gate_that_is_dead_when_unfrozen_stops_the_run_then(tmp_path: Path) -> None:
    module = Tuned(lambda: Shut(value=0.0))
    tuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
    run = trainer(tmp_path, ResidualInit(scheme="observe", patience=2), tuning, max_steps=-1, max_epochs=9)
    with pytest.raises(GradientError, match=r"backbone\.0\.scale"):
        run.fit(module, data(WIDTH))
    assert run.current_epoch in (1, 2)
    assert isinstance(tuning, BaseFinetuning)


# -------------------------------------------------------------------- tuner


@BLOCKS
def test_the_rate_finder_runs_before_and_changes_nothing(block: Any, tmp_path: Path) -> None:
    module, ours = Classifier(stack(block)), ResidualInit()
    run = trainer(tmp_path, ours, max_steps=6, max_epochs=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Tuner(run).lr_find(module, data(WIDTH), num_training=8)
        run.fit(module, data(WIDTH))
    assert_good(module, ours)
    assert ours.history.steps.tolist() == list(range(6))
    assert not list(tmp_path.glob(".lr_find*"))


@BLOCKS
def test_the_batch_size_finder_runs_before(block: Any, tmp_path: Path) -> None:
    class Sized(Classifier):
        batch_size = 1

        def train_dataloader(self) -> Any:
            return data(WIDTH, batch=self.batch_size)

        val_dataloader = train_dataloader

    module, ours = Sized(stack(block)), ResidualInit()
    run = trainer(tmp_path, ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Tuner(run).scale_batch_size(module, max_trials=2, steps_per_trial=2)
        run.fit(module)
    assert_good(module, ours)
