"""Tables for the terminal."""

from __future__ import annotations

import math

import torch
from rich.table import Table
from torch import Tensor

from lit_resinit.plan.values import ResidualPlan
from lit_resinit.watch.history import History
from lit_resinit.watch.lapses import Lapse, gated


def history_table(
    plan: ResidualPlan, history: History, rows: int = 40, gate_max: Tensor | None = None, step: int | None = None
) -> Table:
    """Block, gate kind, ``|g|`` now, variance ratio, switched on at step, and the order.

    Args:
        plan: The plan of the run.
        history: Its history.
        rows: Longest table; a deeper network shows its first and last branches.
        gate_max: Largest ``|g|`` of each branch now, ``(branches,)``; that of the last record when None.
        step: Optimizer steps done by now.

    Returns:
        A rich table; where the run went on after the last record, a line below it says which number is of when.

    Example:
        >>> from lit_resinit import make_plan
        >>> layer, x = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8)
        >>> plan = make_plan(layer, x)
        >>> history_table(plan, History([b.name for b in plan.branches])).title
        '0 of 2 residual branches switched on'
    """
    if gate_max is None:
        gate_max = history.newest("gate_max") if len(history) else torch.full((len(plan),), math.nan)
    order = {name: str(i + 1) for i, name in enumerate(history.order())}
    on, lapses = history.switched_on(), history.lapses.found(gated(plan))
    newest = f" by step {int(history.steps[-1])}" if len(history) else ""
    table = Table(
        title=f"{len(order)} of {len(plan)} residual branches switched on{newest}{_lapsed(lapses)}",
        caption=_when(history, step),
    )
    names = ("branch", "gate kind", "|g| now", "variance ratio", "on at step", "order", *(("later",) if lapses else ()))
    for name in names:
        table.add_column(name, justify="left" if name in ("branch", "gate kind", "later") else "right")
    for position, branch in enumerate(plan.branches):
        if rows // 2 <= position < len(plan) - rows // 2:
            if position == rows // 2:
                table.add_row(f"... {len(plan) - 2 * (rows // 2)} more", *[""] * (len(names) - 1))
            continue
        values = (_number(gate_max[position]), _last(history, "variance_ratio", position))
        since = on.get(branch.name)
        kind = "+".join(g.kind for g in branch.gates) or "-"
        later = [str(lapses.get(branch.name, "-"))] if lapses else []
        on_at = "-" if since is None else str(since)
        table.add_row(branch.name, kind, *values, on_at, order.get(branch.name, "-"), *later)
    return table


def _lapsed(lapses: dict[str, Lapse]) -> str:
    """How many gates no longer live, for the title."""
    kinds = [x.kind for x in lapses.values()]
    words = {"nonfinite": "not finite", "silent": "without a gradient"}
    return "".join(f", {kinds.count(kind)} {word}" for kind, word in words.items() if kind in kinds)


def _last(history: History, quantity: str, position: int) -> str:
    if not len(history):
        return "-"
    return _number(history.newest(quantity)[position])


def _number(value: Tensor) -> str:
    return "-" if math.isnan(value) else f"{float(value):.3g}"


def _when(history: History, step: int | None) -> str | None:
    """What the numbers show, where the run went on after the last record."""
    if step is None or not len(history) or step <= int(history.steps[-1]) + 1:
        return None
    records = f"{len(history)} record{'' if len(history) == 1 else 's'}"
    return (
        f"|g| is that after {step} steps; the variance ratio, and what has switched on, are those of the last of "
        f"{records}, at step {int(history.steps[-1])}. log_every_n_steps sets how often one is taken."
    )
