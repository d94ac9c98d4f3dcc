"""Tables for the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lit_resinit.plan.values import Branch, ResidualPlan
from lit_resinit.watch.history import History
from lit_resinit.watch.lapses import Lapse, gated

_HEADINGS = ("gate kind", "|g| now", "variance ratio", "on at step", "order", "woke after", "later")
_RARE = ("woke after", "later")  # columns that are shown where they say something
_LEAST = 12  # characters of a name below which it says nothing


def history_table(
    plan: ResidualPlan,
    history: History,
    rows: int = 40,
    gate_max: Tensor | None = None,
    step: int | None = None,
    *,
    woke: Mapping[str, int] | None = None,
    fits: Sequence[int] = (),
    width: int | None = None,
) -> Table:
    """Block, gate kind, ``|g|`` now, variance ratio, switched on at step, and the order.

    Args:
        plan: The plan of the run.
        history: Its history.
        rows: Longest table; a deeper network shows its first and last branches.
        gate_max: Largest ``|g|`` of each branch now, ``(branches,)``; that of the last record when None.
        step: Optimizer steps done by now.
        woke: Gate parameter to the number of optimizer steps it slept; a column of its own where there are any.
        fits: The first steps of later fits that the history holds.
        width: Characters of a line; those of the terminal when None. Names that do not fit lose what all of them begin
            with, which the title then says, and after that their middle.

    Returns:
        A rich table; lines below it say what is of another moment, which branches were open from the start, and where
        a later fit began.

    Example:
        >>> from lit_resinit import make_plan
        >>> layer, x = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8)
        >>> plan = make_plan(layer, x)
        >>> history_table(plan, History([b.name for b in plan.branches])).title
        '0 of 2 residual branches switched on'
    """
    if gate_max is None:
        gate_max = history.newest("gate_max") if len(history) else torch.full((len(plan),), math.nan)
    shown = [i for i in range(len(plan)) if not rows // 2 <= i < len(plan) - rows // 2]
    lapses = history.lapses.found(gated(plan))
    seen = _Seen(history, gate_max, woke or {}, lapses)
    rows_of_all = [seen.row(plan.branches[i], i) for i in shown]
    kept = [i for i, h in enumerate(_HEADINGS) if h not in _RARE or any(cells[i] != "-" for cells in rows_of_all)]
    headings = [_HEADINGS[i] for i in kept]
    table_rows = [tuple(cells[i] for i in kept) for cells in rows_of_all]
    room = _room(headings, table_rows, width or Console().width)
    narrow = max((len(plan.branches[i].name) for i in shown), default=0) > room
    if narrow:
        room += sum(len(h) - max(map(len, h.split())) for h in headings)
    below, names = _names([plan.branches[i].name for i in shown], room)
    table = Table(title=_title(history, len(plan), below, lapses), caption=_captions(history, step, fits))
    table.add_column("branch", no_wrap=True)
    for heading in headings:
        text = heading.replace(" ", "\n") if narrow else heading
        table.add_column(text, justify="left" if heading in ("gate kind", "later") else "right")
    for row, (name, cells) in enumerate(zip(names, table_rows, strict=True)):
        if len(shown) < len(plan) and row == rows // 2:
            table.add_row(f"... {len(plan) - len(shown)} more", *[""] * len(headings))
        table.add_row(name, *cells)
    return table


class _Seen:
    """What a run has shown of every branch."""

    def __init__(
        self, history: History, gate_max: Tensor, woke: Mapping[str, int], lapses: Mapping[str, Lapse]
    ) -> None:
        self._on, self._opened = history.switched_on(), set(history.open_from_start())
        self._order = {name: str(i + 1) for i, name in enumerate(history.order())}
        self._ratio = history.newest("variance_ratio") if len(history) else torch.full_like(gate_max, math.nan)
        self._gate_max, self._woke, self._lapses = gate_max, woke, lapses

    def row(self, branch: Branch, position: int) -> tuple[str, ...]:
        """The cells after a branch's name."""
        since = self._on.get(branch.name)
        slept = [self._woke[g.parameter] for g in branch.gates if g.parameter in self._woke]
        return (
            "+".join(g.kind for g in branch.gates) or "-",
            _number(self._gate_max[position]),
            _number(self._ratio[position]),
            "start" if branch.name in self._opened else "-" if since is None else str(since),
            self._order.get(branch.name, "-"),
            str(max(slept)) if slept else "-",
            str(self._lapses.get(branch.name, "-")),
        )


def _lapsed(lapses: dict[str, Lapse]) -> str:
    """How many gates no longer live, for the title."""
    kinds = [x.kind for x in lapses.values()]
    words = {"nonfinite": "not finite", "silent": "without a gradient"}
    return "".join(f", {kinds.count(kind)} {word}" for kind, word in words.items() if kind in kinds)


def _number(value: Tensor) -> str:
    return "-" if math.isnan(value) else f"{float(value):.3g}"


# -------------------------------------------------------------------- names that fit


def _room(headings: Sequence[str], rows: Sequence[tuple[str, ...]], width: int) -> int:
    """How many characters are left for a name, beside the other columns, their padding and the borders."""
    columns = [[heading, *(cells[i] for cells in rows)] for i, heading in enumerate(headings)]
    return width - sum(max(map(len, column)) + 3 for column in columns) - 4


def _names(names: Sequence[str], room: int) -> tuple[str, list[str]]:
    """What all names begin with, where it was taken away, and names of at most so many characters, all different."""
    room = max(room, _LEAST)
    if max(map(len, names), default=0) <= room:
        return "", list(names)
    parts = [name.split(".") for name in names]
    shared = 0
    while all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    short = [".".join(p[shared:]) for p in parts]
    cut = [_without_middle(name, room) for name in short]
    alike = Counter(cut)
    for i, name in enumerate(short):
        if alike[cut[i]] > 1:
            cut[i] = f"{_without_middle(name, room - len(str(i)) - 2)} #{i}"
    return ".".join(parts[0][:shared]), cut


def _without_middle(name: str, room: int) -> str:
    if len(name) <= room:
        return name
    kept = max(2, room - 3)
    return f"{name[: kept // 2]}...{name[len(name) - (kept - kept // 2) :]}"


# -------------------------------------------------------------------- above and below the table


def _title(history: History, total: int, below: str, lapses: dict[str, Lapse]) -> str:
    opened = len(history.open_from_start())
    title = f"{len(history.order())} of {total - opened} residual branches switched on"
    if len(history):
        title += f" by step {int(history.steps[-1])}"
    if opened:
        title += f"; {opened} open from the start"
    title += _lapsed(lapses)
    return title + (f"\nnames below {below}" if below else "")


def _captions(history: History, step: int | None, fits: Sequence[int]) -> str | None:
    """What the numbers show, where the run went on after the last record, and which runs they are of."""
    lines = []
    if step is not None and len(history) and step > int(history.steps[-1]) + 1:
        records = f"{len(history)} record{'' if len(history) == 1 else 's'}"
        lines.append(
            f"|g| is that after {step} steps; the variance ratio, and what has switched on, are those of the last of "
            f"{records}, at step {int(history.steps[-1])}. log_every_n_steps sets how often one is taken."
        )
    if history.open_from_start():
        lines.append("start: not closed, and on from the start, so without a place in the order.")
    if fits:
        lines.append(told_fits(fits))
    return "\n".join(lines) or None


def told_fits(fits: Sequence[int]) -> str:
    """In words, that a history is of several fits."""
    begun = ", ".join(map(str, fits[-5:]))
    return f"{len(fits) + 1} fits of this network: a later one began at step {begun}, and the steps go on."
