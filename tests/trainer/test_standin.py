"""What a training step may read of the Trainer while it is traced, and what it cannot reach."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from networks import WIDTH, Classifier, Plain, data, stack, trainer
from torch import nn

from lit_resinit.trainer.standin import Image, Optimizers, Silent, declared_optimizers, stand_in


class Numbers(pl.LightningDataModule):
    classes = 3

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []


class Counter(pl.Callback):
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count


@pytest.fixture
def both(tmp_path: Any) -> tuple[Any, Any]:
    module = Classifier(stack(Plain))
    real = trainer(tmp_path, Counter(), max_steps=-1, max_epochs=5, accumulate_grad_batches=2, gradient_clip_val=0.5)
    real.strategy.connect(module)
    real.datamodule = Numbers()  # type: ignore[attr-defined]
    real.datamodule.trainer = real  # type: ignore[attr-defined]
    return real, stand_in(real, module, data(WIDTH, rows=20))


NAMES = """
    current_epoch global_step max_epochs min_epochs max_steps world_size global_rank local_rank num_nodes precision
    is_global_zero sanity_checking should_stop num_devices log_every_n_steps accumulate_grad_batches gradient_clip_val
    fast_dev_run limit_train_batches default_root_dir is_last_batch ckpt_path scaler
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_numbers_and_names_are_the_trainers(both: tuple[Any, Any], name: str) -> None:
    real, image = both
    assert getattr(image, name) == getattr(real, name)


def test_lengths_are_known_without_the_loops(both: tuple[Any, Any]) -> None:
    real, image = both
    assert (image.num_training_batches, image.estimated_stepping_batches) == (5, 15)
    assert len(image.train_dataloader.dataset) == 20
    assert real.fit_loop._combined_loader is None


@pytest.mark.parametrize(("steps", "epochs", "expected"), [(7, -1, 7), (7, 100, 7), (-1, -1, float("inf")), (-1, 2, 6)])
def test_steps_of_the_training_are_never_negative(tmp_path: Any, steps: int, epochs: int, expected: float) -> None:
    real = trainer(tmp_path, max_steps=steps, max_epochs=epochs)
    real.strategy.connect(module := Classifier(stack(Plain)))
    assert stand_in(real, module, data(WIDTH)).estimated_stepping_batches == expected


def test_a_stream_without_a_length_lasts_for_ever(tmp_path: Any) -> None:
    real = trainer(tmp_path, max_steps=-1, max_epochs=2)
    real.strategy.connect(module := Classifier(stack(Plain)))
    assert stand_in(real, module, iter([])).estimated_stepping_batches == float("inf")


def test_classes_are_those_of_the_originals(both: tuple[Any, Any]) -> None:
    real, image = both
    assert isinstance(image, pl.Trainer)
    assert isinstance(image.strategy, type(real.strategy))
    assert [type(c) for c in image.callbacks if isinstance(c, Counter)] == [Counter]


def test_what_is_written_stays_on_the_image(both: tuple[Any, Any]) -> None:
    real, image = both
    image.should_stop, image.mine = True, 1
    image.datamodule.seen.append(1)
    image.callbacks[0].add()
    image.fit_loop.epoch_loop.batch_idx = 9
    assert (image.mine, image.callbacks[0].count, image.fit_loop.epoch_loop.batch_idx) == (1, 1, 9)
    assert not real.should_stop
    assert not hasattr(real, "mine")
    assert real.datamodule.seen == []
    assert real.callbacks[0].count == 0
    assert real.fit_loop.epoch_loop.batch_idx == -1
    assert image.datamodule.classes == 3
    assert image.datamodule.trainer is image


def test_methods_do_nothing(both: tuple[Any, Any]) -> None:
    _, image = both
    image.save_checkpoint("nowhere.ckpt")
    image.fit_loop.setup_data()
    with image.precision_plugin.forward_context():
        image.strategy.barrier()
    assert isinstance(image.logger.experiment.add_scalar("x", 1), Silent)
    assert image.callback_metrics == {}
    with pytest.raises(AttributeError):
        _ = image.no_such_thing


def test_collectives_answer_alone(both: tuple[Any, Any], tmp_path: Any) -> None:
    _, image = both
    assert image.strategy.all_gather(torch.ones(2)).shape == (2,)
    assert image.strategy.broadcast("x") == "x"
    assert float(image.strategy.reduce(torch.ones(()))) == 1.0


def test_nothing_leads_to_the_real_trainer(both: tuple[Any, Any]) -> None:
    real, image = both
    for value in (image, image.fit_loop, image.strategy, image.fit_loop.epoch_loop, image.datamodule):
        held = getattr(value, "trainer", image)
        assert held is not real
    assert isinstance(image.fit_loop.trainer, Image)
    assert image.fit_loop.trainer is image
    assert image.lightning_module.net is real.lightning_module.net


# -------------------------------------------------------------------- optimizers that are not built yet


def test_as_many_optimizers_as_are_unpacked() -> None:
    one = Optimizers()
    a, b = one
    first, *rest = one
    (a, b, c), d = one, one[0]
    assert [len(rest), a, b, c, d, first] == [1, one, one, one, one, one]
    assert len(list(Optimizers(3))) == 3
    assert [net for _, net in zip(Optimizers(2), "xyz", strict=False)] == ["x", "y"]


def test_a_step_runs_its_closure() -> None:
    ran: list[int] = []
    Optimizers().step(closure=lambda: ran.append(1))
    Optimizers().step()
    assert ran == [1]
    assert Optimizers().param_groups[0]["lr"] == 0.0


class Base(nn.Module):
    def never(self) -> Any:
        raise AssertionError("read, and never run")


class One(Base):
    def configure_optimizers(self) -> Any:
        return self.never()


class Two(Base):
    def configure_optimizers(self) -> Any:
        return self.never(), self.never()


class Scheduled(Base):
    def configure_optimizers(self) -> Any:
        return [self.never()], [self.never()]


class Named(Base):
    def configure_optimizers(self) -> Any:
        first, second = self.never(), self.never()
        optimizers = [first, second]
        schedulers = [self.never()]
        return optimizers, schedulers


@pytest.mark.parametrize(("module", "count"), [(One, 1), (Two, 2), (Scheduled, 1), (Named, 2), (nn.Module, 1)])
def test_configure_optimizers_is_read_and_never_run(module: type[nn.Module], count: int) -> None:
    assert declared_optimizers(module()) == count
