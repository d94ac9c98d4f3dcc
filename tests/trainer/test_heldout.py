"""The data that usefulness is measured on: which, how many, and that nobody notices."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from networks import WIDTH, Classifier, Plain, data, stack, trainer
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from lit_resinit.trainer.heldout import fixed_batches, step_loss, validation_loader


def attached(root: Any, kind: type[Classifier] = Classifier, **options: Any) -> tuple[pl.Trainer, Classifier]:
    module, runner = kind(stack(Plain)), trainer(root, **options)
    runner.strategy.connect(module)
    module.trainer = runner
    runner._data_connector.attach_data(module, train_dataloaders=data(WIDTH))
    return runner, module


def numbers(rows: int, **options: Any) -> DataLoader[Any]:
    """Items that say which they are."""
    return DataLoader(TensorDataset(torch.arange(rows).float()), **options)


def items(batches: list[Any]) -> list[int]:
    return [int(v) for batch in batches for v in batch[0]]


@pytest.mark.parametrize(
    ("rows", "size", "parts", "wanted"),
    [
        (10_000, 32, 1, [32] * 4),  # at most four batches
        (10_000, 128, 1, [128] * 2),  # at most 256 items
        (10_000, 1000, 1, [256]),
        (10, 4, 1, [4] * 2),
        (10_000, 1000, 8, [32] * 4),
        (12, 4, 8, [2] * 4),  # a few parts also of few items
        (1, 4, 8, [1]),
    ],
)
def test_so_many_batches_of_different_items(rows: int, size: int, parts: int, wanted: list[int], tmp_path: Any) -> None:
    runner, module = attached(tmp_path)
    found = fixed_batches(runner, module, numbers(rows, batch_size=size), 4, 256, parts)
    assert [len(batch[0]) for batch in found] == wanted
    assert len(set(items(found))) == sum(wanted)


def test_they_are_the_same_each_time_and_spread_over_the_data(tmp_path: Any) -> None:
    runner, module = attached(tmp_path)
    loader = numbers(10_000, batch_size=64, shuffle=True)
    first, second = (items(fixed_batches(runner, module, loader, 4, 256)) for _ in range(2))
    assert first == second
    assert min(first) < 1000 < 9000 < max(first)


class Iterable(IterableDataset[Any]):
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        for i in range(20):
            self.at = i
            yield torch.tensor(float(i))


class Buckets:
    """A batch sampler of its own kind: one length for each batch."""

    def __iter__(self) -> Any:
        yield from ([4, 5], [7, 8, 9])

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("loader", "wanted"),
    [
        (DataLoader(Iterable(), batch_size=3), [0, 1, 2]),
        (DataLoader(TensorDataset(torch.arange(20.0)), batch_sampler=Buckets()), [4, 5]),
        ([torch.tensor([[3.0, 1.0]]), torch.tensor([[2.0, 1.0]])], [3, 1]),
    ],
    ids=["iterable", "a batch sampler of its own", "a list of batches"],
)
def test_of_other_loaders_the_first_batch(loader: Any, wanted: list[int], tmp_path: Any) -> None:
    runner, module = attached(tmp_path)
    (batch,) = fixed_batches(runner, module, loader, 4, 256)
    assert batch.flatten().tolist() == wanted if isinstance(batch, Tensor) else items([batch]) == wanted
    if isinstance(getattr(loader, "dataset", None), Iterable):
        assert loader.dataset.at == 0


@pytest.mark.parametrize("loader", [None, iter([torch.ones(2)]), numbers(0)], ids=["none", "read once", "empty"])
def test_no_data_are_no_batch(loader: Any, tmp_path: Any) -> None:
    runner, module = attached(tmp_path)
    assert fixed_batches(runner, module, loader, 4, 256) == []


def test_no_generator_and_no_sampler_moves(tmp_path: Any) -> None:
    runner, module = attached(tmp_path)
    generator = torch.Generator().manual_seed(5)
    loader = numbers(100, batch_sampler=BatchSampler(RandomSampler(range(100), generator=generator), 4, False))
    states = torch.get_rng_state(), generator.get_state()
    fixed_batches(runner, module, loader, 4, 256)
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], generator.get_state())


def test_hooks_of_the_transfer_and_of_the_precision_are_run(tmp_path: Any) -> None:
    class Doubling(Classifier):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] + 1.0]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] * 2.0]

    runner, module = attached(tmp_path, Doubling, precision="bf16-true")
    (batch,) = fixed_batches(runner, module, numbers(1), 4, 256)
    assert batch[0].tolist() == [2.0]
    assert batch[0].dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("loaders", "limit", "wanted"),
    [
        (None, 1.0, None),
        ("a", 1.0, "a"),
        (["a", "b"], 1.0, "a"),
        ({"x": "a", "y": "b"}, 1.0, "a"),
        ([], 1.0, None),
        ("a", 0, None),
    ],
)
def test_the_first_of_several_validation_loaders(loaders: Any, limit: Any, wanted: Any) -> None:
    class Runner:
        val_dataloaders, limit_val_batches = loaders, limit

    assert validation_loader(Runner()) == wanted


@pytest.mark.parametrize("kind", ["tensor", "dict"])
def test_the_loss_is_that_of_the_training_step_and_nothing_is_logged(kind: str, tmp_path: Any) -> None:
    class Step(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss if kind == "tensor" else {"loss": loss, "other": 1}

    runner, module = attached(tmp_path, Step)
    x, y = next(iter(data(WIDTH)))
    loss = step_loss(runner)(module, [x, y])
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(module.net(x), y).item())
    assert runner.callback_metrics == {}
