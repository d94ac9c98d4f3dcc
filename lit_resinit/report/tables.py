"""Tables for the terminal."""

from __future__ import annotations

import math

from rich.table import Table

from lit_resinit.plan import ResidualPlan
from lit_resinit.watch import History


def history_table(plan: ResidualPlan, history: History, rows: int = 40) -> Table:
    """Block, gate kind, ``|g|`` now, variance ratio, switched on at step, and the order.

    Args:
        plan: The plan of the run.
        history: Its history.
        rows: Longest table; a deeper network shows its first and last branches.

    Returns:
        A rich table.
    """
    order = {name: str(i + 1) for i, name in enumerate(history.order())}
    on = history.switched_on()
    newest = f" by step {int(history.steps[-1])}" if len(history) else ""
    table = Table(title=f"{len(order)} of {len(plan)} residual branches switched on{newest}")
    for name in ("branch", "gate kind", "|g| now", "variance ratio", "on at step", "order"):
        table.add_column(name, justify="left" if name in ("branch", "gate kind") else "right")
    for position, branch in enumerate(plan.branches):
        if rows // 2 <= position < len(plan) - rows // 2:
            if position == rows // 2:
                table.add_row(f"... {len(plan) - 2 * (rows // 2)} more", "", "", "", "", "")
            continue
        values = (_last(history, "gate_max", position), _last(history, "variance_ratio", position))
        step = on.get(branch.name)
        kind = "+".join(g.kind for g in branch.gates) or "-"
        table.add_row(branch.name, kind, *values, "-" if step is None else str(step), order.get(branch.name, "-"))
    return table


def _last(history: History, quantity: str, position: int) -> str:
    if not len(history):
        return "-"
    value = float(getattr(history, quantity)[-1, position])
    return "-" if math.isnan(value) else f"{value:.3g}"
