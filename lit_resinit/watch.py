"""Watch the blocks switch on: moments per branch on logging steps, and their history."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import zipfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lit_resinit import ops
from lit_resinit.branches import Address
from lit_resinit.decisions import ResidualPlan
from lit_resinit.errors import ResInitError
from lit_resinit.gates import Gate
from lit_resinit.identity import mean_and_variance
from lit_resinit.measuring import is_not_forward, measuring
from lit_resinit.places import clean_name, locate, module_names
from lit_resinit.tensors import local, whole

if TYPE_CHECKING:
    import pandas

_NAMED = 64  # branches up to which each has logger keys of its own; a run with more would drown in them

QUANTITIES = ("gate", "gate_max", "gate_grad", "var_stream", "var_branch", "variance_ratio", "saliency")


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


class Watcher(TorchDispatchMode):
    """Context manager that measures stream and branch at every planned addition of one forward.

    The values stay on the device until :meth:`moments`. Operations other than the planned kinds of addition pass
    untouched; a backward pass inside is ignored, so that recomputation is not counted twice.
    """

    def __init__(self, model: nn.Module, plan: ResidualPlan) -> None:
        super().__init__()
        self._names = module_names(model)
        self._planned = {b.address: (i, b) for i, b in enumerate(plan.branches)}
        self._kinds = {b.address.op for b in plan.branches}
        self._counts: dict[tuple[str, str, str], int] = {}
        self._size = len(plan.branches)
        self._seen: dict[int, list[tuple[Tensor, Tensor, int]]] = {}  # branch -> (mean, variance, count) twice

    def __enter__(self) -> Watcher:
        self._counts = {}
        return super().__enter__()  # type: ignore[no-any-return]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = ops.base_name(func)
        if op not in self._kinds or is_not_forward(func):
            return func(*args, **kwargs)
        key = (*locate(self._names, 2), op)
        count = self._counts[key] = self._counts.get(key, -1) + 1
        found = self._planned.get(Address(*key, count))
        if found is None:
            return func(*args, **kwargs)
        index, branch = found
        tensors = [local(a) for a in tree_iter((args, kwargs)) if isinstance(a, Tensor)]
        with measuring():
            stream = tensors[branch.skip_input]
            if branch.branch_input is not None:
                self._measure(index, stream, tensors[branch.branch_input])
            elif ops.written_arguments(func):
                stream = stream.detach().clone()
        out = func(*args, **kwargs)
        if branch.branch_input is None:
            with measuring():
                self._measure(index, stream, local(out).detach() - stream)
        return out

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


# -------------------------------------------------------------------- history


class History:
    """Records of a run: optimizer steps by branches, bounded however long the run.

    When ``limit`` records are reached, every second one is dropped and the stride doubles; the first and the newest
    record are always exact, and so is the step at which a branch switched on.

    Args:
        branches: Branch names, in plan order.
        on_ratio: Variance ratio from which a branch counts as switched on, dimensionless.
        limit: Largest number of records kept, at least 2.

    Raises:
        ValueError: If the limit leaves no room for the first and the last record.

    Attributes:
        steps: Optimizer steps, int64 ``(records,)``.
        gate: Signed gate, or root mean square for more than one element, float32 ``(records, branches)``; so are the
            following.
        gate_max: Largest absolute gate.
        gate_grad: Root mean square of the gate's gradient, before clipping.
        var_stream: Population variance of the stream entering the addition (squared activation units).
        var_branch: Population variance of the branch's output.
        variance_ratio: ``var_branch / var_stream``.
        saliency: First-order usefulness ``|sum g * dL/dg|``, in units of the loss.

    Example:
        >>> history = History(["a", "b"])
        >>> history.append(0, torch.zeros(4, 2), torch.ones(2), torch.tensor([0.0, 0.5]))
        >>> history.switched_on()
        {'a': None, 'b': 0}
    """

    gate: Tensor
    gate_max: Tensor
    gate_grad: Tensor
    var_stream: Tensor
    var_branch: Tensor
    variance_ratio: Tensor
    saliency: Tensor

    def __init__(self, branches: Sequence[str], on_ratio: float = 1e-3, limit: int = 2000) -> None:
        if limit < 2:
            raise ValueError(f"Expected argument `limit` to be at least 2 but got {limit!r}")
        self.branches = list(branches)
        self.on_ratio, self.limit = on_ratio, limit
        self._rows: list[tuple[int, Tensor]] = []
        self._stride, self._count = 1, 0
        self._on = torch.full((len(self.branches),), -1, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, step: int, gates: Tensor, var_stream: Tensor, var_branch: Tensor) -> None:
        """Add a record.

        Args:
            step: Optimizer step.
            gates: ``(4, branches)``: gate, gate_max, gate_grad, saliency.
            var_stream: ``(branches,)``.
            var_branch: ``(branches,)``.
        """
        ratio = torch.where(
            var_stream > 0, var_branch / var_stream.clamp(min=torch.finfo(torch.float32).tiny), math.nan
        )
        row = torch.stack([gates[0], gates[1], gates[2], var_stream, var_branch, ratio, gates[3]]).float().cpu()
        if self._rows and (self._count - 1) % self._stride != 0:
            self._rows.pop()
        self._rows.append((step, row))
        self._count += 1
        if len(self._rows) > self.limit:
            self._rows = [r for i, r in enumerate(self._rows) if i % 2 == 0]
            self._stride *= 2
        first = (self._on < 0) & (row[5] >= self.on_ratio)
        self._on[first] = step

    @property
    def steps(self) -> Tensor:
        """Optimizer steps, ``(records,)``."""
        return torch.tensor([step for step, _ in self._rows], dtype=torch.int64)

    def __getattr__(self, name: str) -> Tensor:
        if name not in QUANTITIES:
            raise AttributeError(f"History has no attribute {name!r}")
        position = QUANTITIES.index(name)
        if not self._rows:
            return torch.zeros(0, len(self.branches))
        return torch.stack([row[position] for _, row in self._rows])

    def newest(self, quantity: str) -> Tensor:
        """The last record of one quantity, ``(branches,)``."""
        return self._rows[-1][1][QUANTITIES.index(quantity)]

    def switched_on(self) -> dict[str, int | None]:
        """For every branch the first recorded step at which its variance ratio reached ``on_ratio``."""
        return {name: None if on < 0 else on for name, on in zip(self.branches, self._on.tolist(), strict=True)}

    def order(self) -> list[str]:
        """Names of the branches that switched on, earliest first; the larger ratio first where steps are equal."""
        ratio = self.variance_ratio[-1].nan_to_num(0.0).tolist() if len(self) else [0.0] * len(self.branches)
        on = [(step, -ratio[i], name) for i, (name, step) in enumerate(self.switched_on().items()) if step is not None]
        return [name for _, _, name in sorted(on)]

    def movement(self, gate: Tensor, gate_max: Tensor) -> Tensor:
        """How far each gate has ever been from where it was at the first record, by its size or its largest element.

        Args:
            gate: Gate now, as in :attr:`gate`, ``(branches,)``.
            gate_max: Largest absolute gate now, ``(branches,)``.

        Returns:
            ``(branches,)``, NaN where a branch has no gate or nothing was recorded.
        """
        if not self._rows:
            return torch.full_like(gate, math.nan)
        rows = torch.stack([row[:2] for _, row in self._rows] + [torch.stack([gate, gate_max])])
        return (rows - rows[0]).abs().amax(dim=(0, 1))

    def to_pandas(self) -> pandas.DataFrame:
        """A tidy table: one row for each record and branch.

        Returns:
            Columns ``step``, ``branch``, then every quantity of :class:`History`.

        Raises:
            ResInitError: If pandas is missing.
        """
        try:
            import pandas
        except ImportError as error:
            raise ResInitError(
                "turning the history into a table: expected pandas, found none. Run `pip install lit-resinit[pandas]`."
            ) from error
        columns: dict[str, Any] = {
            "step": self.steps.repeat_interleave(len(self.branches)).numpy(),
            "branch": self.branches * len(self),
        }
        return pandas.DataFrame(columns | {q: getattr(self, q).flatten().numpy() for q in QUANTITIES})

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain types (numbers, strings, lists, tensors)."""
        quantities = {q: getattr(self, q) for q in QUANTITIES}
        state = {"stride": self._stride, "count": self._count, "limit": self.limit, "on_ratio": self.on_ratio}
        return {"branches": list(self.branches), "steps": self.steps, "on": self._on.clone(), **state, **quantities}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> History:
        """The history that :meth:`to_dict` described."""
        history = cls([str(b) for b in values["branches"]], float(values["on_ratio"]), int(values["limit"]))
        table = torch.stack([torch.as_tensor(values[q]) for q in QUANTITIES], dim=1)
        history._rows = [(int(s), row) for s, row in zip(values["steps"], table, strict=True)]
        history._stride, history._count = int(values["stride"]), int(values["count"])
        history._on = torch.as_tensor(values["on"]).clone()
        return history

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one numpy archive (``.npz``), without pickles."""
        import numpy as np

        with open(path, "wb") as file:
            arrays: dict[str, Any] = {k: np.asarray(v) for k, v in self.to_dict().items()}
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """Read what :meth:`save` wrote.

        Raises:
            ResInitError: If the file is none of ours.
        """
        import numpy as np

        try:
            with np.load(path, allow_pickle=False) as archive:
                values = {k: archive[k] for k in archive.files}
        except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
            raise ResInitError(
                f"reading a history from {path}: expected the archive of `History.save`, found another kind of file"
            ) from error
        if not {"branches", "steps", *QUANTITIES} <= set(values):
            raise ResInitError(
                f"reading a history from {path}: expected the archive of `History.save`, found {sorted(values)}"
            )
        return cls.from_dict(values)


@dataclasses.dataclass(slots=True)
class Recorded:
    """One record as it came from the device."""

    step: int
    gates: Tensor
    var_stream: Tensor
    var_branch: Tensor


def to_record(step: int, gates: Tensor, moments: Moments) -> Recorded:
    """Gate statistics and variances of one step, in one transfer from the device."""
    with measuring():
        variance = moments.compute()
        host = torch.cat([gates, variance.view(-1, 2).T.to(gates.device)]).cpu()
    return Recorded(step, host[:4], host[4], host[5])


def metrics(history: History, per_branch: bool | None = None) -> dict[str, float]:
    """The newest record as logger keys, the same set at every step.

    Args:
        history: A history with at least one record.
        per_branch: Whether every branch has keys of its own; up to 64 branches when None.

    Logged: ``resinit/switched_on`` (number of branches), ``resinit/gate_max``, ``resinit/variance_ratio_max`` and
    ``resinit/variance_ratio_min``; up to 64 branches ``resinit/<quantity>/<branch>`` for every quantity of
    :class:`History`, beyond that their quantiles ``resinit/<quantity>/q10``, ``q50`` and ``q90``.
    """
    named_branches = len(history.branches) <= _NAMED if per_branch is None else per_branch
    values = {q: history.newest(q) for q in QUANTITIES}
    ratio = values["variance_ratio"]
    result = {
        "resinit/switched_on": float(sum(step is not None for step in history.switched_on().values())),
        "resinit/gate_max": _safe(values["gate_max"], max),
        "resinit/variance_ratio_max": _safe(ratio, max),
        "resinit/variance_ratio_min": _safe(ratio, min),
    }
    names = log_names(history.branches) if named_branches else []
    for quantity, row in values.items():
        if named_branches:
            result |= {f"resinit/{quantity}/{name}": v for name, v in zip(names, row.tolist(), strict=True)}
        else:
            spread = torch.nanquantile(row, torch.tensor([0.1, 0.5, 0.9])).tolist()
            result |= {f"resinit/{quantity}/q{q}": v for q, v in zip((10, 50, 90), spread, strict=True)}
    return result


def _safe(row: Tensor, reduce: Any) -> float:
    known = [v for v in row.tolist() if not math.isnan(v)]
    return float(reduce(known)) if known else math.nan


def log_names(branches: Sequence[str]) -> list[str]:
    """Branch names as logger keys, all different: where two become equal, ``-2`` follows the one that had to change."""
    taken = {b for b in branches if log_name(b) == b}
    names = []
    for branch in branches:
        name = plain = log_name(branch)
        number = itertools.count(2)
        while name != branch and name in taken:
            name = f"{plain}-{next(number)}"
        taken.add(name)
        names.append(name)
    return names


def log_name(branch: str) -> str:
    """A branch name in the characters that every logger takes: letters, digits and ``_ . / -``."""
    text = branch.replace("(", "").replace(")", "").replace(":", ".")
    return "".join(c if (c.isascii() and c.isalnum()) or c in "_./-" else "_" for c in text)
