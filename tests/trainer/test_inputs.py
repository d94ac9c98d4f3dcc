from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from networks import WIDTH, Classifier, Plain, data, stack, trainer
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from lit_resinit import NoBranchError, TraceError, make_plan
from lit_resinit.plan.make import plan_forward
from lit_resinit.trainer.batches import SMALL, first_batch
from lit_resinit.trainer.inputs import training_step

ROWS = torch.arange(20.0)


class Stream(IterableDataset):
    opened = 0

    def __iter__(self) -> Iterator[float]:
        Stream.opened += 1
        return iter(ROWS.tolist())


READ: list[int] = []  # not the dataset's own, which is put back


class Counted(TensorDataset):
    """Counts which items were read."""

    def __init__(self) -> None:
        super().__init__(ROWS)
        READ.clear()

    def __getitem__(self, index: int) -> Any:
        READ.append(index)
        return super().__getitem__(index)


def test_batch_is_small_and_from_the_start_of_the_data() -> None:
    (batch,) = first_batch(DataLoader(Counted(), batch_size=8, shuffle=True))
    assert batch.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert list(range(SMALL)) == READ


def test_size_of_none_is_the_loaders_own() -> None:
    assert len(first_batch(DataLoader(TensorDataset(ROWS), batch_size=8), None)[0]) == 8


def test_loader_with_workers_starts_none() -> None:
    loader = DataLoader(Counted(), batch_size=8, num_workers=2)
    assert len(first_batch(loader)[0]) == SMALL
    assert loader._iterator is None


def test_collate_function_is_the_users() -> None:
    loader = DataLoader(TensorDataset(ROWS), batch_size=8, collate_fn=lambda items: {"x": len(items)})
    assert first_batch(loader) == {"x": SMALL}


def test_batch_sampler_and_unbatched_loaders_are_read() -> None:
    sampled = DataLoader(TensorDataset(ROWS), batch_sampler=BatchSampler(SequentialSampler(ROWS), 3, False))
    assert first_batch(sampled)[0].tolist() == [0.0, 1.0, 2.0]
    assert first_batch(sampled, None)[0].tolist() == [0.0, 1.0, 2.0]
    assert first_batch(DataLoader(TensorDataset(ROWS), batch_size=None))[0].tolist() == 0.0


def test_iterable_dataset_is_opened_once() -> None:
    Stream.opened = 0
    assert first_batch(DataLoader(Stream(), batch_size=3)).tolist() == [0.0, 1.0, 2.0]
    assert Stream.opened == 1


def test_several_loaders_give_a_batch_in_their_structure() -> None:
    loader = DataLoader(TensorDataset(ROWS), batch_size=2)
    assert set(first_batch({"a": loader, "b": loader})) == {"a", "b"}
    assert len(first_batch([loader, loader])) == 2


def test_no_random_number_is_drawn() -> None:
    state = torch.get_rng_state()
    first_batch(DataLoader(TensorDataset(ROWS), batch_size=4, shuffle=True))
    assert torch.equal(state, torch.get_rng_state())


def test_iterator_that_can_be_read_once_is_left_alone() -> None:
    source = iter([torch.ones(2)])
    with pytest.raises(TraceError, match="example_inputs"):
        first_batch(source)
    assert next(source).tolist() == [1.0, 1.0]


def planned(module: pl.LightningModule, batch: Any) -> list[str]:
    runner = trainer(".")
    runner.strategy.connect(module)
    return [b.name for b in plan_forward(module, (batch,), {}, training_step(runner), "auto").branches]


BATCH = [torch.randn(4, WIDTH), torch.tensor([0, 1, 1, 0])]


class WithoutIndex(Classifier):
    def training_step(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class Manual(Classifier):
    """Steps its optimizer, prints, logs and clips in the training step."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()
        self.log_dict({"loss": loss})
        self.print("done")
        self.logger.log_metrics({"x": 1.0})


class Prepared(Classifier):
    """Changes the batch in the transfer hook."""

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        return [batch[0][..., :WIDTH], batch[1]]


@pytest.mark.parametrize(
    ("module", "batch"),
    [
        (Classifier(stack(Plain)), BATCH),
        (WithoutIndex(stack(Plain)), BATCH),
        (Manual(stack(Plain)), BATCH),
        (Prepared(stack(Plain)), [torch.randn(4, WIDTH + 3), BATCH[1]]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_training_step_of_every_form_is_traced(
    module: pl.LightningModule, batch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    assert planned(module, batch) == ["net.0", "net.1"]
    assert all(torch.equal(before[n], p) for n, p in module.named_parameters())
    assert all(p.grad is None for p in module.parameters())
    assert capsys.readouterr().out == ""
    assert "training_step" not in vars(module)
    assert "log" not in vars(module)


def test_module_without_blocks_is_still_refused() -> None:
    with pytest.raises(NoBranchError):
        planned(Classifier(nn.Linear(WIDTH, 2)), BATCH)


def test_plan_of_the_training_step_is_that_of_the_forward() -> None:
    module = Classifier(stack(Plain))
    runner = trainer(".")
    runner.strategy.connect(module)
    batch = next(iter(data(WIDTH)))
    by_step = plan_forward(module, (batch,), {}, training_step(runner), "auto")
    assert by_step.branches == make_plan(module, batch[0]).branches
