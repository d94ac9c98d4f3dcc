"""What loggers get, and when; and that none at all is needed."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from networks import WIDTH, Classifier, Scaled, data, stack, trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_resinit import ResidualInit
from lit_resinit.watch.history import QUANTITIES


class Remembering(Logger):
    """Keeps every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, dict[str, float]]] = []

    name = version = "remembering"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(key.startswith("resinit/") for key in metrics):
            self.calls.append((step, dict(metrics)))


class Gallery(Remembering):
    """A logger that takes images, as W&B's does."""

    def __init__(self) -> None:
        super().__init__()
        self.images: list[tuple[str, Any, int]] = []

    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
        self.images += [(key, image, step) for image in images]


def fit(root: Path, callback: pl.Callback, depth: int = 2, **options: Any) -> pl.Trainer:
    found = trainer(root, callback, **options)
    found.fit(Classifier(stack(Scaled, depth)), data(WIDTH))
    return found


AGGREGATES = {f"resinit/{n}" for n in ("switched_on", "gate_max", "variance_ratio_max", "variance_ratio_min")}


# -------------------------------------------------------------------- numbers


def test_every_logger_gets_the_same_constant_keys_in_one_call_for_each_record(tmp_path: Path) -> None:
    loggers = [Remembering(), Remembering()]
    callback = ResidualInit(log_every_n_steps=2)
    fit(tmp_path, callback, logger=loggers, max_steps=6, max_epochs=-1, log_every_n_steps=2)
    assert callback.history.steps.tolist() == [0, 1, 3, 5]
    wanted = AGGREGATES | {f"resinit/{q}/net.{i}" for q in QUANTITIES for i in range(2)}
    for logger in loggers:
        assert [step for step, _ in logger.calls] == [1, 3, 5]  # the first record is none of a logging step
        assert all(set(values) == wanted for _, values in logger.calls)
    for (_, values), row in zip(loggers[0].calls, callback.history.variance_ratio[1:], strict=True):
        assert [values[f"resinit/variance_ratio/net.{i}"] for i in range(2)] == row.tolist()


@pytest.mark.parametrize(
    ("depth", "per_branch", "named"),
    [(64, None, True), (65, None, False), (65, True, True), (3, False, False)],
)
def test_many_branches_are_quantiles_unless_asked_for(
    depth: int, per_branch: bool | None, named: bool, tmp_path: Path
) -> None:
    logger = Remembering()
    callback = ResidualInit(per_branch=per_branch)
    fit(tmp_path, callback, depth, logger=logger, max_steps=2)
    assert [step for step, _ in logger.calls] == [0, 1]
    parts = [f"net.{i}" for i in range(depth)] if named else ["q10", "q50", "q90"]
    wanted = AGGREGATES | {f"resinit/{q}/{part}" for q in QUANTITIES for part in parts}
    assert all(set(values) == wanted for _, values in logger.calls)
    if not named:
        found = [logger.calls[-1][1][f"resinit/gate/q{q}"] for q in (10, 50, 90)]
        numpy.testing.assert_allclose(found, numpy.quantile(callback.history.gate[-1], [0.1, 0.5, 0.9]), rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"logger": False},
        {"logger": []},
        {"fast_dev_run": True},
        {"fast_dev_run": 2, "logger": True},
        {"barebones": True, "logger": None, "enable_checkpointing": None, "log_every_n_steps": None},
        {"log_every_n_steps": 0, "logger": True},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("progress_bar", [False, True])
def test_unusual_trainers_are_no_obstacle(options: dict[str, Any], progress_bar: bool, tmp_path: Path) -> None:
    if options.get("barebones"):
        options = options | dict.fromkeys(("enable_progress_bar", "enable_model_summary", "num_sanity_val_steps"))
    callback = ResidualInit(progress_bar=progress_bar)
    found = fit(tmp_path, callback, **options)
    assert found.global_step
    assert callback.identity_report.ok
    assert callback.gradient_report.ok
    assert callback.history.steps[0] == 0


def test_no_logging_steps_leave_the_first_record_only_and_send_nothing(tmp_path: Path) -> None:
    logger, callback = Remembering(), ResidualInit()
    fit(tmp_path, callback, logger=logger, log_every_n_steps=0)
    assert callback.history.steps.tolist() == [0]
    assert logger.calls == []


def test_progress_bar_shows_blocks_only_when_asked(tmp_path: Path) -> None:
    class Looking(TQDMProgressBar):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            seen.append(self.get_metrics(trainer, trainer.lightning_module))

    for asked in (False, True):
        seen: list[dict[str, Any]] = []
        callback = ResidualInit(progress_bar=asked, on_ratio=1e-12)
        runner = trainer(tmp_path, callback, Looking(), enable_progress_bar=True)
        runner.fit(Classifier(stack(Scaled, 3)), data(WIDTH))
        ours = [row.get("blocks on/3") for row in seen]
        assert len(ours) == 3
        on = sum(step is not None for step in callback.history.switched_on().values())
        assert (ours[-1] == on) if asked else (set(ours) == {None})
        assert not any(key.startswith("resinit") for row in seen for key in row)


# -------------------------------------------------------------------- figures


def test_loggers_that_take_images_get_one_at_the_end_of_each_epoch(tmp_path: Path) -> None:
    logger = Gallery()
    fit(tmp_path, ResidualInit(), logger=logger, max_steps=-1, max_epochs=2)
    assert [(key, step) for key, _, step in logger.images] == [("resinit/blocks", 3), ("resinit/blocks", 6)]
    assert "switching on" in logger.images[0][1].axes[0].get_title()


def test_tensorboard_gets_the_picture(tmp_path: Path) -> None:
    fit(tmp_path, ResidualInit(), logger=TensorBoardLogger(tmp_path, "", ""), max_steps=-1, max_epochs=2)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert len(events.Images("resinit/blocks")) == 2


def test_an_epoch_without_a_record_sends_no_picture_again(tmp_path: Path) -> None:
    logger = Gallery()
    callback = ResidualInit(log_every_n_steps=5)
    fit(tmp_path, callback, logger=logger, max_steps=-1, max_epochs=4)  # three steps each
    assert callback.history.steps.tolist()[:3] == [0, 4, 9]
    assert [step for _, _, step in logger.images] == [3, 6, 12]


def test_without_matplotlib_numbers_are_sent_and_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    logger = Gallery()
    fit(tmp_path, ResidualInit(), logger=logger)
    assert logger.calls
    assert logger.images == []
