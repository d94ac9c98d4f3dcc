"""Losses of a network with its gates as they are, or closed: what every measurement of usefulness is made of."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lit_resinit.errors import ResInitError
from lit_resinit.graph.eager import eager
from lit_resinit.graph.keep import keep_rng, keep_state
from lit_resinit.graph.tensors import is_sharded
from lit_resinit.graph.where import clean_name
from lit_resinit.plan.make import as_arguments
from lit_resinit.plan.values import Branch, ResidualPlan

LossFunction = Callable[..., Tensor]


class Losses:
    """The loss of a network on fixed batches, each time with the same random numbers.

    Args:
        model: The model.
        batches: The batches, the same ones each time.
        loss_fn: ``loss_fn(model, batch)``, or ``loss_fn(output)`` for the output of ``model(*batch)``.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._of_output = len(inspect.signature(loss_fn).parameters) == 1
        self._batches = [tree_map(_usable, batch) for batch in batches]

    def each(self, use: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """What is made of the loss of each batch; the generators are where they were afterwards.

        Raises:
            ResInitError: If there is no batch.
        """
        if not self._batches:
            raise ResInitError("measuring usefulness: expected at least one batch, found none.")
        with keep_rng():
            return [use(self._of(batch)) for batch in self._batches]

    def _of(self, batch: Any) -> Tensor:
        if self._of_output:
            return self._loss_fn(self._model(*as_arguments(batch)))
        return self._loss_fn(self._model, batch)


def _usable(value: Any) -> Any:
    """A tensor that was made in inference mode as one that a backward pass may keep."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, uncompiled, and everything put back: parameters, buffers, gradients, flags, generators."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(keep_rng())
        stack.enter_context(keep_state(model))
        stack.enter_context(eager())
        for module in model.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):  # a forward would wait for its backward
                stack.enter_context(module.no_sync())
        model.eval()
        yield


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter, by all of its names."""
    return {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}


def gated(plan: ResidualPlan, parameters: Mapping[str, Tensor]) -> list[Branch]:
    """The branches that can be closed: those with gates that are there.

    Raises:
        ResInitError: If several ranks hold a part of a gate each.
    """
    branches = [b for b in plan.active if b.gates and all(g.parameter in parameters for g in b.gates)]
    sharded = [g.parameter for b in branches for g in b.gates if is_sharded(parameters[g.parameter])]
    if sharded:
        raise ResInitError(
            f"measuring usefulness: expected whole parameters, found {sharded[0]} and {len(sharded) - 1} other gates "
            "spread over ranks. Measure on the gathered model, after the training."
        )
    return branches


def has_gates(plan: ResidualPlan, model: nn.Module) -> bool:
    """Whether there is a branch that can be closed; with a constant in place of a gate there is none."""
    parameters = parameters_of(model)
    return any(b.gates and all(g.parameter in parameters for g in b.gates) for b in plan.active)


# -------------------------------------------------------------------- over ranks


def of_all_ranks(work: Callable[[], Tensor], dim: int) -> Tensor:
    """What every rank of ``torch.distributed`` found, one after the other along an axis; every rank has to come here.

    Raises:
        Exception: What went wrong on this rank; a :class:`ResInitError` where it was another one.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return work()
    found, error = _attempt(work)
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, (found, None if error is None else str(error)))
    if error is not None:
        raise error
    failed = next(((rank, text) for rank, (_, text) in enumerate(everywhere) if text is not None), None)
    if failed is not None:
        raise ResInitError(f"measuring usefulness: rank {failed[0]} failed: {failed[1]}")
    return torch.cat([part for part, _ in everywhere], dim)


def _attempt(work: Callable[[], Tensor]) -> tuple[Tensor | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # every rank has to come to the gathering
        return None, error
