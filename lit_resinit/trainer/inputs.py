"""Inputs for the trace: a small batch from the training data, and a training step that leaves no trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lit_resinit.errors import NoBranchError, ResInitError, TraceError
from lit_resinit.graph.keep import keep_rng
from lit_resinit.plan.make import as_arguments

SMALL = 4  # items; batch statistics need more than one


def candidates(trainer: Any, module: Any, example_inputs: Any, tried: list[str]) -> Any:
    """(what, positional inputs) in the order in which they are tried."""
    if example_inputs is not None:
        yield "example_inputs", as_arguments(example_inputs)
        return
    array = getattr(module, "example_input_array", None)
    if array is not None:
        yield "example_input_array", (array,) if isinstance(array, Tensor) else as_arguments(array)
    try:
        loader = _train_loader(trainer)
        for size in (SMALL, None):
            yield "a batch of the training data", (first_batch(loader, size),)
    except (GeneratorExit, NoBranchError):
        raise
    except Exception as error:
        tried.append(f"the training data: {type(error).__name__}: {error}")


def _train_loader(trainer: Any) -> Any:
    """The training loader, built once: what a hook returns is handed to the Trainer when it asks."""
    source = trainer.fit_loop._data_source
    if not source.is_module():
        return source.instance
    owner = source.instance
    loader = owner.train_dataloader()

    def once() -> Any:
        vars(owner).pop("train_dataloader", None)
        return loader

    once.lent = True  # type: ignore[attr-defined]
    vars(owner)["train_dataloader"] = once
    return loader


def give_back_loader(trainer: Any, module: Any) -> None:
    """Remove the loader that was lent to the Trainer, where it never asked for it."""
    for owner in (module, trainer.datamodule):
        if owner is not None and getattr(vars(owner).get("train_dataloader"), "lent", False):
            del vars(owner)["train_dataloader"]


def first_batch(loader: Any, size: int | None = SMALL) -> Any:
    """A batch of the first items of a loader's data, without starting a worker or drawing a random number.

    Args:
        loader: A ``DataLoader``, anything else that can be iterated more than once, or a dict, list or tuple of these.
        size: Most items; None for the loader's own batch size.

    Returns:
        What the loader's collate function makes of the items.

    Raises:
        TraceError: If the loader can be iterated only once.
    """
    if hasattr(loader, "iterables") and not isinstance(loader, DataLoader):
        loader = loader.iterables
    if isinstance(loader, Mapping):
        return {key: first_batch(value, size) for key, value in loader.items()}
    if isinstance(loader, list | tuple) and loader and all(isinstance(x, DataLoader) for x in loader):
        return type(loader)(first_batch(value, size) for value in loader)
    with keep_rng():
        if isinstance(loader, DataLoader):
            return _from_dataset(loader, size)
        if isinstance(loader, Iterator):
            raise TraceError(
                f"taking a batch for the trace: expected training data that can be read twice, found "
                f"{type(loader).__name__}, an iterator. Pass `ResidualInit(example_inputs=...)`, or set "
                "`example_input_array`."
            )
        return next(iter(loader))


def _from_dataset(loader: DataLoader[Any], size: int | None) -> Any:
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return next(iter(DataLoader(dataset, batch_size=loader.batch_size, collate_fn=loader.collate_fn)))
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[0])
    if type(loader.batch_sampler) is not BatchSampler:
        indices = list(next(iter(loader.batch_sampler)))[:size]
    else:
        length = len(dataset) if hasattr(dataset, "__len__") else 1
        indices = list(range(min(x for x in (loader.batch_sampler.batch_size, size, length) if x is not None)))
    getter = getattr(dataset, "__getitems__", None)
    return loader.collate_fn(getter(indices) if callable(getter) else [dataset[i] for i in indices])


class _Silent:
    """Stands in for an optimizer, scheduler or logger: takes every call, does nothing."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [], "lr": 0.0}]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: Any) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _QuietTrainer:
    """The trainer as a training step may read it, without its loggers."""

    def __init__(self, trainer: Any) -> None:
        self.__dict__["_trainer"] = trainer
        self.__dict__["logger"] = _Silent()
        self.__dict__["loggers"] = [self.__dict__["logger"]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_trainer"], name)


def training_step(trainer: Any) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
    """A runner for :func:`~lit_resinit.trace.trace`: the module's training step on a batch, the rest silenced."""

    def run(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _silence(module, trainer)
        batch = args[0]
        batch = module.on_before_batch_transfer(batch, 0)
        batch = module.on_after_batch_transfer(batch, 0)
        names = list(inspect.signature(module.training_step).parameters)
        if "dataloader_iter" in names:
            raise TraceError("training_step takes `dataloader_iter`; pass `ResidualInit(example_inputs=...)`.")
        takes_index = len(names) > 1 or any(
            p.kind is p.VAR_POSITIONAL for p in inspect.signature(module.training_step).parameters.values()
        )
        if not takes_index:
            return module.training_step(batch)
        out = module.training_step(batch, 0)
        skipped = out is None and module.automatic_optimization
        return module.training_step(batch, 1) if skipped else out

    return run


def few_batches(trainer: Any, count: int) -> list[Any]:
    """The first validation batches, or the first training batches where there is no validation."""
    loaders = trainer.val_dataloaders or trainer.train_dataloader
    loader = loaders[0] if isinstance(loaders, Sequence) else loaders
    return [batch for batch, _ in zip(loader, range(count), strict=False)]


def training_loss(trainer: Any) -> Callable[[Any, Any], Tensor]:
    """The loss of a module's training step on a batch, the rest silenced."""
    run = training_step(trainer)

    def loss_fn(module: Any, batch: Any) -> Tensor:
        out = run(module, (module.transfer_batch_to_device(batch, module.device, 0),), {})
        loss = out["loss"] if isinstance(out, dict) else out
        if not isinstance(loss, Tensor):
            raise ResInitError("measuring usefulness: expected training_step to return a loss, found none.")
        return loss

    return loss_fn


def _silence(module: nn.Module, trainer: Any) -> None:
    quiet = _QuietTrainer(trainer)
    for child in module.modules():
        if not hasattr(child, "training_step"):
            continue
        own = vars(child)
        own["_trainer"] = quiet
        nothing = _Silent()
        for name in (
            "log",
            "log_dict",
            "print",
            "manual_backward",
            "toggle_optimizer",
            "untoggle_optimizer",
            "clip_gradients",
        ):
            own[name] = nothing
        count = _count_optimizers(child)
        own["optimizers"] = lambda *a, count=count, one=nothing, **k: (
            one if count == 1 else [_Silent() for _ in range(count)]
        )
        own["lr_schedulers"] = lambda *a, one=nothing, **k: one


def _count_optimizers(module: Any) -> int:
    try:
        configured = module.configure_optimizers()
    except Exception:  # it may need the trainer's schedule; one optimizer is the common case
        return 1
    if isinstance(configured, Sequence) and len(configured) == 2 and isinstance(configured[0], Sequence):
        configured = configured[0]
    return len(configured) if isinstance(configured, Sequence) else 1
