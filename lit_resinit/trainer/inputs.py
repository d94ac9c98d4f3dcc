"""Inputs for the trace, and a training step that leaves no trace."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from lit_resinit.errors import NoBranchError, ResInitError, TraceError
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
        _silence(module, trainer)
        return module(*args, **kwargs)

    return run


def training_step(trainer: Any, loader: Any = None) -> Run:
    """A runner for :func:`~lit_resinit.graph.trace.trace`: the training step on a batch, the rest silenced."""

    def run(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _silence(module, trainer, loader)
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


def _silence(module: nn.Module, trainer: Any, loader: Any = None) -> None:
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
