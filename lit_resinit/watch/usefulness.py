"""How useful each branch is: the loss with its gate closed minus the loss, how sure that is, and how it ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from lit_resinit.plan.values import Branch, ResidualPlan
from lit_resinit.watch.losses import Losses, LossFunction, evaluating, gated, of_all_ranks, parameters_of


def measure_usefulness(
    model: nn.Module,
    plan: ResidualPlan,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    *,
    progress: bool = True,
) -> dict[str, float]:
    """Ablate every branch: the mean loss with its gate closed, minus the mean loss.

    Args:
        model: The trained model.
        plan: Its plan.
        batches: A few batches; the same ones are used for every branch.
        loss_fn: ``loss_fn(model, batch)``, or ``loss_fn(output)`` for the output of ``model(*batch)``.
        progress: Show a progress bar, where the standard error stream is a terminal.

    Returns:
        Branch name to difference, in units of the loss; positive where the branch helps.

    Note:
        Evaluation mode, no gradients, one forward per branch and batch and one more; parameters, buffers, flags and
        the random state are put back bit for bit. Branches without a gate are left out.

    Example:
        >>> from lit_resinit import make_plan
        >>> layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8)
        >>> model = nn.TransformerEncoder(layer, num_layers=1)
        >>> plan = make_plan(model, x, scheme="observe")
        >>> sorted(measure_usefulness(model, plan, [x], lambda out: out.square().mean()))
        ['layers.0.linear2', 'layers.0.self_attn']
    """
    return ablate(model, plan, batches, loss_fn, progress=progress, joined=False, joint=False).means


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Ablation:
    """What closing each branch did to the loss of each batch.

    Args:
        names: Names of the branches that were closed, one at a time.
        losses: The loss of each batch with nothing closed, ``(batches,)``.
        by_batch: The loss with the branch closed, minus that, ``(batches, branches)``.
        joint: The loss with all of them closed at once, minus the loss; NaN where that was not measured.
    """

    names: tuple[str, ...]
    losses: Tensor
    by_batch: Tensor
    joint: float = math.nan

    @property
    def means(self) -> dict[str, float]:
        """Usefulness by branch: the mean over the batches."""
        return dict(zip(self.names, self.by_batch.mean(0).tolist(), strict=True))

    @property
    def errors(self) -> dict[str, float]:
        """Standard error of each mean, over the batches; NaN for a single batch."""
        count = len(self.by_batch)
        error = self.by_batch.std(0) / math.sqrt(count) if count > 1 else torch.full((len(self.names),), math.nan)
        return dict(zip(self.names, error.tolist(), strict=True))


def ablate(
    model: nn.Module,
    plan: ResidualPlan,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    *,
    progress: bool = False,
    joined: bool = True,
    joint: bool = True,
) -> Ablation:
    """Close every branch in turn, as :func:`measure_usefulness` does, and keep what each batch said.

    Args:
        model: The trained model.
        plan: Its plan.
        batches: A few batches.
        loss_fn: As there.
        progress: Whether a terminal shows a bar.
        joined: Whether the batches of all ranks of ``torch.distributed`` count, which all have to come here then.
        joint: Whether all of them are closed at once too.
    """
    parameters = parameters_of(model)
    branches, losses = gated(plan, parameters), Losses(model, batches, loss_fn)

    def measured() -> Tensor:
        rows = []
        for closed in sets:
            with _closed(closed, parameters):
                rows.append(torch.stack(losses.each(_value)))
            advance()
        return torch.stack(rows, 1).cpu().double()

    sets = [[], *([branches] if joint else []), *([branch] for branch in branches)]
    with evaluating(model), torch.no_grad(), _bar(len(sets), progress) as advance:
        table = of_all_ranks(measured, 0) if joined else measured()
    whole, all_closed = table[:, 0], float((table[:, 1] - table[:, 0]).mean()) if joint else math.nan
    return Ablation(tuple(b.name for b in branches), whole, table[:, 1 + joint :] - whole[:, None], all_closed)


def _value(loss: Tensor) -> Tensor:
    return loss.detach().float()


@contextlib.contextmanager
def _bar(total: int, progress: bool) -> Iterator[Callable[[], None]]:
    """A bar that is gone when it is full; its own console, since the Trainer's bar may still hold the other."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (progress and console.is_terminal)) as bar:
        task = bar.add_task("usefulness of the branches", total=total)
        yield lambda: bar.advance(task)


@contextlib.contextmanager
def _closed(branches: list[Branch], parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    gates = [g for b in branches for g in b.gates]
    names = dict.fromkeys(n for g in gates for n in (g.parameter, *g.biases))
    before = {n: parameters[n].detach().clone() for n in names}
    try:
        for gate in gates:
            gate.close_(parameters)
        yield
    finally:
        for name, value in before.items():
            parameters[name].copy_(value)
