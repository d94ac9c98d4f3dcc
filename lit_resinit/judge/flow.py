"""The chain rule of one observed step: which of its links failed."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch

from lit_resinit.find.zeros import zero_sources
from lit_resinit.graph import ops
from lit_resinit.graph.ops import Does
from lit_resinit.graph.values import Graph, Node

EPS = float(torch.finfo(torch.float32).eps)
_NOISE = 32 * EPS  # what rounding leaves of terms that cancel: sums of a thousand terms lose about sqrt(1000) units
_REASONS = 8  # kept for each operation, or a deep network would carry every parameter's along; the best come first

ReasonKind = Literal[
    "factor", "slope", "cancel", "balance", "data", "chance", "counter", "underflow", "unreached", "hook", "written"
]
BY_BATCH = (
    "data",
    "balance",
    "chance",
    "counter",
    "underflow",
)  # what another batch, another draw, or the next step changes
_HALF_STEP = 2.0**-24  # the smallest number of float16 above zero
State = Literal["live", "zero", "noise", "nonfinite", "absent"]


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """Why an error became zero at one operation.

    ``factor``: another factor of a product is zero, because of ``parameters`` (empty: because of a constant);
    ``slope``: the function has slope zero there; ``cancel``: the terms cancel and rounding is left; ``balance``: terms
    that are products with different data cancel, as other data need not; ``data``: the values of this batch;
    ``chance``: a random draw; ``counter``: a buffer that the forward itself writes; ``underflow``: the error is smaller
    than what half precision can hold; ``unreached``: the operation's output is not used by the loss; ``hook``: a hook
    on its output replaced the error; ``written``: a backward written in Python returns a zero that no error went into.
    """

    kind: ReasonKind
    call: int
    parameters: frozenset[str] = frozenset()


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


class Flow:
    """The chain rule of one step, operation by operation.

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
    """

    def __init__(
        self,
        graph: Graph,
        values: dict[int, float],
        arriving: dict[int, float],
        edges: dict[int | str, list[tuple[int, float]]],
        additions: dict[str, int],
        frozen: set[str],
        hooked: dict[str, Hooked],
        replaced: set[int],
        written: dict[tuple[int, int | str], str],
        python: dict[int, str],
        applied: dict[int, str],
        full: frozenset[int] = frozenset(),
        halved: frozenset[tuple[int, int | str]] = frozenset(),
    ) -> None:
        self.graph, self.values, self.arriving, self.edges = graph, values, arriving, edges
        self.additions, self.frozen, self.hooked = additions, frozen, hooked
        self.replaced, self.written, self.python, self.applied = replaced, written, python, applied
        self.full, self.halved = full, halved
        self.leaves = {n.name: n.index for n in graph.nodes if n.op == "parameter"}
        self._readers = self._find_readers()
        self._spelled: dict[int, list[int]] = {}
        for node in graph.nodes:
            if node.call >= 0:
                self._spelled.setdefault(node.call, []).append(node.index)
        self._explained: dict[int, frozenset[str]] = {}
        self._counters = _written_buffers(graph)
        self._zero: list[bool] = []
        self._moves: list[bool] = []  # whether a value that is not zero depends on data, draws or counters
        for node in graph.nodes:
            self._zero.append(self._is_zero(node))
            self._moves.append(not self._zero[-1] and self._is_moved(node))
        self.alive = {n for n, e in edges.items() if isinstance(n, str) and any(s > 0.0 for _, s in e)} - frozen
        self.state: dict[int, State] = {}
        self.reasons: dict[int, tuple[Reason, ...]] = {}
        self.partly: dict[int, tuple[Reason, ...]] = {}
        self.origins: dict[int, tuple[int, ...]] = {}
        for call in range(len(graph.calls) - 1, -1, -1):
            self._judge_call(call)

    # ---------------------------------------------------------------- one operation after the other, from the loss back

    def _judge_call(self, call: int) -> None:
        error = self.arriving.get(call)
        edges = self.edges.get(call, [])
        if error is None:
            self.state[call], self.reasons[call] = "absent", (Reason("unreached", call),)
        elif not math.isfinite(error):
            self.state[call] = "nonfinite"
            self.origins[call] = self.origins_of(edges) or (call,)
        elif error == 0.0 and call in self.replaced:
            self.state[call], self.reasons[call] = "zero", (Reason("hook", call),)
        elif error == 0.0:
            self.state[call], self.reasons[call] = "zero", self.reasons_of(call, edges) or (Reason("data", call),)
        elif self.is_noise(edges, error):
            self.state[call], self.reasons[call] = "noise", self.reasons_of(call, edges)
        else:
            self.state[call] = "live"
            self.partly[call] = self._zero_parts(call, edges)

    def _zero_parts(self, call: int, edges: list[tuple[int, float]]) -> tuple[Reason, ...]:
        """Reasons of the paths that send nothing although others do: what a part of the value may wait for."""
        found = dict.fromkeys(self.reasons_of(call, [e for e in edges if e[1] == 0.0], parts=False))
        for consumer, _ in edges:
            found |= dict.fromkeys(self.partly.get(consumer, ()))
        return tuple(sorted(found, key=self._rank)[:_REASONS])

    def is_noise(self, edges: list[tuple[int, float]], total: float) -> bool:
        """Whether an error is what rounding left of terms that cancel."""
        if not edges:
            return False
        if all(size == 0.0 or self._edge_is_noise(consumer, size) for consumer, size in edges):
            return True
        return len(edges) > 1 and total <= _NOISE * max(size for _, size in edges)

    def _edge_is_noise(self, consumer: int, size: float) -> bool:
        return self.state[consumer] == "noise" or self._cancels(consumer, size)

    def _cancels(self, call: int, size: float) -> bool:
        """A norm or softmax subtracts means from the error: what is left may be rounding only."""
        base, outputs = ops.base_name(self.graph.calls[call].func), self.graph.calls[call].outputs
        if ops.does(base, Does.SHARES):
            gain = 1.0
        elif ops.does(base, Does.NORMALISES) and len(outputs) > 1:
            gain = self.values.get(outputs[min(2, len(outputs) - 1)], 0.0)
        else:
            return False
        return size <= _NOISE * gain * self.arriving.get(call, 0.0)

    def reasons_of(
        self, target: int | str, edges: list[tuple[int, float]], *, parts: bool = True
    ) -> tuple[Reason, ...]:
        """Why the sum of these errors is zero (or noise).

        Where an operation only takes other elements (a class token, say), the elements left out may get their error
        on paths that are closed now; with ``parts`` these are named too. Where an error arrived at every element, no
        element waits for such a path.
        """
        found: dict[Reason, None] = {}
        for consumer, size in edges:
            if self.state[consumer] in ("zero", "noise"):
                found |= dict.fromkeys(self.reasons[consumer])
            elif size != 0.0:
                several = not self._cancels(consumer, size) and self._reads_several(target, edges)
                found[Reason("balance" if several else "cancel", consumer)] = None
            else:
                local = self._local(consumer, target)
                found |= dict.fromkeys(local)
                if parts and consumer not in self.full and all(r.kind in BY_BATCH for r in local):
                    found |= dict.fromkeys(self.partly.get(consumer, ()))
        return tuple(sorted(found, key=self._rank)[:_REASONS])

    def _reads_several(self, target: int | str, edges: list[tuple[int, float]]) -> bool:
        """Whether the terms of an error are products with different values of data, which need not cancel next time."""
        others: set[int] = set()
        for call in {c for c, size in edges if size != 0.0}:
            inputs = self.graph.calls[call].inputs
            own = {i for i in inputs if self._is_shown(i, target, inside=call in self.python)}
            others |= {p for i in own for p in self._partners(call, i) if self.graph.nodes[p].data} - own
        return len(others) > 1

    def _rank(self, reason: Reason) -> int:
        """Reasons that name a parameter with a gradient come first, for only a few are kept."""
        if reason.parameters & self.alive:
            return 0
        return 1 if reason.kind == "factor" and reason.parameters else 2

    def origins_of(self, edges: list[tuple[int, float]]) -> tuple[int, ...]:
        """The operations that turned a finite error into NaN or inf."""
        found: dict[int, None] = {}
        for consumer, size in edges:
            if not math.isfinite(size):
                found |= dict.fromkeys(self.origins.get(consumer, (consumer,)))
        return tuple(found)[:_REASONS]

    def nan_maker(self, call: int) -> int | None:
        """The operation of the forward that made the NaN which an operation read, if it read one."""
        nodes = self.graph.nodes
        stack = [i for i in self.graph.calls[call].inputs if self._is_nan(i)]
        seen, makers = set(stack), []
        while stack:
            node = nodes[stack.pop()]
            before = self.graph.calls[node.call].inputs if node.call >= 0 else ()
            bad = [i for i in before if self._is_nan(i)]
            if not bad and node.call >= 0:
                makers.append(node.call)
            stack += [i for i in bad if i not in seen]
            seen.update(bad)
        return min(makers, default=None)

    def _is_nan(self, node: int) -> bool:
        value = self._value(node)
        return value is not None and math.isnan(value)

    # ---------------------------------------------------------------- the broken link

    def _local(self, call: int, target: int | str) -> list[Reason]:
        """Why one operation sends nothing to one of its inputs although an error arrives at its output."""
        record = self.graph.calls[call]
        operands = [i for i in record.inputs if self._is_shown(i, target, inside=call in self.python)]
        reasons = [self._local_reason(call, target, operand) for operand in operands]
        if (call, target) in self.written and self.arriving.get(call) and all(r.kind in BY_BATCH for r in reasons):
            return [Reason("written", call)]
        return reasons or [Reason("data", call)]

    def _local_reason(self, call: int, target: int | str, operand: int) -> Reason:
        partners, node = self._partners(call, operand), self.graph.nodes[operand]
        blocking = [p for p in partners if self._value(p) == 0.0] or self._fixed_conditions(call, operand)
        if (call, target) in self.halved and self._underflows(call, partners):
            return Reason("underflow", call)
        if blocking:
            return self._reason("factor", call, blocking)
        if self._value(operand) == 0.0 and not partners and not self._is_only_added(call, operand):
            return self._reason("slope", call, [operand])
        inputs = [self.graph.nodes[i] for i in self.graph.calls[call].inputs]
        if node.learned and not partners and not any(n.data or n.noise for n in inputs):
            return self._reason("slope", call, [operand])  # whatever the batch is
        return Reason("data", call)

    def _reason(self, kind: ReasonKind, call: int, values: list[int]) -> Reason:
        """A reason by values that are what they are because of parameters, data, draws or counters."""
        names = frozenset[str]().union(*(self.explain(v) for v in values))
        parameters = frozenset(n for n in names if not n.startswith("<"))
        if not parameters and "<counter>" in names:
            kind = "counter"
        elif not parameters and "<data>" in names:
            kind = "chance" if any(self.graph.nodes[v].noise for v in values) and kind == "factor" else "data"
        return Reason(kind, call, parameters)

    def _fixed_conditions(self, call: int, operand: int) -> list[int]:
        """Conditions that keep everything of an operand out, and do not depend on data."""
        nodes = (self.graph.nodes[i] for i in self._spelled.get(call, ()))
        chosen = [n for n in nodes if n.op in ("where", "masked_fill") and operand in n.inputs]
        conditions = [n.inputs[0] if n.op == "where" else n.inputs[1] for n in chosen if len(n.inputs) > 1]
        return [c for c in conditions if c != operand and not self._moves[c]]

    def _underflows(self, call: int, partners: list[int]) -> bool:
        """Whether what an operation sends is too small for half precision."""
        factor = max((self._value(p) or 0.0 for p in partners), default=1.0)
        return 0.0 < self.arriving.get(call, 0.0) * factor < _HALF_STEP

    def _is_only_added(self, call: int, operand: int) -> bool:
        """Whether an operation does nothing with an operand but add it, which passes every error on."""
        readers = [n for n in map(self.graph.nodes.__getitem__, self._spelled.get(call, ())) if operand in n.inputs]
        return bool(readers) and all(n.op == "add" for n in readers)

    def _is_shown(self, node: int, target: int | str, *, inside: bool) -> bool:
        """Whether a value is a parameter's or an operation's output, possibly through views of the same memory.

        With ``inside`` also through the operations inside of a function written in Python, which is one to autograd.
        """
        stack, seen = [node], {node}
        while stack:
            current = self.graph.nodes[stack.pop()]
            if current.name == target if isinstance(target, str) else current.call == target:
                return True
            if current.op == "view":
                fresh = set(current.inputs[:1]) - seen
            elif inside and current.call in self.applied and current.call not in self.arriving:
                fresh = set(current.inputs) - seen
            else:
                continue
            seen |= fresh
            stack += fresh
        return False

    def _value(self, node: int) -> float | None:
        known = self.values.get(node)
        if known is None and ops.does(self.graph.nodes[node].op, Does.COPIES):
            return self._value(self.graph.nodes[node].inputs[0])
        return known

    def _partners(self, call: int, operand: int) -> list[int]:
        """What one operation multiplies an operand with, including the condition of a selection."""
        reached, partners = {operand}, []
        for index in self._spelled.get(call, ()):
            node = self.graph.nodes[index]
            if not reached.intersection(node.inputs):
                continue
            if ops.does(node.op, Does.MULTIPLIES):
                partners += [i for i in node.inputs if i not in reached] or list(node.inputs[:1])
            elif node.op in ("where", "masked_fill"):
                partners += [i for i in node.inputs if i != operand][:1]
            reached.add(index)
        return partners

    def explain(self, node: int) -> frozenset[str]:
        """The parameters behind a value that is zero, or fixed by zeros; ``<data>`` and the like where none is."""
        if node in self._explained:
            return self._explained[node]
        found: set[str] = set()
        stack, seen = [node], {node}
        while stack:
            current = self.graph.nodes[stack.pop()]
            leaf = self._leaf_word(current)
            if leaf:
                found.add(leaf)
                continue
            causes = self._causes(current)
            if not causes:
                found.add("<data>" if current.data else "<constant>")
            fresh = [i for i in causes if i not in seen]
            seen.update(fresh)
            stack += fresh
        if len(found) > 1:
            found.discard("<constant>")
        self._explained[node] = frozenset(found)
        return self._explained[node]

    def _leaf_word(self, node: Node) -> str:
        if node.op == "parameter":
            return node.name
        if node.index in self._counters:
            return "<counter>"
        if node.op == "input" or node.noise or (node.op == "scale" and node.number == 0):
            return "<data>"
        return "" if node.inputs else "<constant>"

    def _causes(self, node: Node) -> list[int]:
        """The inputs that make a value zero, or else all of them where none depends on data otherwise."""
        if node.learned and not node.data:
            return list(node.inputs)
        if self._zero[node.index]:
            sources = zero_sources(self.graph, node, self._zero.__getitem__)
            zero = list(sources) or [i for i in node.inputs if self._zero[i]]
            if zero:
                return zero
        if any(self._moves[i] for i in node.inputs):
            return []
        nodes = self.graph.nodes
        return [i for i in node.inputs if nodes[i].data or nodes[i].learned] or list(node.inputs)

    def _is_zero(self, node: Node) -> bool:
        known = self._value(node.index)
        if known is None:
            return bool(zero_sources(self.graph, node, self._zero.__getitem__))
        return known == 0.0

    def _is_moved(self, node: Node) -> bool:
        leaf = self._leaf_word(node)
        return leaf in ("<data>", "<counter>") or any(self._moves[i] for i in node.inputs)

    def reads_zero(self, call: int) -> bool:
        """Whether one of an operation's inputs is zero."""
        return any(self._value(i) == 0.0 for i in self.graph.calls[call].inputs)

    def spelled(self, call: int) -> str:
        """What went backwards, in words."""
        if call in self.python:
            return f"the backward of `{self.python[call]}` (or a hook on it)"
        return f"`{ops.base_name(self.graph.calls[call].func)}`"

    def source(self, call: int) -> str:
        """``file.py:line`` of an operation, or of what applies the function written in Python that it is in."""
        return (self.applied.get(call) if call in self.python else None) or self.graph.calls[call].source

    # ---------------------------------------------------------------- sizes along the way

    def steps_between(self, first: int, last: int) -> list[tuple[float, int]]:
        """(error out / error in, operation) for every operation between two, the error running backwards."""
        steps = []
        for target in range(first, last):
            for consumer, size in self.edges.get(target, ()):
                arriving = self.arriving.get(consumer, 0.0)
                if consumer <= last and arriving > 0.0 and math.isfinite(size):
                    steps.append((size / arriving, consumer))
        return steps

    def reader(self, name: str) -> int | None:
        """The operation in which a parameter meets the data: the product, addition or kernel that reads it."""
        return self._readers.get(self.leaves.get(name, -1))

    def _find_readers(self) -> dict[int, int]:
        readers: dict[int, int] = {}
        shown: dict[int, frozenset[int]] = {index: frozenset({index}) for index in self.leaves.values()}
        for node in self.graph.nodes:
            leaves = frozenset[int]().union(*(shown[i] for i in node.inputs if i in shown))
            if not leaves:
                continue
            if node.data:
                for leaf in leaves:
                    readers.setdefault(leaf, node.call)
            else:
                shown[node.index] = leaves
        return readers


def _written_buffers(graph: Graph) -> frozenset[int]:
    """Buffers that the forward writes into, as a counter of steps."""
    found: set[int] = set()
    for call in graph.calls:
        if not ops.written_arguments(call.func) or not call.inputs:
            continue
        node = graph.nodes[call.inputs[0]]
        while node.op == "part" or ops.does(node.op, Does.COPIES):
            node = graph.nodes[node.inputs[0]]
        if node.op == "buffer":
            found.add(node.index)
    return frozenset(found)
