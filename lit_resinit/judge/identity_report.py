"""What is said of every branch and stream of one forward: closed or open, with the cause, and in words."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from lit_resinit.errors import IdentityError
from lit_resinit.words import Shown, together, without_numbers

Cause = Literal["unzeroed scale", "bias after scale", "ungated branch", "nonfinite branch", "stream changed"]
NOT_RUN = "this forward did not run the branch; judged by its parameters"
GROWTH = (0.5, math.e)  # Var(out)/Var(in) of a stream under a constant scale: (1 + 1/L)^L stays below e


@dataclasses.dataclass(frozen=True, slots=True)
class BranchIdentity:
    """The verdict on one branch: ``closed`` when the sum equals the skip exactly, else ``open`` with the cause.

    ``culprit`` is the parameter to blame, or else the module; ``deviation`` is the largest ``|out - skip|``, in units
    of the activations.
    """

    name: str
    status: Literal["closed", "open"]
    cause: Cause | None = None
    culprit: str | None = None
    deviation: float = 0.0
    note: str = ""
    source: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class StackIdentity:
    """A chain of branches on one stream: the tensor entering the first against the tensor leaving the last.

    ``exact`` is whether they are equal; ``changed_by`` names what the stream passes between the additions (a ReLU, a
    norm after the sum, a projection), ``rescaled_by`` those among them that divide the stream by its own size;
    ``growth`` is Var(out)/Var(in), dimensionless.
    """

    first: str
    last: str
    exact: bool
    deviation: float
    changed_by: tuple[str, ...]
    growth: float
    rescaled_by: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class IdentityReport(Shown):
    """One verdict for each branch of a plan that was not excluded, and one for each stream.

    ``silenced`` names the outputs of the network that the closed gates make the same for every batch: a network behind
    learned queries, for one, is told of its input by its branches alone. :func:`check_identity` looks for them.
    ``constant`` is whether a constant scales the branches; ``trained`` names a parameter that looks trained, where
    branches are open that nothing was to close.
    """

    branches: tuple[BranchIdentity, ...]
    stacks: tuple[StackIdentity, ...]
    constant: bool = False
    trained: str = ""
    silenced: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every branch is closed; with a constant scale, whether every stream keeps its variance."""
        if self.constant:
            return all(GROWTH[0] <= s.growth <= GROWTH[1] for s in self.stacks)
        return all(b.status == "closed" for b in self.branches)

    def __str__(self) -> str:
        return describe(self)

    def __repr__(self) -> str:
        return Shown.__repr__(self)  # or else it would be that of a dataclass

    def _title(self) -> str:
        if self.constant:
            growths = [f"{s.growth:.3g}" for s in self.stacks]
            return f"Var(out)/Var(in) of each stream {', '.join(growths[:3])}{', ...' if growths[3:] else ''}"
        open_ = sum(b.status == "open" for b in self.branches)
        return f"{open_} of {len(self.branches)} branches open" if open_ else f"{len(self.branches)} branches closed"

    def _cells(self) -> list[tuple[str, ...]]:
        rows = [(b.name, b.status, b.cause or "-", b.culprit or "-", f"{b.deviation:.3g}") for b in self.branches]
        return [("branch", "status", "cause", "culprit", "deviation"), *rows]

    def raise_if_open(self) -> None:
        """Raise when :attr:`ok` is false.

        Raises:
            IdentityError: Naming block, cause and culprit of the first, and how many more there are.
        """
        if not self.ok:
            raise IdentityError(describe(self), self)


# -------------------------------------------------------------------- words

_NEXT = {
    "unzeroed scale": "set it to its closing value after the last initialisation, or let scheme='auto' do so",
    "bias after scale": "zero that bias with the scale; scheme='auto' closes both",
    "ungated branch": "give the branch a gate: scheme='insert', or a `ScalarGate` at its end",
    "nonfinite branch": "zero times infinity is no zero: bound that operation, or close before it",
    "stream changed": "leave the skip alone (a factor of one, and no operation that writes into the block's input) and "
    "scale the branch instead",
}


_CLOSES = ("unzeroed scale", "bias after scale", "ungated branch")  # whose remedy closes the branch
_LEAVE_OPEN = "leave it open and pass identity='ignore': closing it would destroy what it has learned"


def describe(report: IdentityReport) -> str:
    """The report as a message: the first of each kind by name, the others counted."""
    if report.constant:
        return _describe_growth(report)
    open_ = [b for b in report.branches if b.status == "open"]
    without = _describe_silenced(report)
    if not open_:
        unseen = sum(b.note == NOT_RUN for b in report.branches)
        more = f"; {unseen} of them did not run in this forward and were judged by their parameters" if unseen else ""
        return f"checked {len(report.branches)} branches: each contributes exactly nothing{more}.{without}"
    groups: dict[tuple[str, str], list[BranchIdentity]] = {}
    for b in open_:
        key = (
            (b.cause or "", b.culprit or "")
            if b.cause == "nonfinite branch"
            else (b.cause or "", without_numbers(b.culprit or ""))
        )
        groups.setdefault(key, []).append(b)
    lines = [
        f"compared {len(report.branches)} residual additions with their skip; expected each branch to "
        f"contribute exactly nothing, found {len(open_)} of {len(report.branches)} open:"
    ]
    for (cause, _), rows in groups.items():
        first = next((r for r in rows if (r.culprit or "").startswith(r.name)), rows[0])
        total = sum(without_numbers(b.name) == without_numbers(first.name) for b in report.branches)
        names = first.name if len(rows) == 1 else f"{together([r.name for r in rows])} ({len(rows)} of {total} such)"
        if cause == "nonfinite branch":
            names = first.name if len(rows) == 1 else f"{first.name} and what comes after it ({len(rows)} in all)"
        where = f", at {first.source}" if first.source else ""
        size = f", deviation {first.deviation:.3g}"
        next_ = _LEAVE_OPEN if report.trained and cause in _CLOSES else _NEXT[cause]
        lines.append(f"- {names}: {cause}, culprit {first.culprit}{size}{where}. Next: {next_}.")
    if report.trained:
        lines.append(f"This network looks trained ({report.trained} is no longer as it was initialised).")
    lines.append("To watch an open network as it is, pass identity='ignore' or exclude those branches.")
    return "\n".join(lines)


def _describe_silenced(report: IdentityReport) -> str:
    if not report.silenced:
        return ""
    return (
        f" Until they open, this output of the network is the same for every batch: {', '.join(report.silenced)}. "
        "Nothing but these branches leads there from the input."
    )


def _describe_growth(report: IdentityReport) -> str:
    lines = [f"Var(out)/Var(in) of each stream; expected between {GROWTH[0]} and {GROWTH[1]:.3g}:"]
    lines += [f"- {s.first} to {s.last}: {s.growth:.3g}" for s in report.stacks]
    return "\n".join(lines)
