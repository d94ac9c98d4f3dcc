"""Records of a run: optimizer steps by branches, bounded however long the run.

One class of many short readings of the same rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_resinit.errors import ResInitError
from lit_resinit.watch.lapses import Lapses

if TYPE_CHECKING:
    import pandas

QUANTITIES = ("gate", "gate_max", "gate_grad", "var_stream", "var_branch", "variance_ratio", "saliency")
_ON_RATIO, _LIMIT = 1e-3, 2000


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
        lapses: Gates that lived and no longer do, as :class:`~lit_resinit.watch.lapses.Lapses` counts them.
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

    def __init__(self, branches: Sequence[str], on_ratio: float = _ON_RATIO, limit: int = _LIMIT) -> None:
        if limit < 2:
            raise ValueError(f"Expected argument `limit` to be at least 2 but got {limit!r}")
        self.branches = list(branches)
        self.on_ratio, self.limit = on_ratio, limit
        self._rows: list[tuple[int, Tensor]] = []
        self._stride, self._count = 1, 0
        self._on = torch.full((len(self.branches),), -1, dtype=torch.int64)
        self.lapses = Lapses(self.branches)

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
        self._see(step, row)

    def _see(self, step: int, row: Tensor) -> None:
        """Note which branches this record shows switched on, and which have lapsed."""
        first = (self._on < 0) & (row[5] >= self.on_ratio)
        self._on[first] = step
        self.lapses.see(step, row[0], row[2], row[4])

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
        """The history that :meth:`to_dict` described, by this version or another.

        A quantity that is missing is NaN, what can be counted from the records is counted, and what is unknown is left.

        Raises:
            ResInitError: If there are no records to read, or their parts do not fit together.
        """
        try:
            return cls._read(values)
        except Exception as error:  # a damaged state may hold anything
            raise ResInitError(
                "reading a history: expected what `History.to_dict` returns, branches, steps and quantities of one "
                f"shape, found {_found(values)} ({type(error).__name__}: {error}). Take an earlier checkpoint, or "
                "start a new history."
            ) from error

    @classmethod
    def _read(cls, values: dict[str, Any]) -> History:
        branches, steps = [str(b) for b in values["branches"]], [int(s) for s in values["steps"]]
        present = [q for q in QUANTITIES if q in values]
        if not present:
            raise KeyError(QUANTITIES[0])
        table = torch.full((len(steps), len(QUANTITIES), len(branches)), math.nan)
        for quantity in present:
            rows = torch.as_tensor(values[quantity])
            if rows.shape != (len(steps), len(branches)):
                raise ValueError(f"{quantity} has shape {tuple(rows.shape)}")
            table[:, QUANTITIES.index(quantity)] = rows
        limit = max(int(values.get("limit", _LIMIT)), len(steps), 2)
        history = cls(branches, float(values.get("on_ratio", _ON_RATIO)), limit)
        history._rows = list(zip(steps, table, strict=True))
        history._stride, history._count = int(values.get("stride", 1)), int(values.get("count", len(steps)))
        for step, row in history._rows:
            history._see(step, row)
        if "on" in values:
            history._on[:] = torch.as_tensor(values["on"])
        if history._stride < 1 or history._count < len(steps):
            raise ValueError(f"{history._count} records, one of {history._stride} kept")
        return history

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one numpy archive (``.npz``), without pickles."""
        import numpy as np

        with open(path, "wb") as file:
            arrays: dict[str, Any] = {k: np.asarray(v) for k, v in self.to_dict().items()}
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """Read what :meth:`save` wrote, by this version or another.

        Raises:
            ResInitError: If the file is none of ours, or damaged.
            OSError: If there is no such file, or it may not be read.
        """
        import numpy as np

        with open(path, "rb") as file:
            try:
                with np.load(file, allow_pickle=False) as archive:
                    values = {k: archive[k] for k in archive.files}
            except Exception as error:  # damaged bytes fail in many ways: zlib, zipfile, numpy's header, memory
                raise ResInitError(
                    f"reading a history from {path}: expected the archive of `History.save`, found another kind of "
                    f"file, or a damaged one ({type(error).__name__}: {error}). Take a copy of it, or the history in "
                    "a checkpoint of the run."
                ) from error
        return cls.from_dict(values)


def _found(values: Any) -> str:
    """What stands where a history is expected, in few words."""
    return f"{sorted(map(str, values))}" if isinstance(values, Mapping) else type(values).__name__
