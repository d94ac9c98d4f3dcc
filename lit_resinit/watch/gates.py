"""The numbers of every gate: its size, its gradient, and what the two say of its use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit.find.gates import Gate
from lit_resinit.graph.tensors import as_wide, measuring, whole
from lit_resinit.graph.where import clean_name
from lit_resinit.plan.values import ResidualPlan


def gate_statistics(model: nn.Module, plan: ResidualPlan) -> Tensor:
    """Gate (signed for a scalar, else root mean square), largest ``|gate|``, gradient RMS and saliency.

    A gate is measured as its distance from the closing value, so that a closed gate is zero. The saliency is
    ``sum g dL/dg + sum b dL/db``, ``b`` being what is added after the gate and closed with it: exactly the product of
    the branch with the error that arrives there, where the gate is a norm, a scale or a last layer.

    Returns:
        ``(4, branches)``, float32, on the device; NaN where a branch has no gate or a gate no gradient.
    """
    wanted = {n for b in plan.branches for g in b.gates for n in (g.parameter, *g.biases)}
    named = ((clean_name(n), p) for n, p in model.named_parameters(remove_duplicate=False))
    parameters = {n: (whole(p).detach(), _dense(p.grad if p.requires_grad else None)) for n, p in named if n in wanted}
    with measuring():
        found = _statistics_of(plan, parameters)
        device = next((c.device for c in found.values()), torch.device("cpu"))
        empty = torch.full((4,), math.nan, device=device)
        columns = [_joined([found[k] for k in map(_key, b.gates) if k in found], empty) for b in plan.branches]
        if not columns:
            return empty[:, None]
        table = torch.stack([c.to(device) for c in columns], dim=1)
        table[3] += _bias_products(plan, parameters, device)
        return table


def _key(gate: Gate) -> tuple[str, int | None]:
    return gate.parameter, gate.index


def _dense(grad: Tensor | None) -> Tensor | None:
    return None if grad is None or grad.is_sparse else whole(grad)


def _statistics_of(
    plan: ResidualPlan, parameters: dict[str, tuple[Tensor, Tensor | None]]
) -> dict[tuple[str, int | None], Tensor]:
    """Four numbers for every gate; scalars of one kind are measured together, for they may be thousands."""
    alike: dict[tuple[Any, ...], dict[tuple[str, int | None], tuple[Tensor, Tensor | None]]] = {}
    for gate in {_key(g): g for b in plan.branches for g in b.gates if g.parameter in parameters}.values():
        value, grad = parameters[gate.parameter]
        if gate.index is not None:
            value, grad = value[gate.index], None if grad is None else grad[gate.index]
        own = () if value.numel() == 1 else _key(gate)
        kind = (gate.value, grad is None, value.dtype, value.device, value.shape, own)
        alike.setdefault(kind, {})[_key(gate)] = value, grad
    found: dict[tuple[str, int | None], Tensor] = {}
    for (closing, *_), gates in alike.items():
        values, grads = zip(*gates.values(), strict=True)
        slopes = None if grads[0] is None else _in_rows(grads)
        columns = _statistics(_in_rows(values) - closing, slopes)
        found |= dict(zip(gates, columns.unbind(1), strict=True))
    return found


def _bias_products(
    plan: ResidualPlan, parameters: dict[str, tuple[Tensor, Tensor | None]], device: torch.device
) -> Tensor:
    """``sum b dL/db`` over what is closed with the gates of each branch, ``(branches,)``; tensors alike are one tensor.

    Without a gradient a bias of zero contributes nothing, and another one an unknown number.
    """
    own = [[n for n in dict.fromkeys(n for g in b.gates for n in g.biases) if n in parameters] for b in plan.branches]
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name in dict.fromkeys(n for names in own for n in names):
        value, grad = parameters[name]
        alike.setdefault((value.shape, value.dtype, value.device, grad is None), []).append(name)
    products: dict[str, Tensor] = {}
    for (*_, unknown), names in alike.items():
        values = _in_rows([parameters[n][0] for n in names])
        if unknown:
            rows = torch.where((values != 0).any(1), math.nan, 0.0)
        else:
            rows = (values * _in_rows([g for n in names if (g := parameters[n][1]) is not None])).sum(1)
        products |= dict(zip(names, rows.to(device).unbind(), strict=True))
    total = torch.zeros(len(own), device=device)
    chosen = [(i, products[n]) for i, names in enumerate(own) for n in names]
    if chosen:
        index = torch.tensor([i for i, _ in chosen], device=device)
        total.index_add_(0, index, torch.stack([p for _, p in chosen]))
    return total


def _in_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as float32 rows; one element of a shared parameter has no dimension of its own."""
    return as_wide(torch.stack(list(tensors))).reshape(len(tensors), -1).float()


def _statistics(distance: Tensor, slope: Tensor | None) -> Tensor:
    """The four numbers of ``(gates, elements)``, as ``(4, gates)``."""
    size = distance[:, 0] if distance.shape[1] == 1 else distance.square().mean(1).sqrt()
    largest = distance.abs().amax(1)
    if slope is None:
        nothing = torch.full_like(size, math.nan)
        return torch.stack([size, largest, nothing, nothing])
    return torch.stack([size, largest, slope.square().mean(1).sqrt(), (distance * slope).sum(1)])


def _joined(rows: list[Tensor], empty: Tensor) -> Tensor:
    """The numbers of a branch with several gates, or none."""
    if len(rows) < 2:
        return rows[0] if rows else empty
    stacked = torch.stack([r.to(empty.device) for r in rows])
    rms = stacked.square().mean(0).sqrt()
    return torch.stack([rms[0], stacked[:, 1].amax(), rms[2], stacked[:, 3].sum()])
