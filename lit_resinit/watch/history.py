"""Records of a run: optimizer steps by branches, bounded however long the run.

One class of many short readings of the same rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lit_resinit.errors import ResInitError
from lit_resinit.watch.attributions import Attributions
from lit_resinit.watch.lapses import Lapses
from lit_resinit.watch.records import Records
from lit_resinit.watch.switching import Switching
from lit_resinit.words import Shown

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

QUANTITIES = ("gate", "gate_max", "gate_grad", "var_stream", "var_branch", "variance_ratio", "saliency")
_ON_RATIO, _LIMIT = 1e-3, 2000
_BYTES = 150 * 2**20  # what the records of a run may take, where it has very many branches

# what draws a history, by name; the room that draws enters its functions here, as nothing is imported from below
DRAWN: dict[str, Callable[..., Figure]] = {}


class History(Shown):
    """Records of a run: optimizer steps by branches, bounded however long the run.

    When ``limit`` records are reached, every second one is dropped and the stride doubles; the first and the newest
    record are always exact, and so is the step at which a branch switched on.

    Args:
        branches: Branch names, in plan order.
        on_ratio: Variance ratio from which a branch counts as switched on, dimensionless.
        limit: Largest number of records kept, at least 2. When None 2,000, or as many as take 150 MiB, where there are
            more than about 2,800 branches.

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
        saliency: ``sum g * dL/dg + sum b * dL/db`` with the biases closed with the gate, in units of the loss. To first
            order closing the branch raises the loss by minus this number.
        attribution: What each branch takes off the loss on data held out, by the gate path
            (:func:`lit_resinit.attribute`); NaN for records after which it was not measured.
        attributions: The same by the steps at which it was measured, with the loss beside it.

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
    attribution: Tensor

    def __init__(self, branches: Sequence[str], on_ratio: float = _ON_RATIO, limit: int | None = None) -> None:
        limit = _usual_limit(len(branches)) if limit is None else limit
        if limit < 2:
            raise ValueError(f"Expected argument `limit` to be at least 2 but got {limit!r}")
        self.branches = list(branches)
        self.on_ratio = on_ratio
        self._records, self._switching = Records(limit), Switching(len(self.branches))
        self.lapses = Lapses(self.branches)
        self.attributions = Attributions(len(self.branches), limit)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def limit(self) -> int:
        """Largest number of records kept."""
        return self._records.limit

    def begin(self, closed: Sequence[bool]) -> None:
        """Say which branches are known to start closed; any other that is on at its first record was so from the start.

        Args:
            closed: One for each branch. Without this call every branch counts as closed at the start.
        """
        if not len(self):
            self._switching.begin(closed)

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
        self._records.append(step, row)
        self._see(step, row)

    def _see(self, step: int, row: Tensor) -> None:
        """Note which branches this record shows switched on, and which have lapsed."""
        self._switching.see(step, row[5], self.on_ratio)
        self.lapses.see(step, row[0], row[2], row[4])

    @property
    def steps(self) -> Tensor:
        """Optimizer steps, ``(records,)``."""
        return self._records.steps

    def __getattr__(self, name: str) -> Tensor:
        if name == "attribution":
            return self.attributions.by_record(self.steps)
        if name not in QUANTITIES:
            raise AttributeError(f"History has no attribute {name!r}")
        if not len(self):
            return torch.zeros(0, len(self.branches))
        return self._records.column(QUANTITIES.index(name))

    def newest(self, quantity: str) -> Tensor:
        """The last record of one quantity, ``(branches,)``."""
        return self._records.newest[QUANTITIES.index(quantity)]

    def attribute(self, step: int, values: Mapping[str, float], loss: float, joint: float) -> None:
        """Add what was measured along the gate path.

        Args:
            step: Optimizer steps done.
            values: Branch name to attribution, as :func:`lit_resinit.attribute` returns it.
            loss: Loss on the data of the measurement.
            joint: Loss with all gates closed, minus the loss.
        """
        row = torch.tensor([values.get(name, math.nan) for name in self.branches])
        self.attributions.append(step, row, loss, joint)

    def mean_saliency(self, records: int = 10) -> Tensor:
        """Mean absolute saliency of each branch over the last records, ``(branches,)``: one batch alone is noise.

        Args:
            records: How many; those without a gradient are left out, and NaN is what no record has.
        """
        rows = [row[QUANTITIES.index("saliency")] for _, row in self._records.rows[-records:]]
        return torch.stack(rows).abs().nanmean(0) if rows else torch.full((len(self.branches),), math.nan)

    def switched_on(self) -> dict[str, int | None]:
        """For every branch the first recorded step at which its variance ratio reached ``on_ratio``.

        None for one that has not, and for one that was open from the start.
        """
        return dict(zip(self.branches, self._switching.steps, strict=True))

    def open_from_start(self) -> list[str]:
        """Names of the branches that were not closed, and on at their first record: they have not switched on."""
        return [n for n, was in zip(self.branches, self._switching.open_from_start, strict=True) if was]

    def order(self) -> list[str]:
        """Names of the branches that switched on, earliest first; the larger ratio first where steps are equal."""
        ratio = self.newest("variance_ratio").nan_to_num(0.0).tolist() if len(self) else [0.0] * len(self.branches)
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
        if not len(self):
            return torch.full_like(gate, math.nan)
        rows = torch.stack([row[:2] for _, row in self._records.rows] + [torch.stack([gate, gate_max])])
        return (rows - rows[0]).abs().amax(dim=(0, 1))

    def _title(self) -> str:
        records = f"{len(self)} record{'' if len(self) == 1 else 's'} of {len(self.branches)} branches"
        if not len(self):
            return records
        first, last = self.steps[0], self.steps[-1]
        return f"{records}, steps {first} to {last}, {len(self.order())} switched on"

    def _cells(self) -> list[tuple[str, ...]]:
        place = {name: str(i + 1) for i, name in enumerate(self.order())}
        known = ("gate_max", "variance_ratio")
        newest = [[f"{v:.3g}" for v in self.newest(q).tolist()] for q in known] if len(self) else []
        rows: list[tuple[str, ...]] = [("branch", "largest |g|", "variance ratio", "on at step", "order")]
        for i, (name, step) in enumerate(self.switched_on().items()):
            now = [column[i] for column in newest] or ["-", "-"]
            rows.append((name, now[0], now[1], "-" if step is None else str(step), place.get(name, "-")))
        return rows

    def plot(self, what: Literal["ratio", "gates", "order", "stream"] = "ratio", title: str | None = None) -> Figure:
        """Draw the run with matplotlib.

        Args:
            what: ``ratio``, a heat map of the variance ratio; ``gates``, how far they opened; ``order``, of switching
                on; ``stream``, its variance by depth.
            title: Another title than the usual one.

        Returns:
            The figure; ``figure.savefig("run.png")`` writes it.

        Raises:
            ValueError: For another name.
            ResInitError: If matplotlib is missing, or nothing was recorded.
        """
        if what not in DRAWN:
            raise ValueError(f"Expected argument `what` to be one of {', '.join(sorted(DRAWN))} but got {what!r}")
        return DRAWN[what](self) if title is None else DRAWN[what](self, title)

    def to_pandas(self) -> pandas.DataFrame:
        """A tidy table: one row for each record and branch.

        Returns:
            Columns ``step``, ``branch``, then every quantity of :class:`History`, and ``attribution`` where it was
            measured.

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
        quantities = (*QUANTITIES, "attribution") if len(self.attributions) else QUANTITIES
        return pandas.DataFrame(columns | {q: getattr(self, q).flatten().numpy() for q in quantities})

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain types (numbers, strings, lists, tensors)."""
        quantities = {q: getattr(self, q) for q in QUANTITIES}
        kept = self._records
        state = {"stride": kept.stride, "count": kept.count, "limit": kept.limit, "on_ratio": self.on_ratio}
        measured = {"attribution": self.attribution, **self.attributions.to_dict()}
        own = {"branches": list(self.branches), "steps": self.steps, "on": self._switching.on.clone()}
        return own | state | quantities | measured

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
            column = torch.as_tensor(values[quantity])
            if column.shape != (len(steps), len(branches)):
                raise ValueError(f"{quantity} has shape {tuple(column.shape)}")
            table[:, QUANTITIES.index(quantity)] = column
        limit = max(int(values.get("limit", _usual_limit(len(branches)))), len(steps), 2)
        history = cls(branches, float(values.get("on_ratio", _ON_RATIO)), limit)
        rows = list(zip(steps, table, strict=True))
        history._records = Records(limit, rows, int(values.get("stride", 1)), int(values.get("count", len(rows))))
        history.attributions = Attributions.from_dict(values, len(branches), limit)
        for step, row in rows:
            history._see(step, row)
        if "on" in values:
            history._switching.on[:] = torch.as_tensor(values["on"])
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


def _usual_limit(branches: int) -> int:
    return max(2, min(_LIMIT, _BYTES // (4 * len(QUANTITIES) * max(1, branches))))


def _found(values: Any) -> str:
    """What stands where a history is expected, in few words."""
    return f"{sorted(map(str, values))}" if isinstance(values, Mapping) else type(values).__name__
