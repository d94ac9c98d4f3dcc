"""A record as numbers for loggers, under names that every logger takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lit_resinit.watch.history import QUANTITIES, History

_NAMED = 64  # branches up to which each has logger keys of its own; a run with more would drown in them


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
    names = log_names(history.branches) if named_branches else None
    for quantity, row in values.items():
        result |= _keys(quantity, row, names)
    return result


def attribution_metrics(history: History, per_branch: bool | None = None) -> dict[str, float]:
    """The newest measurement along the gate path as logger keys.

    Args:
        history: A history with at least one measurement.
        per_branch: Whether every branch has a key of its own; up to 64 branches when None.

    Logged: ``resinit/attribution/<branch>``, or its quantiles as for :func:`metrics`; ``resinit/attribution_sum``,
    ``resinit/attribution_joint`` (what the sum should be) and ``resinit/attribution_loss`` (on the same data).
    """
    named_branches = len(history.branches) <= _NAMED if per_branch is None else per_branch
    found = history.attributions
    row = found.values[-1]
    result = {
        "resinit/attribution_sum": float(row.nansum()),
        "resinit/attribution_joint": float(found.joint[-1]),
        "resinit/attribution_loss": float(found.loss[-1]),
    }
    return result | _keys("attribution", row, log_names(history.branches) if named_branches else None)


def _keys(quantity: str, row: Tensor, names: Sequence[str] | None) -> dict[str, float]:
    """A key for each branch, or for three quantiles where there are no names."""
    if names is not None:
        return {f"resinit/{quantity}/{name}": v for name, v in zip(names, row.tolist(), strict=True)}
    spread = torch.nanquantile(row, torch.tensor([0.1, 0.5, 0.9])).tolist()
    return {f"resinit/{quantity}/q{q}": v for q, v in zip((10, 50, 90), spread, strict=True)}


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
