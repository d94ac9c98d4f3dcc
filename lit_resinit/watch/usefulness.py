"""How useful each branch is: the loss with its gate closed minus the loss; and what else agrees with that."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from lit_resinit.graph.keep import keep_rng, keep_state
from lit_resinit.graph.where import clean_name
from lit_resinit.plan.make import as_arguments
from lit_resinit.plan.values import Branch, ResidualPlan
from lit_resinit.watch.history import History


def measure_usefulness(
    model: nn.Module,
    plan: ResidualPlan,
    batches: Iterable[Any],
    loss_fn: Callable[..., Tensor],
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
    kept = list(batches)
    parameters = {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    branches = [b for b in plan.active if b.gates and all(g.parameter in parameters for g in b.gates)]
    with keep_rng(), keep_state(model), torch.no_grad(), _bar(len(branches) + 1, progress) as advance:
        model.eval()
        whole = _mean_loss(model, kept, loss_fn)
        advance()
        result = {}
        for branch in branches:
            with _closed(branch, parameters):
                result[branch.name] = _mean_loss(model, kept, loss_fn) - whole
            advance()
    return result


@contextlib.contextmanager
def _bar(total: int, progress: bool) -> Iterator[Callable[[], None]]:
    """A bar that is gone when it is full; its own console, since the Trainer's bar may still hold the other."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (progress and console.is_terminal)) as bar:
        task = bar.add_task("usefulness of the branches", total=total)
        yield lambda: bar.advance(task)


@contextlib.contextmanager
def _closed(branch: Branch, parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    names = dict.fromkeys(n for g in branch.gates for n in (g.parameter, *g.biases))
    before = {n: parameters[n].detach().clone() for n in names}
    try:
        for gate in branch.gates:
            target = parameters[gate.parameter]
            (target if gate.index is None else target[gate.index]).fill_(gate.value)
            for bias in gate.biases:
                parameters[bias].zero_()
        yield
    finally:
        for name, value in before.items():
            parameters[name].copy_(value)


def _mean_loss(model: nn.Module, batches: list[Any], loss_fn: Callable[..., Tensor]) -> float:
    one = len(inspect.signature(loss_fn).parameters) == 1
    state = torch.get_rng_state()
    losses = []
    for batch in batches:
        losses.append(loss_fn(model(*as_arguments(batch))) if one else loss_fn(model, batch))
    torch.set_rng_state(state)
    return float(torch.stack([loss.detach().float() for loss in losses]).mean())


# -------------------------------------------------------------------- what agrees with it


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """Spearman's rank correlation of something with usefulness, and what chance gives.

    Args:
        what: What was compared with usefulness.
        correlation: From -1 to 1; NaN where it is not defined (fewer than three branches, or all values equal).
        low: Lower end of the interval in which 95 of 100 random orders fall.
        high: Its upper end.
        branches: How many branches were compared.
    """

    what: str
    correlation: float
    low: float
    high: float
    branches: int

    @property
    def beyond_chance(self) -> bool:
        """Whether the correlation lies outside the interval of random orders."""
        return not math.isnan(self.correlation) and not self.low <= self.correlation <= self.high

    def __str__(self) -> str:
        if math.isnan(self.correlation):
            few = f"over {self.branches} branches (too few, or all equal)."
            return f"usefulness and {self.what}: no rank correlation {few}"
        verdict = "beyond chance" if self.beyond_chance else "not told from chance"
        return (
            f"usefulness and {self.what}: Spearman correlation {self.correlation:+.2f} over {self.branches} branches; "
            f"random orders give {self.low:+.2f} to {self.high:+.2f} (95 %): {verdict}."
        )


def rank_agreement(what: str, values: Tensor, usefulness: Tensor, permutations: int = 1000) -> Agreement:
    """Compare the ranks of two rows of numbers, with the interval that random orders give.

    Args:
        what: What the values are, for the report.
        values: ``(branches,)``; NaN leaves a branch out.
        usefulness: ``(branches,)``; NaN leaves a branch out.
        permutations: Number of random orders; always the same ones, and the global random state is not used.

    Returns:
        The correlation, and the 2.5 % and 97.5 % quantiles over the random orders.

    Example:
        >>> rank_agreement("x", torch.arange(8.0), torch.arange(8.0).square()).correlation
        1.0
    """
    known = values.isfinite() & usefulness.isfinite()
    x, y = values[known].double(), usefulness[known].double()
    count = int(known.sum())
    if count < 3 or bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return Agreement(what, math.nan, math.nan, math.nan, count)
    from torchmetrics.functional import spearman_corrcoef  # slow to import

    generator = torch.Generator().manual_seed(0)
    orders = torch.stack([torch.randperm(count, generator=generator) for _ in range(permutations)], dim=1)
    by_chance = spearman_corrcoef(x[orders], y[:, None].expand(-1, permutations).contiguous())
    low, high = torch.quantile(by_chance, torch.tensor([0.025, 0.975], dtype=by_chance.dtype)).tolist()
    return Agreement(what, round(float(spearman_corrcoef(x, y)), 6), low, high, count)


def agreements(history: History, usefulness: dict[str, float]) -> tuple[Agreement, Agreement]:
    """How usefulness agrees with early switching on, and with the first-order estimate of the last record.

    Args:
        history: The history of the run; branches that never switched on share the last rank.
        usefulness: What :func:`measure_usefulness` returned.

    Returns:
        (early switching on, first-order estimate ``|sum g * dL/dg|`` against the size of the usefulness).

    Example:
        >>> early, _ = agreements(History(["a"]), {"a": 0.1})
        >>> str(early)
        'usefulness and early switching on: no rank correlation over 1 branches (too few, or all equal).'
    """
    names = history.branches
    order = {name: place for place, name in enumerate(history.order())}
    apart = set(history.open_from_start())  # these have no place in the order
    early = torch.tensor([math.nan if n in apart else -float(order.get(n, len(order))) for n in names])
    found = torch.tensor([usefulness.get(name, math.nan) for name in names])
    saliency = history.newest("saliency") if len(history) else torch.full((len(names),), math.nan)
    return (
        rank_agreement("early switching on", early, found),
        rank_agreement("its first-order estimate", saliency, found.abs()),
    )
