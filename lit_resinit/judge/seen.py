"""What one observed step has shown, as numbers, and the reasons why an error may become zero."""

from __future__ import annotations

import dataclasses
from typing import Literal

from lit_resinit.graph import ops
from lit_resinit.graph.values import Graph

ReasonKind = Literal[
    "factor",
    "slope",
    "cancel",
    "balance",
    "rounding",
    "data",
    "chance",
    "counter",
    "number",
    "underflow",
    "unreached",
    "hook",
    "written",
]
BY_BATCH = (
    "data",
    "balance",
    "rounding",
    "chance",
    "counter",
    "number",
    "underflow",
)  # what another batch, another draw, or the next step changes


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """Why an error became zero at one operation.

    ``factor``: another factor of a product is zero, because of ``parameters`` (empty: because of a constant);
    ``slope``: the function has slope zero there; ``cancel``: the terms cancel and rounding is left; ``balance``: terms
    that are products with different data cancel, as other data need not; ``rounding``: another factor is what rounding
    left of terms that cancel, as in another batch they need not; ``data``: the values of this batch; ``chance``: a
    random draw; ``counter``: a buffer that the forward itself writes; ``number``: the code multiplies by a number that
    is zero in this step; ``underflow``: the error is smaller than what half precision can hold; ``unreached``: the
    operation's output is not used by the loss; ``hook``: a hook on its output replaced the error; ``written``: a
    backward written in Python returns a zero that no error went into. ``fixed_by`` are buffers of zeros because of
    which a factor is zero for good, and ``made_at`` is the operation that makes such a factor zero.
    """

    kind: ReasonKind
    call: int
    parameters: frozenset[str] = frozenset()
    fixed_by: frozenset[str] = frozenset()
    made_at: int | None = None

    @property
    def place(self) -> int:
        """The operation to blame."""
        return self.call if self.made_at is None else self.made_at


@dataclasses.dataclass(frozen=True, slots=True)
class Hooked:
    """What the hooks on one parameter did in the backward.

    Args:
        sent: Largest absolute gradient before them.
        kept: Largest absolute gradient after them, before it is added to ``grad``.
        used: Whether it was consumed in the backward (an optimizer that steps there), so that ``grad`` says nothing.
        source: ``file.py:line`` of the hooks.
    """

    sent: float
    kept: float
    used: bool
    source: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The forward and backward of one step, operation by operation.

    Args:
        graph: The recorded forward.
        values: Largest absolute value of every node.
        arriving: Largest absolute error that arrived at every operation's output.
        edges: For an operation or a parameter: which operations sent it an error, and how large.
        additions: Operation of every residual addition by branch name.
        frozen: Parameters without a gradient.
        hooked: Parameters with hooks of the user's, and what these did.
        replaced: Operations whose error a hook of the user's turned into zero, NaN or inf.
        written: Operation and what it sent a zero to, where a backward written in Python made that zero from nothing,
            with the line that did.
        python: Operations whose backward is written in Python, with the name of the function.
        applied: Operations that ran without gradients, as those inside of such a function do, and the line
            that applies it, where that is known.
        full: Operations whose every element an error arrived at.
        halved: Operation and what it sent an error in float16 to.
        counters: Buffers that the step itself has written or replaced.
    """

    graph: Graph
    values: dict[int, float]
    arriving: dict[int, float]
    edges: dict[int | str, list[tuple[int, float]]]
    additions: dict[str, int]
    frozen: set[str]
    hooked: dict[str, Hooked]
    replaced: set[int]
    written: dict[tuple[int, int | str], str]
    python: dict[int, str]
    applied: dict[int, str]
    full: frozenset[int] = frozenset()
    halved: frozenset[tuple[int, int | str]] = frozenset()
    counters: frozenset[str] = frozenset()

    def spelled(self, call: int) -> str:
        """What went backwards, in words."""
        if call in self.python:
            return f"the backward of `{self.python[call]}` (or a hook on it)"
        return f"`{ops.base_name(self.graph.calls[call].func)}`"

    def source(self, call: int) -> str:
        """``file.py:line`` of an operation, or of what applies the function written in Python that it is in."""
        return (self.applied.get(call) if call in self.python else None) or self.graph.calls[call].source
