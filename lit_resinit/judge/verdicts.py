"""What is said of gates and zero layers: verdicts, a report of them, and the report in words."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from lit_resinit.errors import GradientError
from lit_resinit.words import Shown, in_columns, together, without_numbers

Status = Literal["alive", "asleep", "dead", "missing", "nonfinite", "exploding"]
Role = Literal["gate", "bias", "zero layer", "branch", "layer"]
ALARMS: tuple[Status, ...] = ("nonfinite", "dead", "missing")


@dataclasses.dataclass(frozen=True, slots=True)
class GateGradient:
    """The verdict on one gate, one bias closed with it, one zero layer, or one branch without a gate.

    Args:
        parameter: Dotted name; for a branch without a gate the buffer that keeps it closed, or else the branch.
        status: See :class:`GradientReport`.
        cause: One sentence; empty when alive.
        waits_for: The zero parameter that an asleep gate waits for; None when it waits for other data.
        source: ``file.py:line`` of the operation to blame, when known.
        slope: Size of the error at the gate's output over that at the branch's end; NaN when unknown.
        size: Largest absolute gradient.
        branch: Name of its branch; empty for a zero layer.
        role: ``gate``, ``bias``, ``zero layer`` ``branch`` (one that nothing can open) or ``layer`` (another
            parameter of a block).
        attenuated_by: The operation that makes a small slope, with its line.
        remedy: What to do next, where that is something else than usual for the status.
        by_chance: Whether a random draw made the gradient zero (a dropped branch), as it may again.
        may_round: Whether something in its branch may leave nothing but rounding of an error, which looks like one.
        origin: Whether what is wrong begins here; False where it only arrives, from behind the block.
    """

    parameter: str
    status: Status
    cause: str = ""
    waits_for: str | None = None
    source: str = ""
    slope: float = math.nan
    size: float = math.nan
    branch: str = ""
    role: Role = "gate"
    attenuated_by: str = ""
    remedy: str = ""
    by_chance: bool = False
    may_round: bool = False
    origin: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Words:
    """What a rule says of a gradient: fields of the verdict that it gives, as in :class:`GateGradient`."""

    cause: str = ""
    source: str = ""
    remedy: str = ""
    waits_for: str | None = None
    by_chance: bool = False
    origin: bool = True
    slope: float = math.nan
    attenuated_by: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """By name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True, slots=True)
class GradientReport(Shown):
    """One verdict for every gate, the biases closed with it, and every zero layer, keyed by parameter name.

    ``alive``: it learns. ``asleep``: exactly zero, explained by what training or the next batch changes. ``dead``:
    exactly zero (or rounding noise) for good. ``missing``: no gradient at all. ``nonfinite``: NaN or inf.
    ``exploding``: more than a million times the median.
    """

    gates: dict[str, GateGradient]

    @property
    def alarms(self) -> tuple[GateGradient, ...]:
        """The verdicts that stop a run, the origin first."""
        found = [g for g in self.gates.values() if g.status in ALARMS]
        return tuple(sorted(found, key=lambda g: (ALARMS.index(g.status), not g.origin)))

    @property
    def ok(self) -> bool:
        """Whether nothing stops the run."""
        return not self.alarms

    def __str__(self) -> str:
        return describe(self)

    def __repr__(self) -> str:
        return Shown.__repr__(self)  # or else it would be that of a dataclass

    def _title(self) -> str:
        return _counted(self)

    def table(self) -> str:
        """Every verdict, one line each: status, gradient, slope, and what it waits for or what is wrong."""
        return in_columns(self._cells())

    def _cells(self) -> list[tuple[str, ...]]:
        header = ("parameter", "role", "status", "max |gradient|", "slope", "why")
        rows = [
            (
                g.parameter,
                g.role,
                g.status,
                "-" if math.isnan(g.size) else f"{abs(g.size):.3g}",
                "-" if math.isnan(g.slope) else f"{g.slope:.3g}",
                f"{g.cause}{f', at {g.source}' if g.source else ''}" or "-",
            )
            for g in self.gates.values()
        ]
        return [header, *rows]

    def raise_if_dead(self) -> None:
        """Raise when a gate is dead, missing or nonfinite.

        Raises:
            GradientError: Naming the gate, the broken link and the line; the others are counted.
        """
        if not self.ok:
            raise GradientError(describe(self), self)


def harmless(bias: GateGradient, gate: str) -> GateGradient:
    """The verdict on a bias without a gradient of its own, whose gate has one."""
    note = f"its own gradient vanishes ({bias.cause}), which does no harm while {gate} is alive"
    return dataclasses.replace(bias, status="alive", cause=note, source="", waits_for=None)


# -------------------------------------------------------------------- words

_NEXT: dict[str, str] = {
    "dead": "make that factor nonzero at the start, or put the gate behind it",
    "missing": "let the gate take part in the loss, or exclude its branch",
    "nonfinite": "make the operation safe at zero before it is evaluated",
}


def _counted(report: GradientReport) -> str:
    counts: dict[str, int] = {}
    for gate in report.gates.values():
        counts[gate.status] = counts.get(gate.status, 0) + 1
    return ", ".join(f"{n} {status}" for status, n in counts.items()) or "none"


def describe(report: GradientReport) -> str:
    """The report as a message: the origin by name, with the line; equal findings counted."""
    alarms = report.alarms
    if not alarms:
        waits = sorted({g.waits_for for g in report.gates.values() if g.waits_for})
        more = f"; they wait for {together(waits)}" if waits else ""
        return f"judged the gradients of {len(report.gates)} gates, biases and zero layers: {_counted(report)}{more}."
    lines = [
        f"judged the gradients of {len(report.gates)} gates, biases and zero layers; expected each to learn, found "
        f"{len(alarms)} that cannot:"
    ]
    groups: dict[tuple[str, str, str], list[GateGradient]] = {}
    for gate in alarms:
        groups.setdefault((gate.status, without_numbers(gate.cause), gate.source), []).append(gate)
    for (status, _, source), rows in groups.items():
        cause = rows[0].cause
        names = together([r.parameter for r in rows])
        block = f" (branch {rows[0].branch})" if rows[0].branch else ""
        where = f", at {source}" if source else ""
        more = f" ({len(rows)} in all)" if len(rows) > 3 else ""
        lines.append(f"- {names}{more}{block}: {status}: {cause}{where}. Next: {rows[0].remedy or _NEXT[status]}.")
    return "\n".join(lines)
