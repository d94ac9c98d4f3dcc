"""Inputs for the trace, and a training step that leaves no trace."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lit_resinit.errors import NoBranchError, TraceError
from lit_resinit.graph.trace import Run
from lit_resinit.plan.make import as_arguments
from lit_resinit.trainer.batches import SMALL, replace_loader, take_batch, training_loader
from lit_resinit.trainer.standin import Optimizers, Silent, declared_optimizers, stand_in

_SILENCED = ("log", "log_dict", "print", "manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients")


def candidates(trainer: Any, module: Any, example_inputs: Any, tried: list[str]) -> Iterator[tuple[str, Any, Run]]:
    """(what, positional inputs, what runs on them) in the order in which they are tried."""
    if example_inputs is not None:
        yield "example_inputs", as_arguments(example_inputs), plain_forward(trainer)
        return
    array = getattr(module, "example_input_array", None)
    if array is not None:
        inputs = (array,) if isinstance(array, Tensor) else as_arguments(array)
        yield "example_input_array", inputs, plain_forward(trainer)
    try:
        loader = training_loader(trainer)
        for size in (SMALL, None):
            batch, kept = take_batch(loader, size, (trainer, module))
            if kept is not loader:
                replace_loader(trainer, kept)
                loader = kept
            yield "a batch of the training data", (batch,), training_step(trainer, loader)
    except (GeneratorExit, NoBranchError):
        raise
    except Exception as error:
        tried.append(f"the training data: {type(error).__name__}: {error}")


def plain_forward(trainer: Any) -> Run:
    """A runner for :func:`~lit_resinit.graph.trace.trace`: the module's forward, the rest silenced."""

    def run(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        silence(module, trainer)
        return module(*args, **kwargs)

    return run


def training_step(trainer: Any, loader: Any = None) -> Run:
    """A runner for :func:`~lit_resinit.graph.trace.trace`: the training step on a batch, the rest silenced."""

    def run(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        silence(module, trainer, loader)
        batch = args[0]
        batch = module.on_before_batch_transfer(batch, 0)
        batch = module.on_after_batch_transfer(batch, 0)
        return step(module, batch)

    return run


def step(module: Any, batch: Any) -> Any:
    """What a module's training step returns for a batch; for the next one, where it skips the first."""
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


def silence(module: nn.Module, trainer: Any, loader: Any = None) -> None:
    """Let a step of this module, or of its copy, reach neither loggers nor optimizers nor the Trainer."""
    image = stand_in(trainer, module, loader)
    for child in module.modules():
        if hasattr(child, "training_step"):
            vars(child)["_trainer"] = image
            vars(child).update(dict.fromkeys(_SILENCED, Silent()), lr_schedulers=lambda *a, **k: Optimizers())
            optimizers = Optimizers(declared_optimizers(child))
            vars(child)["optimizers"] = lambda *a, own=optimizers, **k: own


@contextlib.contextmanager
def apart(trainer: Any, module: nn.Module) -> Iterator[None]:
    """Inside, no module leads to its Trainer, so that whatever looks into the modules finds only what is theirs."""
    held = [(vars(m), vars(m)["_trainer"]) for m in module.modules() if "_trainer" in vars(m)]
    image = stand_in(trainer, module)
    try:
        for own, _ in held:
            own["_trainer"] = image
        yield
    finally:
        for own, before in held:
            own["_trainer"] = before
