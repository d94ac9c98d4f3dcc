"""Tables for the terminal."""

from __future__ import annotations

import math

import torch
from rich.table import Table
from torch import Tensor

from lit_resinit.plan.values import ResidualPlan
from lit_resinit.watch.history import History
from lit_resinit.watch.usefulness import Ablation


def history_table(
    plan: ResidualPlan,
    history: History,
    rows: int = 40,
    gate_max: Tensor | None = None,
    step: int | None = None,
    ablation: Ablation | None = None,
) -> Table:
    """Block, gate kind, ``|g|`` now, variance ratio, switched on at step, the order, and usefulness if it was measured.

    Args:
        plan: The plan of the run.
        history: Its history.
        rows: Longest table; a deeper network shows its first and last branches.
        gate_max: Largest ``|g|`` of each branch now, ``(branches,)``; that of the last record when None.
        step: Optimizer steps done by now.
        ablation: What closing each branch did.

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
    on = history.switched_on()
    newest = f" by step {int(history.steps[-1])}" if len(history) else ""
    table = Table(
        title=f"{len(order)} of {len(plan)} residual branches switched on{newest}", caption=_when(history, step)
    )
    useful = _usefulness(history, ablation)
    for name in ("branch", "gate kind", "|g| now", "variance ratio", "on at step", "order", *useful):
        table.add_column(name, justify="left" if name in ("branch", "gate kind") else "right")
    for position, branch in enumerate(plan.branches):
        if rows // 2 <= position < len(plan) - rows // 2:
            if position == rows // 2:
                table.add_row(f"... {len(plan) - 2 * (rows // 2)} more")
            continue
        values = (_number(gate_max[position]), _last(history, "variance_ratio", position))
        since = on.get(branch.name)
        kind = "+".join(g.kind for g in branch.gates) or "-"
        more = [column.get(branch.name, "-") for column in useful.values()]
        place = order.get(branch.name, "-")
        table.add_row(branch.name, kind, *values, "-" if since is None else str(since), place, *more)
    return table


def _usefulness(history: History, ablation: Ablation | None) -> dict[str, dict[str, str]]:
    """Columns of what was measured, by heading and branch: the gate path, and closing one branch with its error."""
    columns = {}
    if len(history.attributions):
        row = history.attributions.values[-1]
        columns["attribution"] = {n: _number(v) for n, v in zip(history.branches, row, strict=True)}
    if ablation is not None:
        errors = ablation.errors
        closing = {n: f"{v:.3g} ± {errors[n]:.1g}" for n, v in ablation.means.items()}
        columns["rise if closed"] = closing
    return columns


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
