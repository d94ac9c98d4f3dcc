"""How useful each branch is: the loss with its gate closed minus the loss."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit.plan import Branch, ResidualPlan, as_arguments
from lit_resinit.trace import clean_name, keep_rng, keep_state


def measure_usefulness(
    model: nn.Module, plan: ResidualPlan, batches: Iterable[Any], loss_fn: Callable[..., Tensor]
) -> dict[str, float]:
    """Ablate every branch: the mean loss with its gate closed, minus the mean loss.

    Args:
        model: The trained model.
        plan: Its plan.
        batches: A few batches; the same ones are used for every branch.
        loss_fn: ``loss_fn(model, batch)``, or ``loss_fn(output)`` for the output of ``model(*batch)``.

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
    with keep_rng(), keep_state(model), torch.no_grad():
        model.eval()
        whole = _mean_loss(model, kept, loss_fn)
        result = {}
        for branch in branches:
            with _closed(branch, parameters):
                result[branch.name] = _mean_loss(model, kept, loss_fn) - whole
    return result


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
