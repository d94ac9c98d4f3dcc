"""Usefulness in a run: when it is measured, on which data, who gets it, and that the training does not notice."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from networks import WIDTH, Classifier, NormLast, Plain, Scaled, data, stack, trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lit_resinit import ResidualInit, ResInitError, ResInitWarning, attribute
from lit_resinit.trainer.useful import EVERY

LONG = {"max_steps": 25, "max_epochs": -1}


def held(rows: int = 40) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    return DataLoader(
        TensorDataset(torch.randn(rows, WIDTH, generator=generator), torch.arange(rows) % 2), batch_size=8
    )


def run(root: Path, module: pl.LightningModule, *loaders: Any, **options: Any) -> ResidualInit:
    ours = ResidualInit(usefulness="path", log_every_n_steps=1)
    trainer(root, ours, **LONG | options).fit(module, *(loaders or (data(WIDTH, rows=40), held())))
    return ours


def adds_up(ours: ResidualInit, rel: float = 0.2) -> None:
    found = ours.history.attributions
    assert len(found) > 1
    for row, joint in zip(found.values[1:], found.joint[1:], strict=True):
        assert float(row.sum()) == pytest.approx(float(joint), rel=rel, abs=1e-6)


# -------------------------------------------------------------------- when


def test_it_is_measured_every_few_records_at_validation_and_at_the_end(tmp_path: Path) -> None:
    ours = run(tmp_path, Classifier(stack(Scaled, 3), lr=0.3))
    assert EVERY == 10
    assert ours.history.attributions.steps.tolist() == [1, 10, 11, 20, 21, 25]  # an epoch has ten steps
    measured = ~ours.history.attribution.isnan().any(1)
    assert measured.nonzero().flatten().tolist() == [1, 10, 11, 20, 21, 24]
    adds_up(ours)
    assert set(ours.usefulness) == {"net.0", "net.1", "net.2"}
    assert ours.conclusion.data == "8 validation batches"


def test_at_the_end_only_where_that_was_asked_for(tmp_path: Path) -> None:
    ours = ResidualInit(usefulness=True, log_every_n_steps=1)
    trainer(tmp_path, ours, **LONG).fit(Classifier(stack(Scaled), lr=0.3), data(WIDTH), held())
    assert ours.history.attributions.steps.tolist() == [25]
    assert list(ours.conclusion.path) == list(ours.usefulness)


def test_never_where_it_was_not(tmp_path: Path) -> None:
    ours = ResidualInit(log_every_n_steps=1)
    trainer(tmp_path, ours, **LONG).fit(Classifier(stack(Scaled)), data(WIDTH), held())
    assert len(ours.history.attributions) == 0
    assert ours.usefulness is None
    assert ours.conclusion is None


@pytest.mark.parametrize("value", ["paths", 1.5, None, "True"])
def test_another_way_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="`usefulness` to be True, False or 'path'"):
        ResidualInit(usefulness=value)


def test_a_measurement_is_what_the_function_says(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Classifier(stack(NormLast, 3), lr=0.3)
    ours = run(tmp_path, module, data(WIDTH, rows=40), held(8))

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return functional.cross_entropy(model.net(batch[0]), batch[1])

    with torch.no_grad():
        whole = [batch for batch in held(8)]
    wanted = attribute(module, ours.plan, whole, loss_fn)  # eight items are one batch, in another order
    assert ours.history.attributions.values[-1].tolist() == pytest.approx(list(wanted.values()), rel=1e-4, abs=1e-7)
    assert float(ours.history.attributions.loss[-1]) == pytest.approx(wanted.loss, rel=1e-5)


# -------------------------------------------------------------------- no trace


class Noisy(Classifier):
    """Batch norm, dropout, numbers drawn in the step, and a count that it keeps."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.BatchNorm1d(WIDTH), Plain(), nn.Dropout(0.3), NormLast(), nn.Linear(WIDTH, 2))
        )
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step([batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]], batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.filterwarnings("ignore::lit_resinit.ResInitWarning")
def test_the_training_is_the_same_bit_for_bit(accumulate: int, tmp_path: Path) -> None:
    def final(usefulness: Any) -> tuple[Any, Any, int]:
        pl.seed_everything(3, verbose=False)
        module, ours = Noisy(), ResidualInit(usefulness=usefulness, log_every_n_steps=1)
        loader = DataLoader(data(WIDTH, rows=40).dataset, batch_size=4, shuffle=True)
        options = LONG | {"accumulate_grad_batches": accumulate}
        trainer(tmp_path, ours, **options).fit(module, loader, DataLoader(held().dataset, 8, num_workers=1))
        assert len(ours.history.attributions) == (0 if not usefulness else len(ours.history.attributions) or -1)
        return module.state_dict(), torch.get_rng_state(), module.steps

    plain, measured = final(False), final("path")
    assert all(torch.equal(value, measured[0][name]) for name, value in plain[0].items())
    assert torch.equal(plain[1], measured[1])
    assert plain[2] == measured[2]


def test_gradients_that_accumulate_are_not_touched(tmp_path: Path) -> None:
    class Looking(pl.Callback):
        grads: dict[str, Any]

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            self.grads = {n: (p.grad, p.grad.clone()) for n, p in pl_module.named_parameters()}

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            for name, parameter in pl_module.named_parameters():
                assert parameter.grad is self.grads[name][0]
                assert torch.equal(parameter.grad, self.grads[name][1])

    ours = ResidualInit(usefulness="path", log_every_n_steps=1)
    options = LONG | {"accumulate_grad_batches": 4, "val_check_interval": 3, "max_steps": 5}
    trainer(tmp_path, ours, Looking(), **options).fit(Classifier(stack(Scaled), lr=0.3), data(WIDTH, rows=40), held())
    adds_up(ours)


# -------------------------------------------------------------------- on which data


class WithoutValidation(Classifier):
    validation_step = pl.LightningModule.validation_step


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(data(WIDTH, rows=40).dataset)


@pytest.mark.parametrize(
    "loader", [data(WIDTH, rows=40), DataLoader(Stream(), batch_size=4)], ids=["map-style", "iterable"]
)
def test_without_validation_the_first_training_batches_are_taken(loader: Any, tmp_path: Path) -> None:
    ours = run(tmp_path, WithoutValidation(stack(Scaled), lr=0.3), loader)
    assert ours.history.attributions.steps.tolist() == [1, 11, 21, 25]
    assert "training batches" in ours.conclusion.data
    adds_up(ours)


class Foreign(Classifier):
    """Validation batches have names, and training batches do not."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", functional.cross_entropy(self(batch["x"]), batch["y"]))


def test_where_the_step_has_no_loss_on_validation_data_training_batches_are_taken(tmp_path: Path) -> None:
    rows = [{"x": x, "y": y} for x, y in held().dataset]
    ours = run(tmp_path, Foreign(stack(Scaled), lr=0.3), data(WIDTH, rows=40), DataLoader(rows, batch_size=8))
    assert "training batch" in ours.conclusion.data
    adds_up(ours)


class ByHand(Classifier):
    """Keeps its loss to itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize("usefulness", [True, "path"])
def test_a_step_without_a_loss_is_told_once_and_trains_on(usefulness: Any, tmp_path: Path) -> None:
    ours = ResidualInit(usefulness=usefulness, log_every_n_steps=1)
    with pytest.warns(ResInitWarning, match="training_step to return a loss, found none") as caught:
        trainer(tmp_path, ours, **LONG).fit(ByHand(stack(Scaled)), data(WIDTH, rows=40), held())
    assert sum("usefulness of the branches" in str(w.message) for w in caught) == 1
    assert len(ours.history) == 25
    assert ours.usefulness is None


@pytest.mark.filterwarnings("ignore::lit_resinit.ResInitWarning")
def test_no_error_and_no_data_are_kept(tmp_path: Path) -> None:
    """An error leads to the frames that it passed, and so to the model."""

    class Keeping(ResidualInit):
        def teardown(self, *args: Any, **options: Any) -> None:
            self.held = vars(self._useful)
            super().teardown(*args, **options)

    ours = Keeping(usefulness="path", log_every_n_steps=1)
    trainer(tmp_path, ours, **LONG).fit(ByHand(stack(Scaled)), data(WIDTH, rows=40), held())
    assert ours._useful is None
    assert not any(isinstance(value, BaseException) for value in ours.held.values())


class WithoutGradient(Classifier):
    """Turns gradients off where it does not train."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.training and torch.is_grad_enabled()):
            return self.net(x)


def test_a_loss_without_gradient_is_told_and_closed_branches_measured(tmp_path: Path) -> None:
    with pytest.warns(ResInitWarning, match="with a gradient, found ResInitError") as caught:
        ours = run(tmp_path, WithoutGradient(stack(Scaled), lr=0.3))
    assert sum("usefulness of the branches" in str(w.message) for w in caught) == 1
    assert len(ours.history.attributions) == 0
    assert set(ours.usefulness) == {"net.0", "net.1"}
    assert ours.conclusion.path is None
    assert ours.conclusion.share != 0.0


VALIDATION = {
    "a list of loaders": [held(), held()],
    "several named": {"one": held(), "two": held()},
    "iterable": DataLoader(Stream(), batch_size=4),
    "one item": held(1),
}


@pytest.mark.parametrize("kind", VALIDATION)
def test_loaders_of_many_kinds(kind: str, tmp_path: Path) -> None:
    class Named(Classifier):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            pass

    ours = run(tmp_path, Named(stack(Scaled), lr=0.3), data(WIDTH, rows=40), VALIDATION[kind])
    assert "validation" in ours.conclusion.data
    adds_up(ours)


@pytest.mark.filterwarnings("ignore:Total length of")
@pytest.mark.parametrize("options", [{"limit_val_batches": 0}, {"limit_val_batches": 0.0}])
def test_no_validation_batch_is_no_validation(options: Any, tmp_path: Path) -> None:
    ours = run(tmp_path, Classifier(stack(Scaled), lr=0.3), data(WIDTH, rows=40), held(), **options)
    assert "training" in ours.conclusion.data


def test_without_items_or_read_once_validation_data_are_none(tmp_path: Path) -> None:
    for loader in (DataLoader(TensorDataset(torch.zeros(0, WIDTH), torch.zeros(0).long())), iter(held())):
        ours = run(tmp_path, Classifier(stack(Scaled), lr=0.3), data(WIDTH, rows=40), loader)
        assert "training" in ours.conclusion.data
        assert ours.history.attributions.steps.tolist()[-2:] == [21, 25]


def test_a_scheme_without_gates_has_nothing_to_close(tmp_path: Path) -> None:
    ours = ResidualInit("sqrt_depth", usefulness="path", log_every_n_steps=1)
    trainer(tmp_path, ours).fit(Classifier(stack(Plain)), data(WIDTH), held())
    assert ours.conclusion is None
    assert len(ours.history.attributions) == 0


@pytest.mark.slow
def test_several_training_loaders_give_batches_of_several(tmp_path: Path) -> None:
    class Pair(WithoutValidation):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch["a"], batch_idx) + super().training_step(batch["b"], batch_idx)

    loaders = {"a": data(WIDTH, rows=40), "b": data(WIDTH, rows=40)}
    for usefulness in (True, "path"):
        ours = ResidualInit(usefulness=usefulness, log_every_n_steps=1)
        trainer(tmp_path, ours, **LONG).fit(Pair(stack(Scaled), lr=0.3), loaders)
        assert "training" in ours.conclusion.data


# -------------------------------------------------------------------- ways to train


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(precision: str, tmp_path: Path) -> None:
    class Module(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return functional.cross_entropy(self(batch[0]).double(), batch[1])

    torch.manual_seed(0)
    ours = run(tmp_path, Module(stack(Scaled, 3), lr=0.3), precision=precision)
    found = ours.history.attributions
    assert len(found) > 3
    assert bool(found.values.isfinite().all())
    assert float(found.values[-1].sum()) == pytest.approx(float(found.joint[-1]), rel=0.3, abs=3e-3)


def test_a_gradient_scaler_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    ours = run(tmp_path, Classifier(stack(Scaled, 3), lr=0.3), plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    found = ours.history.attributions
    assert scaler.get_scale() == 2.0**12
    assert float(found.values[-1].sum()) == pytest.approx(float(found.joint[-1]), rel=0.3, abs=3e-3)


class Recomputing(Classifier):
    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_(True)
        for block in self.net:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_that_are_recomputed(reentrant: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Recomputing(stack(Scaled), lr=0.3)
    module.reentrant = reentrant
    adds_up(run(tmp_path, module))


def test_a_dry_run_of_one_batch(tmp_path: Path) -> None:
    ours = ResidualInit(usefulness="path")
    trainer(tmp_path, ours, max_steps=-1, fast_dev_run=True).fit(Classifier(stack(Scaled)), data(WIDTH), held())
    assert len(ours.history.attributions) >= 1
    assert set(ours.usefulness) == {"net.0", "net.1"}


def test_a_resumed_run_goes_on_with_its_measurements(tmp_path: Path) -> None:
    module = Classifier(stack(Scaled), lr=0.3)
    first, loaders = ResidualInit(usefulness="path", log_every_n_steps=1), (data(WIDTH, rows=40), held())
    runner = trainer(tmp_path, first, max_steps=12, max_epochs=-1)
    runner.fit(module, *loaders)
    runner.save_checkpoint(tmp_path / "run.ckpt")
    before = first.history.attributions.steps.tolist()
    ours = ResidualInit(usefulness="path", log_every_n_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = Classifier(stack(Scaled), lr=0.3)
        trainer(tmp_path, ours, **LONG).fit(again, *loaders, ckpt_path=tmp_path / "run.ckpt", weights_only=True)
    steps = ours.history.attributions.steps.tolist()
    assert steps[: len(before)] == before
    assert steps[-1] == 25
    assert len(steps) > len(before)


# -------------------------------------------------------------------- who gets it


class Listening(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))


@pytest.mark.slow
def test_loggers_table_and_page_have_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    ours = ResidualInit(usefulness="path", log_every_n_steps=1, report=str(tmp_path / "run.html"))
    logger = Listening()
    trainer(tmp_path, ours, logger=logger, **LONG).fit(Classifier(stack(Scaled, 4), lr=0.3), data(WIDTH), held())
    found = ours.history.attributions
    rows = [(step, row) for step, row in logger.rows if "resinit/attribution/net.0" in row]
    assert [row["resinit/attribution/net.0"] for _, row in rows] == found.values[:-1, 0].tolist()
    assert {"resinit/attribution_sum", "resinit/attribution_joint", "resinit/attribution_loss"} <= set(rows[0][1])
    printed = capsys.readouterr().out
    assert "attribution" in printed
    assert "rise if closed" in printed
    assert "±" in printed
    joined = " ".join(printed.split())
    assert " ".join(str(ours.conclusion).split()) in joined
    page = (tmp_path / "run.html").read_text()
    assert '"attribution":{"steps":[1,' in page
    assert "standard error" in page


@pytest.mark.slow
def test_the_picture_of_a_run_has_four_panels(tmp_path: Path) -> None:
    ours = ResidualInit(usefulness="path", log_every_n_steps=1, report=str(tmp_path / "run.png"))
    trainer(tmp_path, ours, **LONG).fit(Classifier(stack(Scaled), lr=0.3), data(WIDTH), held())
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_gates_over_several_ranks_are_refused_in_words() -> None:
    class Part(nn.Parameter):
        def full_tensor(self) -> Tensor:
            return self.detach()

    model = stack(Scaled)
    from lit_resinit import make_plan

    plan = make_plan(model, torch.randn(2, WIDTH), scheme="observe")
    model[0].scale = Part(torch.ones(1))
    with pytest.raises(ResInitError, match="expected whole parameters, found 0"):
        attribute(model, plan, [torch.randn(2, WIDTH)], lambda out: out.square().mean())
