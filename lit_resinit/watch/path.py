"""The gate path: what each branch takes off the loss, signed, adding up, at a cost that does not grow with depth."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_resinit.errors import ResInitError
from lit_resinit.graph.checkpoints import passable_checkpoints
from lit_resinit.graph.tensors import as_wide
from lit_resinit.plan.values import ResidualPlan
from lit_resinit.watch.losses import Losses, LossFunction, evaluating, gated, of_all_ranks, parameters_of

# points on the path from closed (0) to open (1), with their weights
SIMPSON = {0.0: 1 / 6, 0.5: 4 / 6, 1.0: 1 / 6}
FIVE = {0.0: 1 / 12, 0.25: 4 / 12, 0.5: 2 / 12, 0.75: 4 / 12, 1.0: 1 / 12}
MIDPOINTS = {1 / 6: 1 / 3, 0.5: 1 / 3, 5 / 6: 1 / 3}
OFF = 0.2  # part of the joint effect that the sum may miss before two points more are taken


class Attribution(dict[str, float]):
    """Branch name to what the branch takes off the loss, in units of the loss; negative where it adds to it.

    Attributes:
        loss: The loss, with every gate as it is.
        joint: The loss with all gates closed, minus the loss; NaN or infinite where the closed network has no loss.
        points: On how many points of the path it was measured.
        by_batch: The same of every batch, of all ranks, ``(batches, branches)``.
    """

    def __init__(self, names: Iterable[str], by_batch: Tensor, loss: float, joint: float, points: int) -> None:
        super().__init__(zip(names, by_batch.mean(0).tolist(), strict=True))
        self.by_batch, self.loss, self.joint, self.points = by_batch, loss, joint, points

    @property
    def total(self) -> float:
        """The sum over all branches, which should be the joint effect."""
        return math.fsum(self.values())


def attribute(
    model: nn.Module,
    plan: ResidualPlan,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    *,
    points: Literal[3, 5] | None = None,
    scale: float = 1.0,
) -> Attribution:
    """Measure what each branch takes off the loss, all at once: integrated gradients along the gates.

    All gates go together from their closing value ``c`` to their value ``g``, at ``c + a (g - c)``, and what is closed
    with them at ``a b``. A branch gets ``- sum_k w_k sum ((g - c) dL/dg + b dL/db)``, over ``a = 0, 1/2, 1`` with
    Simpson's weights ``1/6, 4/6, 1/6``. In the limit of many points the branches add up to the joint effect, the
    loss with all gates closed minus the loss. Where three points miss that by more than 20 %, two more are taken; where
    the closed network has no finite loss or gradient, the midpoints ``1/6, 1/2, 5/6`` are.

    Args:
        model: The model, with the plan applied.
        plan: Its plan.
        batches: A few batches, best of data held out.
        loss_fn: ``loss_fn(model, batch)``, or ``loss_fn(output)`` for the output of ``model(*batch)``; a mean over the
            batch.
        points: How many points are taken, where the closed network has a finite loss; as many as needed when None.
        scale: Factor on the loss before the backward pass, as a gradient scaler has it, for float16.

    Returns:
        Branch name to attribution, and ``loss``, ``joint``, ``total`` and ``points``. Branches without a gate are left
        out; those that share a gate get equal parts.

    Raises:
        ResInitError: If there is no batch, the loss has no gradient, or gates are spread over ranks.

    Note:
        Evaluation mode, three forward and backward passes for each batch (five, where three do not do), whatever the
        depth. Gradients are asked for gates and closing biases only, and no ``.grad`` is touched; parameters, buffers,
        flags and the random state are put back bit for bit. Compiled modules run uncompiled. Over the ranks of
        ``torch.distributed`` the batches of all are averaged, so that every rank has to come here.

    Example:
        >>> from lit_resinit import make_plan
        >>> layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8)
        >>> model = nn.TransformerEncoder(layer, num_layers=1)
        >>> found = attribute(model, make_plan(model, x, scheme="observe"), [x], lambda out: out.square().mean())
        >>> sorted(found), found.points in (3, 5)
        (['layers.0.linear2', 'layers.0.self_attn'], True)

    Reference:
        Sundararajan, Taly and Yan (2017), Axiomatic Attribution for Deep Networks, arXiv:1703.01365; Aumann and Shapley
        (1974), Values of Non-Atomic Games.
    """
    with evaluating(model), torch.enable_grad(), passable_checkpoints():
        path = _Path(model, plan, batches, loss_fn, scale)
        try:
            return path.follow(points)
        finally:
            path.go_back()


class _Path:
    """The straight way of all gates and closing biases from closed to open, and the gradients along it."""

    def __init__(
        self, model: nn.Module, plan: ResidualPlan, batches: Iterable[Any], loss_fn: LossFunction, scale: float
    ) -> None:
        parameters = parameters_of(model)
        branches = gated(plan, parameters)
        self._names = [b.name for b in branches]
        self._losses, self._scale = Losses(model, batches, loss_fn), scale
        parts = [[(g.parameter, g.index) for g in b.gates] for b in branches]
        biases = [[(n, None) for g in b.gates for n in g.biases if n in parameters] for b in branches]
        named = [dict.fromkeys([*p, *q]) for p, q in zip(parts, biases, strict=True)]
        self._moving = {id(parameters[n]): parameters[n] for keys in named for n, _ in keys}
        # names of one tensor are one part; a part that several branches have is shared equally
        own = [{(id(parameters[n]), index): None for n, index in keys} for keys in named]
        self._parts = list(dict.fromkeys(part for keys in own for part in keys))
        self._shares = torch.zeros(len(self._parts), len(branches), dtype=torch.float64)
        place = {part: i for i, part in enumerate(self._parts)}
        for position, keys in enumerate(own):
            self._shares[[place[part] for part in keys], position] = 1.0
        self._shares /= self._shares.sum(1, keepdim=True)
        with torch.no_grad():
            self._open = {key: p.detach().clone() for key, p in self._moving.items()}
            self._closed = {key: value.clone() for key, value in self._open.items()}
        by_name = {n: self._closed[id(parameters[n])] for keys in named for n, _ in keys}
        for gate in (g for b in branches for g in b.gates):
            gate.close_(by_name)
        self._way = {key: _wide(self._open[key]) - _wide(self._closed[key]) for key in self._moving}
        for parameter in self._moving.values():
            parameter.requires_grad_(True)

    def follow(self, points: int | None) -> Attribution:
        """Take so many points, or as many as it needs."""
        if not any(bool(way.any()) for way in self._way.values()):  # everything is closed
            (rows,) = self._at([1.0])
            nothing = torch.zeros(len(rows), len(self._names))
            return Attribution(self._names, nothing, float(rows[:, 0].mean()), 0.0, 1)
        rows = dict(zip(SIMPSON, self._at(SIMPSON), strict=True))
        loss = float(rows[1.0][:, 0].mean())
        joint = float(rows[0.0][:, 0].mean()) - loss
        weights = SIMPSON
        if not bool(rows[0.0].isfinite().all()):
            weights = MIDPOINTS
        elif points == 5 or (points is None and _is_off(_weighted(weights, rows), joint)):
            weights = FIVE
        more = [a for a in weights if a not in rows]
        if more:
            rows |= dict(zip(more, self._at(more), strict=True))
        return Attribution(self._names, _weighted(weights, rows), loss, joint, len(weights))

    def go_back(self) -> None:
        """Put the gates back, bit for bit."""
        self._go_to(1.0)

    def _at(self, points: Iterable[float]) -> Tensor:
        """Loss, then the product of gradient and way by branch, ``(points, batches, 1 + branches)``, of all ranks."""
        return of_all_ranks(lambda: self._measured(list(points)), 1)

    def _measured(self, points: list[float]) -> Tensor:
        rows = []
        for point in points:
            self._go_to(point)
            rows.append(self._losses.each(self._products))
        parts = torch.stack([torch.stack(row) for row in rows]).cpu().double()
        return torch.cat([parts[..., :1], parts[..., 1:] @ self._shares], -1)

    @torch.no_grad()
    def _go_to(self, point: float) -> None:
        for key, parameter in self._moving.items():
            if point in (0.0, 1.0):  # the very bits
                parameter.copy_((self._closed if point == 0.0 else self._open)[key])
            else:
                parameter.copy_(_wide(self._closed[key]) + point * self._way[key])

    def _products(self, loss: Tensor) -> Tensor:
        """The loss, then the product of gradient and way of every part."""
        device, value = loss.device, loss.detach().float().reshape(1)
        if not self._moving:
            return value
        if not loss.requires_grad:
            raise ResInitError(
                "measuring the gate path: expected a loss with a gradient, found one that no gate leads to. Return the "
                "loss tensor itself, neither detached nor as a number."
            )
        found = torch.autograd.grad(loss * self._scale, list(self._moving.values()), allow_unused=True)
        grads = dict(zip(self._moving, found, strict=True))
        sums = []
        for key, index in self._parts:
            grad, way = grads[key], self._way[key]
            if grad is None:
                sums.append(torch.zeros((), device=device))
                continue
            grad = grad.to_dense() if grad.is_sparse else grad
            grad, way = (grad, way) if index is None else (grad[index], way[index])
            sums.append((as_wide(grad) * as_wide(way)).sum().to(device, torch.float32))
        return torch.cat([value, torch.stack(sums) / self._scale])


def _is_off(by_batch: Tensor, joint: float) -> bool:
    """Whether the sum over the branches misses the joint effect."""
    return abs(float(by_batch.mean(0).sum()) - joint) > OFF * abs(joint)


def _wide(tensor: Tensor) -> Tensor:
    """Half precision as float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _weighted(weights: dict[float, float], rows: dict[float, Tensor]) -> Tensor:
    """Attribution of every batch, ``(batches, branches)``."""
    return torch.stack([-weight * rows[a][:, 1:] for a, weight in weights.items()]).sum(0)
