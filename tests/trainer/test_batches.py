"""The training does not miss the batch that was read for the trace."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from lit_resinit import ResInitWarning
from lit_resinit.trainer.batches import take_batch

ROWS = torch.arange(24.0)


def items() -> Iterator[Tensor]:
    yield from ROWS


class OnePass(IterableDataset):
    """One shared source, which nobody can rewind."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.source


class Rewound(IterableDataset):
    """Counts where it stands, and begins there."""

    position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < len(ROWS):
            self.position += 1
            yield ROWS[self.position - 1]


class ItsOwnIterator:
    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        return next(self.source).view(1)


class Buckets(Sampler):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(9)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(24, generator=self.generator).tolist()
        yield from (order[i : i + 4] for i in range(0, 24, 4))


class DrawnBuckets(Buckets):
    """Its batches come from a generator that nobody can rewind."""

    def __init__(self) -> None:
        self.batches = (list(range(i, i + 4)) for i in range(0, 24, 4))

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches


class Growing:
    calls = 0

    def __call__(self, rows: list[Any]) -> Tensor:
        self.calls += 1
        return torch.stack([r if isinstance(r, Tensor) else r[0] for r in rows]) * self.calls


def remembering() -> Callable[[list[Any]], Tensor]:
    calls = 0

    def collate(rows: list[Any]) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.stack([r[0] for r in rows]) * calls

    return collate


class Loader:
    """Any object that can be iterated."""

    epoch = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.epoch += 1
        return iter([ROWS[:4] * self.epoch, ROWS[4:8] * self.epoch])


class Saved:
    """Moves on, and can be put back by its own means."""

    def __init__(self) -> None:
        self.load_state_dict({"position": 0})

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position[0]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = [state["position"]]
        self._stream = (ROWS[i : i + 4] for i in range(state["position"], 24, 4))

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self._stream:
            self._position[0] += 4
            yield batch


DATA: dict[str, Callable[[], Any]] = {
    "map-style, shuffled": lambda: DataLoader(TensorDataset(ROWS), batch_size=4, shuffle=True),
    "batch sampler": lambda: DataLoader(TensorDataset(ROWS), batch_sampler=Buckets()),
    "batch sampler of one pass": lambda: DataLoader(TensorDataset(ROWS), batch_sampler=DrawnBuckets()),
    "collate object": lambda: DataLoader(TensorDataset(ROWS), batch_size=4, collate_fn=Growing()),
    "collate closure": lambda: DataLoader(TensorDataset(ROWS), batch_size=4, collate_fn=remembering()),
    "stream, generator": lambda: DataLoader(OnePass(items()), batch_size=4),
    "stream, list iterator": lambda: DataLoader(OnePass(iter(ROWS)), batch_size=4),
    "stream, one by one": lambda: DataLoader(OnePass(items()), batch_size=None),
    "stream, collate object": lambda: DataLoader(OnePass(items()), batch_size=4, collate_fn=Growing()),
    "stream with a position": lambda: DataLoader(Rewound(), batch_size=4),
    "bare iterator": lambda: iter([ROWS[:4], ROWS[4:8]]),
    "bare generator": items,
    "its own iterator": lambda: ItsOwnIterator(items()),
    "any object": Loader,
    "saves its own state": Saved,
    "several": lambda: {"a": DataLoader(OnePass(items()), batch_size=4), "b": Loader()},
    "several, one bare": lambda: {"a": items(), "b": Loader()},
    "a list": lambda: [DataLoader(OnePass(items()), batch_size=4), DataLoader(Rewound(), batch_size=4)],
}


def everything(loader: Any) -> Any:
    """All that two epochs give."""
    if isinstance(loader, dict):
        return {k: everything(v) for k, v in loader.items()}
    if isinstance(loader, list):
        return [everything(v) for v in loader]
    torch.manual_seed(0)
    return [[b.tolist() if isinstance(b, Tensor) else b[0].tolist() for b in loader] for _ in range(2)]


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("times", [1, 2])
def test_the_training_sees_all_its_data(kind: str, times: int) -> None:
    plain, loader = DATA[kind](), DATA[kind]()
    classes = type(loader), type(getattr(loader, "dataset", None)).__qualname__
    batches = []
    for _ in range(times):
        batch, loader = take_batch(loader)
        batches.append(repr(batch))
    assert len(set(batches)) == 1, "what is read again is the same"
    if "bare" not in kind:
        assert (type(loader).__qualname__, type(getattr(loader, "dataset", None)).__qualname__) == (
            classes[0].__qualname__,
            classes[1],
        )
        assert isinstance(loader, classes[0])
    assert everything(loader) == everything(plain)


def test_a_class_is_its_own_again_after_one_iteration() -> None:
    loader = DataLoader(OnePass(items()), batch_size=4)
    take_batch(loader)
    next(iter(loader))
    assert type(loader.dataset) is OnePass


class Fixed:
    """An object whose class cannot be changed for a while, and that holds a stream."""

    __slots__ = ("source",)

    def __init__(self) -> None:
        self.source = items()

    def __iter__(self) -> Iterator[Tensor]:
        return (row.view(1) for row in self.source)


def test_what_can_neither_be_put_back_nor_given_back_is_told_once() -> None:
    source = items()
    loader = DataLoader(TensorDataset(ROWS), batch_size=4, collate_fn=lambda rows: (rows, next(source)))
    with pytest.warns(ResInitWarning, match="example_inputs") as caught:
        take_batch(loader)
    assert len(caught) == 1


def test_draws_that_cannot_be_given_back_are_told() -> None:
    source = (row + torch.rand(()) for row in ROWS)
    for loader in (source, DataLoader(OnePass(source), batch_size=4)):
        with pytest.warns(ResInitWarning, match="draws random numbers"):
            take_batch(loader)


def test_objects_with_slots_are_given_back_too() -> None:
    loader = Fixed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_batch(loader)
    assert [float(b) for b in loader] == ROWS.tolist()


def test_a_failing_collate_function_loses_nothing() -> None:
    def failing(rows: list[Any]) -> Tensor:
        raise KeyError("collate")

    loader = DataLoader(OnePass(items()), batch_size=4, collate_fn=failing)
    with pytest.raises(KeyError, match="collate"):
        take_batch(loader)
    assert [float(x) for x in loader.dataset] == ROWS.tolist()
