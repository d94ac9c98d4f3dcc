"""Gates that lived and no longer do: not finite any more, or without a gradient for too many records in a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from lit_resinit.plan.values import ResidualPlan
from lit_resinit.words import together

_CHANCE = 1e-3  # that any branch of a healthy run is called silent in any record
_LEAST = 3  # records in a row
_OTHERS = 10.0  # records of its own that those of all other branches count as, at most


@dataclasses.dataclass(frozen=True, slots=True)
class Lapse:
    """What became of a gate that was alive.

    Args:
        branch: Name of its branch.
        kind: ``nonfinite``: it is NaN or inf; ``silent``: its gradient is exactly zero at every record.
        since: Optimizer step of the first such record.
        records: How many there are.
    """

    branch: str
    kind: Literal["nonfinite", "silent"]
    since: int
    records: int

    def __str__(self) -> str:
        what = "NaN or inf" if self.kind == "nonfinite" else "no gradient"
        return f"{what} since step {self.since}"


def gated(plan: ResidualPlan) -> set[str]:
    """Names of the branches whose gates are in the model; a constant factor is none."""
    judged = {g.parameter for g in plan.gates}
    return {b.name for b in plan.active if b.gates and all(g.parameter in judged for g in b.gates)}


class Lapses:
    """Counts, record by record, what gates and their gradients are.

    A record in which a branch did not run, or its gate had no gradient at all (frozen, scaled away), does not count.
    How many zeros in a row are too many depends on how often a gate was zero before: a branch that is dropped now and
    then may be dropped several times in a row.

    Args:
        branches: Branch names, in plan order.
    """

    def __init__(self, branches: Sequence[str]) -> None:
        self._branches = list(branches)
        self._alive, self._zeros, self._run, self._bad, self._records = torch.zeros(5, len(self._branches))
        self._run_since, self._bad_since = torch.zeros(2, len(self._branches), dtype=torch.int64)
        self._finite = torch.zeros(len(self._branches), dtype=torch.bool)
        self._told: set[tuple[str, str]] = set()

    def see(self, step: int, gate: Tensor, gate_grad: Tensor, var_branch: Tensor) -> None:
        """One more record, ``(branches,)`` each."""
        ran, finite = ~var_branch.isnan(), gate.isfinite()
        zero, alive = ran & (gate_grad == 0), ran & gate_grad.isfinite() & (gate_grad != 0)
        self._run_since = torch.where(zero & (self._run == 0), step, self._run_since)
        self._bad_since = torch.where(~finite & (self._bad == 0), step, self._bad_since)
        self._zeros = torch.where(alive, self._zeros + self._run, self._zeros)
        self._run = torch.where(alive, 0.0, self._run + zero)
        self._bad = torch.where(finite, 0.0, self._bad + 1)
        self._alive, self._records, self._finite = self._alive + alive, self._records + 1, self._finite | finite

    def found(self, gated: Collection[str] | None = None) -> dict[str, Lapse]:
        """The lapses as of the newest record, by branch.

        Args:
            gated: Names of the branches that have a gate, which then should be finite from the first record on; None
                where that is not known.
        """
        expected = torch.tensor([b in (gated or ()) for b in self._branches], dtype=torch.bool)
        known = self._finite | expected
        lapses = {}
        for i in ((self._bad > 0) & known).nonzero().flatten().tolist():
            name = self._branches[i]
            lapses[name] = Lapse(name, "nonfinite", int(self._bad_since[i]), int(self._bad[i]))
        silent = (self._run >= _LEAST) & (self._alive > 0) & (self._log_chance() < self._log_limit())
        for i in silent.nonzero().flatten().tolist():
            name = self._branches[i]
            lapses.setdefault(name, Lapse(name, "silent", int(self._run_since[i]), int(self._run[i])))
        return lapses

    def _log_chance(self) -> Tensor:
        """How likely as many zeros in a row are for a gate that was zero as often as this one, and the others, before.

        The share of zeros is not known but estimated: few records, and few other branches, say little of it.
        """
        zeros, alive = self._zeros.double(), self._alive.double()
        others = (zeros.sum() - zeros, alive.sum() - alive)
        weight = (others[0] + others[1]).clamp(max=_OTHERS)
        share = others[0] / (others[0] + others[1]).clamp(min=1.0)
        up, down = zeros + 0.5 + weight * share, alive + 2.0 + weight * (1.0 - share)
        run = self._run.double()
        chance: Tensor = (up + run).lgamma() - up.lgamma() - (up + down + run).lgamma() + (up + down).lgamma()
        return chance

    def _log_limit(self) -> Tensor:
        looks = max(1, len(self._branches)) * self._records.clamp(min=1.0)
        limit: Tensor = (_CHANCE / looks).log()
        return limit

    def news(self, gated: Collection[str] | None = None) -> str:
        """What was not said before, in words; "" for nothing."""
        fresh = [x for x in self.found(gated).values() if (x.branch, x.kind) not in self._told]
        self._told |= {(x.branch, x.kind) for x in fresh}
        return in_words(fresh, len(self._branches))

    def at_end(self, step: int, gate: Tensor, gated: Collection[str]) -> str:
        """Gates that are not finite after the last step, where no record has said so; in words, "" for none."""
        lost = [b for b, g in zip(self._branches, gate.isfinite().tolist(), strict=True) if b in gated and not g]
        fresh = [Lapse(b, "nonfinite", step, 0) for b in lost if (b, "nonfinite") not in self._told]
        return in_words(fresh, len(self._branches))


def in_words(lapses: Collection[Lapse], total: int) -> str:
    """A message: what was looked at, expected, found, since when, and what to do."""
    bad, silent = ([x for x in lapses if x.kind == kind] for kind in ("nonfinite", "silent"))
    parts = []
    if bad:
        parts.append(
            f"looked at the gates of {total} branches; expected finite values, found NaN or inf in {_named(bad)}. A "
            "step before that went too far, or a gradient was NaN: go back to an earlier checkpoint, lower the "
            "learning rate or clip the gradients, and run a step inside `with observe(model, plan)`, which names the "
            "operation that makes a NaN."
        )
    if silent:
        parts.append(
            f"looked at the gates of {total} branches, which had a gradient; expected one still, found exactly none "
            f"at the last {min(x.records for x in silent)} records in {_named(silent)}. What they scale no longer "
            "reaches the loss, or a function has come to stand where its slope is zero (a ReLU, a clamp): run a step "
            "inside `with observe(model, plan)`, which names the operation and its line."
        )
    return " ".join(parts)


def _named(lapses: Sequence[Lapse]) -> str:
    since = min(x.since for x in lapses)
    return f"{together([x.branch for x in lapses])} ({len(lapses)} in all, since step {since})"
