"""What is said of usefulness at the end of a run: ablation with its errors, the joint effect, the gate path."""

from __future__ import annotations

import dataclasses
import math

from lit_resinit.watch.agreement import Agreement, agreements, halves_agreement, split_half_reliability
from lit_resinit.watch.history import History
from lit_resinit.watch.path import Attribution
from lit_resinit.watch.usefulness import Ablation


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Conclusion:
    """Usefulness of the branches, two ways, on the same data.

    Args:
        ablation: Each branch closed in turn.
        path: All branches at once, by the gate path; None where the loss has no gradient.
        reliability: Split-half reliability of the ablation's ranking; NaN where it is not known.
        agreements: How the ablation agrees with other quantities.
        data: What it was measured on, for people.
    """

    ablation: Ablation
    path: Attribution | None
    reliability: float
    agreements: tuple[Agreement, ...]
    data: str

    @property
    def share(self) -> float:
        """Sum of the ablations over the joint effect: near 0 where blocks replace one another."""
        joint = self.ablation.joint
        return math.fsum(self.ablation.means.values()) / joint if math.isfinite(joint) and joint else math.nan

    def __str__(self) -> str:
        reliable = "is not known" if math.isnan(self.reliability) else f"is {self.reliability:.2f}"
        loss = float(self.ablation.losses.mean())
        lines = [
            f"usefulness on {self.data}: the loss is {loss:.4g}; closing all gates changes it by "
            f"{self.ablation.joint:+.3g}. {self._by_closing()}{self._by_path()}",
            f"usefulness: the split-half reliability of the ranking by closing {reliable}.",
        ]
        return "\n".join([*lines, *map(str, self.agreements)])

    def _by_path(self) -> str:
        if self.path is None:
            return ""
        return f" The gate path adds up to {self.path.total:+.3g} on {self.path.points} points."

    def _by_closing(self) -> str:
        total = math.fsum(self.ablation.means.values())
        if math.isnan(self.share):
            return f"Closing one branch at a time gives {total:+.3g} in sum."
        return (
            f"Closing one branch at a time gives {total:+.3g} in sum, {self.share:.2f} of that (near 0: blocks replace "
            "one another)."
        )


def conclude(history: History, ablation: Ablation, path: Attribution | None, data: str) -> Conclusion:
    """Set ablation and gate path side by side.

    Args:
        history: The history of the run.
        ablation: What :func:`ablate` returned.
        path: What :func:`attribute` returned for the same batches, where it could.
        data: What these are, for people.
    """
    reliability = split_half_reliability(ablation.by_batch)
    found: tuple[Agreement, ...] = agreements(history, ablation.means, reliability)
    if path is not None:
        what = "the gate path on the other half of the batches"
        found += (halves_agreement(what, path.by_batch, ablation.by_batch),)
    return Conclusion(ablation, path, reliability, found, data)
