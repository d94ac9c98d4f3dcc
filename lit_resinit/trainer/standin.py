"""A Trainer as a training step may read it: its numbers and names, none of its loops, loaders and collectives."""

from __future__ import annotations

import ast
import copy
import dis
import enum
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

_LIBRARY = ("lightning", "pytorch_lightning", "lightning_fabric")
_PLACE = ("world_size", "global_rank", "local_rank", "node_rank", "is_global_zero")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.device, torch.dtype, os.PathLike, type)


class Silent:
    """Takes every call and does nothing: stands in for a logger, a scheduler, a method of the Trainer's."""

    outside_the_network = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing."""
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: Any) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class Optimizers(Silent):
    """The optimizers of a module that were not built yet: one, or as many as the code asks for.

    ``a, b = self.optimizers()`` says itself how many there are; a loop gets as many as ``configure_optimizers``, which
    is read and never run, says that it returns.

    Args:
        declared: How many a loop gets.
    """

    def __init__(self, declared: int = 1) -> None:
        self._declared = declared
        self.param_groups: list[dict[str, Any]] = [{"params": [], "lr": 0.0}]
        self.defaults: dict[str, Any] = {"lr": 0.0}

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run the closure, which may be where the forward is."""
        return None if closure is None else closure()

    def get_last_lr(self) -> list[float]:
        """The rate of a scheduler that did not step yet, as far as known."""
        return [0.0]

    def __len__(self) -> int:
        return self._declared

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        asked = _unpacked(sys._getframe(1))
        return iter([self] * (self._declared if asked is None else asked))


def _unpacked(frame: FrameType) -> int | None:
    """How many values the running statement unpacks; None where it is no unpacking."""
    code, at = frame.f_code.co_code, frame.f_lasti
    name = dis.opname[code[at]]
    if name == "UNPACK_SEQUENCE":
        return code[at + 1]
    if name == "UNPACK_EX":  # a, *rest
        return code[at + 1] + 1
    return None


def declared_optimizers(module: Any) -> int:
    """How many optimizers ``configure_optimizers`` says that it returns, by its source; one where that is not plain."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(module).configure_optimizers)))
    except (OSError, TypeError, SyntaxError, AttributeError):
        return 1
    named = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def items(value: ast.expr | None) -> list[ast.expr] | None:
        value = named.get(value.id) if isinstance(value, ast.Name) else value
        return value.elts if isinstance(value, ast.List | ast.Tuple) else None

    for node in ast.walk(tree):
        found = items(node.value) if isinstance(node, ast.Return) else None
        if found:
            first = items(found[0]) if len(found) == 2 else None
            return len(found if first is None else first)
    return 1


# -------------------------------------------------------------------- the Trainer


class Image:
    """What one of the library's objects stores, to be read; its properties run on the image, its methods do nothing.

    What is written stays on the image. Objects of the user's are shown as shallow copies.

    Args:
        of: The object.
        world: What every object is shown as, by identity, so that one object has one image.
        own: Attributes that have another answer than the object's.
    """

    outside_the_network = True

    def __init__(self, of: Any, world: dict[int, Any], **own: Any) -> None:
        world[id(of)] = self
        vars(self).update(own, _image_of=of, _image_world=world)

    @property
    def __class__(self) -> type:
        return type(vars(self)["_image_of"])

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise TypeError("an image keeps its class")

    def __getattr__(self, name: str) -> Any:
        of, world = vars(self)["_image_of"], vars(self)["_image_world"]
        if name in vars(of):
            return _shown(vars(of)[name], world)
        found = inspect.getattr_static(type(of), name)  # AttributeError where there is none
        if isinstance(found, property) and found.fget is not None:
            try:
                return found.fget(self)
            except Exception:  # it asks for more than is there before the training; whoever reads it gets nothing
                return Silent()
        if callable(found) or isinstance(found, staticmethod | classmethod):
            return Silent()
        return _shown(found, world)

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("an image of the Trainer cannot be pickled")


def _shown(value: Any, world: dict[int, Any]) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if id(value) in world:
        return world[id(value)]
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {k: _shown(v, world) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and type(value) in (list, tuple, set, frozenset):
        return type(value)(_shown(v, world) for v in value)
    if isinstance(value, nn.Module) or (callable(value) and not hasattr(value, "__dict__")):
        return value
    if type(value).__module__.split(".")[0] in _LIBRARY:
        return Image(value, world)
    return _shallow(value, world)


def _shallow(value: Any, world: dict[int, Any]) -> Any:
    """A copy of an object of the user's, whose containers are its own and whose Trainer is the image."""
    try:
        twin = copy.copy(value)
    except Exception:  # what refuses to be copied is not shown
        world[id(value)] = Silent()
        return world[id(value)]
    world[id(value)] = twin
    for name, held in vars(twin).items() if hasattr(twin, "__dict__") else ():
        if id(held) in world:
            vars(twin)[name] = world[id(held)]
        elif isinstance(held, list | dict | set):
            vars(twin)[name] = copy.copy(held)
    return twin


def stand_in(trainer: Any, module: Any, loader: Any = None) -> Any:
    """What a training step may read of a Trainer that is about to fit a module.

    Args:
        trainer: The Trainer; nothing in what is returned leads back to its loops and loaders.
        module: The module that runs: the Trainer's own, or its copy.
        loader: The training data, where they are known.
    """
    world: dict[int, Any] = {id(trainer.lightning_module): module}
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    ranks = int(trainer.world_size)
    nothing = Silent()
    place = {name: getattr(trainer, name) for name in _PLACE}  # the environment tells these by methods
    Image(
        trainer.strategy,
        world,
        lightning_module=module,
        model=module,
        root_device=device,
        **place,
        optimizers=Optimizers(),
        _lightning_optimizers=Optimizers(),
        all_gather=lambda tensor, *a, **k: tensor if ranks == 1 else torch.stack([tensor] * ranks),
        reduce=lambda tensor, *a, **k: tensor,
        broadcast=lambda value, *a, **k: value,
        reduce_boolean_decision=lambda decision, *a, **k: decision,
    )
    shown = None if loader is None else _shallow(loader, world)
    image = Image(
        trainer,
        world,
        lightning_module=module,
        model=module,
        **place,
        train_dataloader=shown,
        val_dataloaders=None,
        num_training_batches=_batches(trainer, loader),
        log_dir=str(trainer.default_root_dir),
        logger=nothing,
        loggers=[nothing],
        optimizers=Optimizers(),
        lr_scheduler_configs=Optimizers(),
        callback_metrics={},
        logged_metrics={},
        progress_bar_metrics={},
    )
    vars(image)["estimated_stepping_batches"] = _steps(image)
    vars(image)["strategy"] = world[id(trainer.strategy)]
    return image


def _batches(trainer: Any, loader: Any) -> int | float:
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        return float("inf")
    limit = getattr(trainer, "limit_train_batches", 1.0)
    return min(length, limit) if isinstance(limit, int) else int(length * limit)


def _steps(image: Any) -> int | float:
    """``estimated_stepping_batches`` by its definition: optimizer steps of the whole training, as far as known."""
    epochs, batches = image.max_epochs, image.num_training_batches
    most: int | float = float("inf") if image.max_steps == -1 else image.max_steps
    if epochs in (-1, None) or batches == float("inf"):
        return most
    steps: int | float = -(-batches // image.accumulate_grad_batches) * max(epochs, 1)
    return min(steps, most)
