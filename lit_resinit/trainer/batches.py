"""A small batch from the training data, taken so that the training does not miss it."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from lit_resinit.errors import TraceError, warn
from lit_resinit.graph.keep import Kept, host_random_state, keep_rng

SMALL = 4  # items; batch statistics need more than one


def training_loader(trainer: Any) -> Any:
    """The training data, built once: what a hook returns is handed to the Trainer when it asks."""
    source = trainer.fit_loop._data_source
    if not source.is_module():
        return source.instance
    loader = source.instance.train_dataloader()
    _lend(source.instance, loader)
    return loader


def replace_loader(trainer: Any, loader: Any) -> None:
    """Let the Trainer train on this data, where what was read is at its start again."""
    source = trainer.fit_loop._data_source
    if source.is_module():
        _lend(source.instance, loader)
    else:
        source.instance = loader


def _lend(owner: Any, loader: Any) -> None:
    def once() -> Any:
        vars(owner).pop("train_dataloader", None)
        return loader

    once.lent = True  # type: ignore[attr-defined]
    vars(owner)["train_dataloader"] = once


def give_back_loader(trainer: Any, module: Any) -> None:
    """Remove the loader that was lent to the Trainer, where it never asked for it."""
    for owner in (module, trainer.datamodule):
        if owner is not None and getattr(vars(owner).get("train_dataloader"), "lent", False):
            del vars(owner)["train_dataloader"]


# -------------------------------------------------------------------- one batch


def first_batch(loader: Any, size: int | None = SMALL, apart: tuple[Any, ...] = ()) -> Any:
    """:func:`take_batch` of data that need not be replaced afterwards.

    Raises:
        TraceError: If the data can be iterated only once.
    """
    if isinstance(loader, Iterator):
        raise TraceError(
            f"taking a batch for the trace: expected training data that can be read twice, found "
            f"{type(loader).__name__}, an iterator. Pass `ResidualInit(example_inputs=...)`, or set "
            "`example_input_array`."
        )
    return take_batch(loader, size, apart)[0]


def take_batch(loader: Any, size: int | None = SMALL, apart: tuple[Any, ...] = ()) -> tuple[Any, Any]:
    """A batch of the first items of a loader's data, without starting a worker or drawing a random number.

    Whatever state the data's own objects hold (a dataset, a sampler, a collate function, a loader) is put back. What
    can be read only once is at its start again for whoever iterates next.

    Args:
        loader: A loader with a ``dataset``, anything else that can be iterated, or a dict, list or tuple of these.
        size: Most items; None for the loader's own batch size.
        apart: Objects that are no data, although data may lead to them.

    Returns:
        What the loader's collate function makes of the items, and the loader to train on: the same one, unless it is a
        bare iterator.
    """
    if hasattr(loader, "iterables") and not hasattr(loader, "dataset"):
        return first_batch(loader.iterables, size, apart), loader
    if isinstance(loader, Mapping):
        taken = {key: take_batch(value, size, apart) for key, value in loader.items()}
        same = all(kept is loader[key] for key, (_, kept) in taken.items())
        batch = {key: batch for key, (batch, _) in taken.items()}
        return batch, loader if same else {key: kept for key, (_, kept) in taken.items()}
    if isinstance(loader, list | tuple) and loader and all(is_loader(x) for x in loader):
        return type(loader)(take_batch(value, size, apart)[0] for value in loader), loader
    with keep_rng():
        if is_loader(loader):
            return _from_loader(loader, size, apart), loader
        if isinstance(loader, Iterator) and not hasattr(loader, "__dict__"):
            state = _random_state()
            batch = next(loader)
            _tell_draws(loader, state)
            return batch, itertools.chain([batch], loader)
        return _from_source(loader, 1, lambda items: items[0], loader, apart), loader


def is_loader(value: Any) -> bool:
    """Whether something is built like torch's ``DataLoader``, as those of other packages are."""
    return all(hasattr(value, name) for name in ("dataset", "collate_fn", "batch_sampler", "batch_size"))


def _from_loader(loader: Any, size: int | None, apart: tuple[Any, ...]) -> Any:
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        if loader.batch_size is None:
            return _from_source(dataset, 1, lambda items: loader.collate_fn(items[0]), loader, apart)
        return _from_source(dataset, loader.batch_size, loader.collate_fn, loader, apart)
    kept, collate = Kept(loader, apart=apart, data=True), Kept(loader.collate_fn, apart=(*apart, dataset), data=True)
    saved = _saved(loader) if collate.streams else None
    try:
        return loader.collate_fn(_items(loader, size))
    finally:
        kept.put_back()
        if collate.streams and not _is_loaded(saved):
            _warn_about(loader.collate_fn, collate.streams)


def _items(loader: Any, size: int | None) -> Any:
    """The first items of a dataset that can be read in any order."""
    dataset, sampler = loader.dataset, loader.batch_sampler
    if sampler is None:
        return dataset[0]
    if type(sampler) is not BatchSampler and not Kept(sampler, apart=(dataset,), data=True).streams:
        indices = list(next(iter(sampler)))[:size]
    else:
        length = len(dataset) if hasattr(dataset, "__len__") else 1
        own = getattr(sampler, "batch_size", None)
        indices = list(range(min(x for x in (own or SMALL, size, length) if x is not None)))
    getter = getattr(dataset, "__getitems__", None)
    return getter(indices) if callable(getter) else [dataset[i] for i in indices]


# -------------------------------------------------------------------- what is read in one order only


def _from_source(source: Any, count: int, collate: Any, loader: Any, apart: tuple[Any, ...]) -> Any:
    """A batch of the first items of something that is iterated.

    Its state is put back where it is made of attributes; else through its own ``load_state_dict``; else what was read
    is handed to whoever iterates next. Where none of these is possible, a warning says so.
    """
    around = Kept(loader, apart=(*apart, source), data=True)
    kept = Kept(source, apart=apart, data=True)
    saved = _saved(loader, source) if kept.streams else None
    state = _random_state()
    stream, items = iter(source), list[Any]()
    try:
        items += itertools.islice(stream, count)
        if not items:
            raise TraceError(f"taking a batch for the trace: expected items in {type(source).__name__}, found none.")
        return collate(items)
    finally:
        around.put_back()
        if not kept.streams:
            if isinstance(stream, Generator):
                stream.close()
            kept.put_back()
        elif not _is_loaded(saved) and items:
            _tell_draws(source, state)
            if not _hand_back(source, items, stream):
                _warn_about(source, kept.streams)


def _random_state() -> tuple[Any, ...]:
    return torch.get_rng_state().numpy().tobytes(), host_random_state()


def _tell_draws(source: Any, before: tuple[Any, ...]) -> None:
    """What was read is given back, but not the random numbers that reading it drew."""
    if _random_state() != before:
        warn(
            f"planning read a batch from {type(source).__name__}, which can be read once and draws random numbers: the "
            "training gets that batch, but later draws are others than without the callback. Pass "
            "`ResidualInit(example_inputs=...)`, or set `example_input_array`, and nothing is read."
        )


def _saved(*objects: Any) -> tuple[Any, Any] | None:
    """The first of the objects that can save and load its own state, with its state."""
    for one in objects:
        if callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None)):
            return one, one.state_dict()
    return None


def _is_loaded(saved: tuple[Any, Any] | None) -> bool:
    """Whether an object took its own state back."""
    if saved is not None:
        saved[0].load_state_dict(saved[1])
    return saved is not None


def _hand_back(source: Any, items: list[Any], rest: Iterator[Any]) -> bool:
    """Let the next iteration of a source begin with the items that were read; False where its class forbids that.

    For that one time the object is of a class of the same name with another ``__iter__``, so that loaders and the
    Trainer, which look at classes, see no difference.
    """
    kind = type(source)

    def again(self: Any) -> Iterator[Any]:
        self.__class__ = kind
        return itertools.chain(items, rest)

    body = {"__iter__": again, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__slots__": ()}
    try:
        source.__class__ = type(kind.__name__, (kind,), body)
    except TypeError:  # classes written in C, or with slots of their own
        return False
    return True


def _warn_about(source: Any, streams: list[str]) -> None:
    kinds = ", ".join(dict.fromkeys(streams)) or "an iterator"
    warn(
        f"planning read a batch through {getattr(source, '__name__', type(source).__name__)}, which holds {kinds}, "
        "something that moves on, and can neither be put back nor be given back what was read: the training begins "
        "after that. Pass `ResidualInit(example_inputs=...)`, or set `example_input_array`, and nothing is read."
    )
