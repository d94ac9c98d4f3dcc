"""Data that usefulness is measured on, and the loss of the training step on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import BatchSampler, IterableDataset

from lit_resinit.errors import ResInitError
from lit_resinit.graph.keep import Kept, keep_rng
from lit_resinit.trainer.batches import is_loader, take_batch
from lit_resinit.trainer.inputs import silence, step


def validation_loader(trainer: Any) -> Any:
    """The first loader of the validation data; None where there is no validation."""
    loaders = trainer.val_dataloaders if trainer.limit_val_batches else None
    return next(iter(tree_flatten(loaders)[0]), None) if isinstance(loaders, list | tuple | dict) else loaders


def fixed_batches(trainer: Any, module: Any, loader: Any, most: int, samples: int, parts: int = 1) -> list[Any]:
    """Batches that are the same however often they are asked for, ready for the training step.

    Of a map-style dataset, items drawn without replacement, others on each rank; of anything else its first batch. No
    worker is started, no random number drawn, and whatever state the data's objects hold is put back.

    Args:
        trainer: The Trainer.
        module: Its module.
        loader: A loader; None for no batch.
        most: Most batches.
        samples: Most items in all of them.
        parts: Into how many batches they are cut at least, as far as there are enough.
    """
    if loader is None or isinstance(loader, Iterator):
        return []
    with keep_rng():
        if _is_random_access(loader):
            kept = Kept(loader, apart=(trainer, module), data=True)
            try:
                raw = _drawn(loader, most, samples, parts, int(trainer.global_rank))
            finally:
                kept.put_back()
        else:
            raw = [take_batch(loader, None, (trainer, module))[0]]
        return [_ready(trainer, module, batch) for batch in raw]


def _is_random_access(loader: Any) -> bool:
    dataset = getattr(loader, "dataset", None)
    readable = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    plain = is_loader(loader) and type(loader.batch_sampler) is BatchSampler
    return plain and readable and not isinstance(dataset, IterableDataset)


def _drawn(loader: Any, most: int, samples: int, parts: int, rank: int) -> list[Any]:
    dataset, collate = loader.dataset, loader.collate_fn
    length = len(dataset)
    size = max(1, min(loader.batch_size or 1, samples // parts, max(2, length // parts), length))
    count = min(most, samples // size, length // size)
    chosen = random.Random(rank).sample(range(length), size * count)
    getter = getattr(dataset, "__getitems__", None)
    items = getter(chosen) if callable(getter) else [dataset[i] for i in chosen]
    return [collate(items[i : i + size]) for i in range(0, len(items), size)]


def _ready(trainer: Any, module: Any, batch: Any) -> Any:
    """A batch as the training step gets it."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def step_loss(trainer: Any) -> Callable[[Any, Any], Tensor]:
    """The loss of a module's training step on a batch that is ready, in the run's precision, the rest silenced."""

    def loss_fn(module: Any, batch: Any) -> Tensor:
        silence(module, trainer)
        with trainer.precision_plugin.forward_context():
            out = step(module, batch)
        loss = out.get("loss") if isinstance(out, dict) else out
        if not isinstance(loss, Tensor):
            raise ResInitError(
                "measuring usefulness: expected training_step to return a loss, found none (a step that is "
                "optimised by hand keeps it to itself). Return the loss as well."
            )
        return loss

    return loss_fn


def loss_scale(trainer: Any) -> float:
    """A factor on the loss under which float16 neither underflows nor overflows: well below the scaler's own."""
    scaler = trainer.scaler
    return 1.0 if scaler is None else float(min(max(1.0, scaler.get_scale() / 16), 2.0**12))


def first_size(batch: Any) -> int:
    """How many items a batch has, as its first tensor tells."""
    sizes = [len(value) for value in tree_flatten(batch)[0] if isinstance(value, Tensor) and value.ndim]
    return sizes[0] if sizes else 1


def own_copy(value: Any) -> Any:
    """A tensor of the training's batch that nobody else writes to."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
