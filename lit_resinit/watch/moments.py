"""Moments of stream and branch at every planned addition, and the numbers of every gate."""

from __future__ import annotations

import math
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from lit_resinit.find.gates import Gate
from lit_resinit.graph import ops
from lit_resinit.graph.tensors import is_not_forward, mean_and_variance, measuring, whole
from lit_resinit.graph.values import Graph
from lit_resinit.graph.where import clean_name, locate, module_names
from lit_resinit.judge.compare import Addition, AtAdditions
from lit_resinit.plan.values import ResidualPlan


class Moments(torchmetrics.Metric):
    """Count, mean and sum of squared deviations of several streams of numbers, merged exactly.

    Two parts with ``(n, mean, M2)`` merge to ``M2 = M2a + M2b + d^2 na nb / (na + nb)`` with ``d = meanb - meana``.

    As input to ``update``: ``count``, ``mean`` and ``variance`` (population), each a float32 tensor of shape
    ``(size,)``; a count of zero leaves an entry alone. As output of ``compute``: the population variance, ``(size,)``,
    NaN where nothing was seen.

    Args:
        size: Number of streams.

    Example:
        >>> moments = Moments(2)
        >>> moments.update(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]))
        >>> moments.update(torch.tensor([2.0, 0.0]), torch.tensor([3.0, 0.0]), torch.tensor([1.0, 0.0]))
        >>> moments.compute()
        tensor([2., nan])

    Reference:
        Chan, Golub and LeVeque (1983), Algorithms for Computing the Sample Variance.
    """

    full_state_update = False
    count: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        for name in ("count", "mean", "squares"):
            self.add_state(name, default=torch.zeros(size), dist_reduce_fx=None)

    def update(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        """Add one part."""
        parts = [torch.stack(pair) for pair in zip(self._parts(), (count, mean, variance * count), strict=True)]
        self.count, self.mean, self.squares = _merge(*parts)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.count, self.mean, self.squares

    def compute(self) -> Tensor:
        """Population variance of everything seen, over all ranks."""
        parts = self._parts()
        count, _, squares = _merge(*parts) if self.count.ndim == 2 else parts
        return torch.where(count > 0, squares / count.clamp(min=1.0), math.nan)


def _merge(count: Tensor, mean: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge parts along the first axis."""
    total = count.sum(0)
    safe = total.clamp(min=1.0)
    joint = (count * mean).sum(0) / safe
    return total, joint, (squares + count * (mean - joint).square()).sum(0)


class Measured:
    """What was measured of stream and branch at the planned additions, left on the device until :meth:`moments`."""

    def __init__(self, plan: ResidualPlan) -> None:
        self._size = len(plan.branches)
        self._stream: Tensor | None = None
        self._seen: dict[int, list[tuple[Tensor, Tensor, int]]] = {}  # branch -> (mean, variance, count) twice

    def before(self, addition: Addition) -> None:
        """Measure while both summands are as they were."""
        if addition.value is not None:
            self._measure(addition.index, addition.stream, addition.value)
        else:
            self._stream = addition.kept_stream()

    def after(self, addition: Addition, out: Tensor) -> None:
        """Where the operation fuses the branch, it is what was added."""
        stream, self._stream = self._stream, None
        if stream is not None:
            self._measure(addition.index, stream, out - stream)

    def _measure(self, index: int, stream: Tensor, branch: Tensor) -> None:
        rows = self._seen.setdefault(index, [])
        for tensor in (stream, branch):
            mean, variance = mean_and_variance(tensor)
            rows.append((mean, variance, tensor.numel()))

    def moments(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """(count, mean, variance) of stream and branch, ``(2 * branches,)`` each; empties what was collected."""
        seen, self._seen = self._seen, {}
        if not seen:
            return None
        device = next(iter(seen.values()))[0][0].device
        with measuring():
            count, mean, variance = (torch.zeros(2 * self._size, device=device) for _ in range(3))
            index = torch.tensor([2 * i + j for i in seen for j in (0, 1)], device=device)
            rows = [row for pair in seen.values() for row in pair[-2:]]
            count[index] = torch.tensor([float(n) for _, _, n in rows], device=device)
            mean[index] = torch.stack([m.to(mean) for m, _, _ in rows])
            variance[index] = torch.stack([v.to(variance) for _, v, _ in rows])
        return count, mean, variance


class Watcher(TorchDispatchMode):
    """Context manager that measures stream and branch at every planned addition of one forward.

    It records nothing: operations other than the planned kinds of addition pass untouched; a backward pass inside is
    ignored, so that recomputation is not counted twice.

    Args:
        model: The model, with the plan applied.
        plan: The plan.
        measured: Where the measurements go; a place of its own when None.
    """

    def __init__(self, model: nn.Module, plan: ResidualPlan, measured: Measured | None = None) -> None:
        super().__init__()
        self._names = module_names(model)
        self._measured = Measured(plan) if measured is None else measured
        self._additions = AtAdditions(plan, (self._measured,))

    def __enter__(self) -> Watcher:
        self._additions.start(Graph())
        return super().__enter__()  # type: ignore[no-any-return]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if ops.base_name(func) not in self._additions.kinds or is_not_forward(func):
            return func(*args, **kwargs)
        self._additions.begin(*locate(self._names, 2), func, args, kwargs)
        out = func(*args, **kwargs)
        self._additions.end(out)
        return out

    def moments(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """(count, mean, variance) of stream and branch, ``(2 * branches,)`` each; empties what was collected."""
        return self._measured.moments()


def gate_statistics(model: nn.Module, plan: ResidualPlan) -> Tensor:
    """Gate (signed for a scalar, else root mean square), largest ``|gate|``, gradient RMS and ``|sum g dL/dg|``.

    A gate is measured as its distance from the closing value, so that a closed gate is zero.

    Returns:
        ``(4, branches)``, float32, on the device; NaN where a branch has no gate or a gate no gradient.
    """
    wanted = {g.parameter for b in plan.branches for g in b.gates}
    named = ((clean_name(n), p) for n, p in model.named_parameters(remove_duplicate=False))
    gates = {n: (whole(p).detach(), _dense(p.grad)) for n, p in named if n in wanted}
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
        slopes = None if grads[0] is None else torch.stack(grads).flatten(1).float()
        columns = _statistics(torch.stack(values).flatten(1).float() - closing, slopes)
        found |= dict(zip(gates, columns.unbind(1), strict=True))
    return found


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
