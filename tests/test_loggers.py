"""What loggers get, and when; and that none at all is needed."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from networks import WIDTH, Classifier, Scaled, data, stack, trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_resinit import ResidualInit


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
