"""What a trial has to say, one finding at a time, and what is done with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

from lit_resinit.errors import ResInitError, warn
from lit_resinit.judge.identity_report import IdentityReport
from lit_resinit.judge.steep import SLOW
from lit_resinit.judge.verdicts import GradientReport
from lit_resinit.words import together


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a trial has to say.

    Args:
        about: ``identity``: a branch is open; ``gradient``: a gate cannot learn; ``advice``: nothing stops for it.
        message: What was checked, expected and found, where, and what to do next.
        error: What to raise, with its report; None for advice.
    """

    about: Literal["identity", "gradient", "advice"]
    message: str
    error: ResInitError | None = None

    @property
    def level(self) -> Literal["error", "warning"]:
        """Whether the run should stop."""
        return "warning" if self.error is None else "error"


def act(findings: Iterable[Finding]) -> None:
    """Raise what stops a run, and warn of the rest, in the order of the findings."""
    for finding in findings:
        if finding.error is not None:
            raise finding.error
        warn(finding.message)


def advice(message: str) -> list[Finding]:
    """A finding for which nothing stops; none for ""."""
    return [Finding("advice", message)] if message else []


def changed_streams(report: IdentityReport) -> list[Finding]:
    """Streams that pass more than closed branches, so that their stack is no identity."""
    changed = [s for s in report.stacks if s.changed_by and s.deviation > 0]
    if not changed:
        return []
    return advice(
        f"the stream from {changed[0].first} to {changed[0].last} also passes "
        f"{', '.join(changed[0].changed_by[:4])}: the branches are closed, "
        "but the stack is the identity only up to these."
    )


def far_off(report: GradientReport) -> list[Finding]:
    """Gradients that are far too large, and gates that hardly any of the error reaches."""
    found: list[Finding] = []
    exploding = [g for g in report.gates.values() if g.status == "exploding"]
    if exploding:
        where = f", at {exploding[0].source}" if exploding[0].source else ""
        found += advice(f"{together([g.parameter for g in exploding])}: {exploding[0].cause}{where}.")
    slow = [g for g in report.gates.values() if g.status == "alive" and g.slope < SLOW]
    if slow:
        by = f", attenuated by {slow[0].attenuated_by}" if slow[0].attenuated_by else ""
        found += advice(
            f"slow start: only {slow[0].slope:.1e} of the error reaches "
            f"{together([g.parameter for g in slow])}{by}. "
            "Raise that factor, or close it instead of what lies before it."
        )
    return found


def still_frozen(names: list[str]) -> list[Finding]:
    """Gates that were to be unfrozen in a training that is over."""
    if not names:
        return []
    return advice(
        f"{len(names)} gates are still frozen at the end ({together(names)}): they were to be unfrozen, and "
        "were not, so their branches never contributed. Unfreeze them earlier, or train longer."
    )
