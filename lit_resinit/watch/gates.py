"""The numbers of every gate: its size, its gradient, and what the two say of its use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit.find.gates import Gate
from lit_resinit.graph.tensors import measuring, whole
from lit_resinit.graph.where import clean_name
from lit_resinit.plan.values import ResidualPlan


def gate_statistics(model: nn.Module, plan: ResidualPlan) -> Tensor:
    """Gate (signed for a scalar, else root mean square), largest ``|gate|``, gradient RMS and ``|sum g dL/dg|``.

    A gate is measured as its distance from the closing value, so that a closed gate is zero.

    Returns:
        ``(4, branches)``, float32, on the device; NaN where a branch has no gate or a gate no gradient.
    """
    wanted = {g.parameter for b in plan.branches for g in b.gates}
    named = ((clean_name(n), p) for n, p in model.named_parameters(remove_duplicate=False))
    gates = {n: (whole(p).detach(), _dense(p.grad if p.requires_grad else None)) for n, p in named if n in wanted}
    with measuring():
        found = _statistics_of(plan, gates)
        device = next((c.device for c in found.values()), torch.device("cpu"))
        empty = torch.full((4,), math.nan, device=device)
        columns = [_joined([found[k] for k in map(_key, b.gates) if k in found], empty) for b in plan.branches]
        return torch.stack([c.to(device) for c in columns], dim=1) if columns else empty[:, None]


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


def _in_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as float32 rows; one element of a shared parameter has no dimension of its own."""
    return torch.stack(list(tensors)).reshape(len(tensors), -1).float()


def _statistics(distance: Tensor, slope: Tensor | None) -> Tensor:
    """The four numbers of ``(gates, elements)``, as ``(4, gates)``."""
    size = distance[:, 0] if distance.shape[1] == 1 else distance.square().mean(1).sqrt()
    largest = distance.abs().amax(1)
    if slope is None:
        nothing = torch.full_like(size, math.nan)
        return torch.stack([size, largest, nothing, nothing])
    return torch.stack([size, largest, slope.square().mean(1).sqrt(), (distance * slope).sum(1).abs()])


def _joined(rows: list[Tensor], empty: Tensor) -> Tensor:
    """The numbers of a branch with several gates, or none."""
    if len(rows) < 2:
        return rows[0] if rows else empty
    stacked = torch.stack([r.to(empty.device) for r in rows])
    rms = stacked.square().mean(0).sqrt()
    return torch.stack([rms[0], stacked[:, 1].amax(), rms[2], stacked[:, 3].sum()])
