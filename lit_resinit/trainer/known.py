"""What a Trainer's run has found so far, and how it is told at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from torch import Tensor, nn

from lit_resinit.judge.identity_report import IdentityReport
from lit_resinit.judge.optimizers import still_gates
from lit_resinit.judge.verdicts import GradientReport
from lit_resinit.plan.values import ResidualPlan
from lit_resinit.report.about import about_run, later
from lit_resinit.report.tables import history_table
from lit_resinit.trainer.fits import Fits
from lit_resinit.watch.conclusion import Conclusion
from lit_resinit.watch.history import History
from lit_resinit.watch.lapses import gated


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """What is known of a run besides its records.

    Args:
        plan: The plan; None before there is one.
        identity: The verdict of the first step.
        gradients: The verdict of the last judged step.
        woke: Gate parameter to the number of optimizer steps it slept; None where no step was judged.
        conclusion: What was measured at the end.
        fits: How the steps are counted.
        before: What was known when the checkpoint was written from which the run went on.
        setting: Options, seed and versions.
    """

    plan: ResidualPlan | None
    identity: IdentityReport | None
    gradients: GradientReport | None
    woke: dict[str, int] | None
    conclusion: Conclusion | None
    fits: Fits
    before: dict[str, Any] | None = None
    setting: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def about(self) -> dict[str, Any]:
        """In plain types, as the page shows and a checkpoint keeps it."""
        reports = (self.identity, self.gradients, self.woke)
        now = about_run(self.plan, *reports, fits=self.fits.begun, conclusion=self.conclusion, setting=self.setting)
        return now if self.before is None else later(self.before, now)

    def print_table(self, history: History, gate_max: Tensor, step: int) -> None:
        """Print the table of the run, and what was measured at its end.

        Args:
            history: The records.
            gate_max: Largest absolute gate now, ``(branches,)``.
            step: Optimizer steps done.
        """
        assert self.plan is not None
        ablation = None if self.conclusion is None else self.conclusion.ablation
        fits = self.fits.begun
        table = history_table(
            self.plan, history, gate_max=gate_max, step=step, woke=self.woke, fits=fits, ablation=ablation
        )
        Console().print(table)
        if self.conclusion is not None:
            Console().print(str(self.conclusion), highlight=False)

    def lost(self, optimizers: Any, module: nn.Module, history: History, gates: Tensor, step: int) -> list[str]:
        """Gates that hardly moved, and gates that no longer learn, in words.

        Args:
            optimizers: The Trainer's optimizers.
            module: The module.
            history: The records.
            gates: Gate and largest absolute gate now, ``(2 or more, branches)``.
            step: Optimizer steps done.
        """
        assert self.plan is not None
        moved = history.movement(gates[0], gates[1])
        still = still_gates(optimizers, module, self.plan, moved, self.gradients, step, len(history))
        return [text for text in (still, history.lapses.at_end(step, gates[0], gated(self.plan))) if text]

    def state(self, history: History, trial: dict[str, Any]) -> dict[str, Any]:
        """What a resumed run has to know, in plain types, so that the checkpoint loads with ``weights_only=True``.

        Args:
            history: The records.
            trial: The state of the trial.
        """
        gates = () if self.plan is None else self.plan.gates
        folds = {g.parameter: [[n, g.value] for n in g.folds_into] for g in gates}
        own = {"closed": self.plan is not None, "history": history.to_dict(), **trial, "folds": folds}
        return own | {"about": self.about(), "steps": self.fits.offset, "fits": list(self.fits.begun)}
