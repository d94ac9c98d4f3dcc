"""The broken link: why one operation sends nothing to one of its inputs."""

from __future__ import annotations

import functools

from lit_resinit.find.views import is_nothing
from lit_resinit.graph import ops
from lit_resinit.graph.ops import Does
from lit_resinit.judge.explain import Explained
from lit_resinit.judge.seen import BY_BATCH, Reason, ReasonKind, Seen

_WITHOUT = (
    "it is computed without gradients (`no_grad`, or activation checkpointing with use_reentrant=True on an input that "
    "needs none)"
)
_HALF_STEP = 2.0**-24  # the smallest number of float16 above zero


class Links:
    """The operations of one step as links of the chain rule.

    Args:
        seen: The step.
    """

    def __init__(self, seen: Seen) -> None:
        self.seen, self.graph, self.arriving = seen, seen.graph, seen.arriving
        self.explained = Explained(seen.graph, seen.values, seen.counters)
        self._spelled: dict[int, list[int]] = {}
        for node in seen.graph.nodes:
            if node.call >= 0:
                self._spelled.setdefault(node.call, []).append(node.index)

    def reasons(self, call: int, target: int | str) -> list[Reason]:
        """Why one operation sends nothing to one of its inputs although an error arrives at its output."""
        record = self.graph.calls[call]
        operands = [i for i in record.inputs if self._is_shown(i, target, inside=call in self.seen.python)]
        reasons = [self._local_reason(call, target, operand) for operand in operands]
        guessed = all(r.kind in (*BY_BATCH, "slope") for r in reasons)
        if (call, target) in self.seen.written and self.arriving.get(call) and guessed:
            return [Reason("written", call)]
        return reasons or [Reason("data", call)]

    def rounding(self, call: int, target: int | str) -> int | None:
        """Where the terms cancelled of which another factor of an operation is what rounding left, if one is."""
        if not self.explained.rounds:
            return None
        inside = call in self.seen.python
        operands = [i for i in self.graph.calls[call].inputs if self._is_shown(i, target, inside=inside)]
        places = [self.explained.rounding(p) for i in operands for p in self._partners(call, i)]
        return next((place for place in places if place is not None), None)

    def cut(self, leaf: int) -> tuple[int | None, str]:
        """Where the way from a parameter to the loss is cut off for gradients, and by what, in words.

        Of several such places the one that runs last, for what is cut off there is not cut off before.
        """
        waiting, seen, found = [leaf], {leaf}, []
        while waiting:
            node = waiting.pop()
            if node in self._detached:
                found.append((self._detached[node], "what it computes is detached"))
                continue
            for reader in self._readers[node]:
                call = self.graph.nodes[reader].call
                if not self.graph.calls[call].graded:
                    found.append((call, _WITHOUT if node == leaf else "what reads it runs without gradients"))
                elif reader not in seen:
                    seen.add(reader)
                    waiting.append(reader)
        return max(found, default=(None, "the loss does not use what it computes"))

    @functools.cached_property
    def _detached(self) -> dict[int, int]:
        """The last operation that detaches a value, which makes no value of its own."""
        calls = enumerate(self.graph.calls)
        return {c.inputs[0]: i for i, c in calls if ops.base_name(c.func) in ("detach", "detach_") and c.inputs}

    @functools.cached_property
    def _readers(self) -> list[list[int]]:
        return self.graph.consumers()

    def _local_reason(self, call: int, target: int | str, operand: int) -> Reason:
        partners, node = self._partners(call, operand), self.graph.nodes[operand]
        blocking = [p for p in partners if self.explained.value(p) == 0.0] or self._fixed_conditions(call, operand)
        if (call, target) in self.seen.halved and self._underflows(call, partners):
            return Reason("underflow", call)
        if self._is_multiplied_by_nothing(call, operand):
            return Reason("number", call)
        if blocking:
            return self._reason("factor", call, blocking)
        if self.explained.value(operand) == 0.0 and not partners and not self._is_only_passed(call, operand):
            return self._reason("slope", call, [operand])
        inputs = [self.graph.nodes[i] for i in self.graph.calls[call].inputs]
        if node.learned and not partners and not any(n.data or n.noise for n in inputs):
            return self._reason("slope", call, [operand])  # whatever the batch is
        record = self.graph.calls[call]
        if len(record.inputs) == 1 and ops.has_no_slope(record.func, record.args, record.kwargs):
            return Reason("slope", call)
        return Reason("data", call)

    def _reason(self, kind: ReasonKind, call: int, values: list[int]) -> Reason:
        """A reason by values that are what they are because of parameters, data, draws or counters."""
        names = frozenset[str]().union(*(self.explained.explain(v) for v in values))
        parameters, factor = frozenset(n for n in names if not n.startswith("<")), kind == "factor"
        if not parameters and "<counter>" in names:
            kind = "counter"
        elif not parameters and "<data>" in names:
            kind = "chance" if any(self.graph.nodes[v].noise for v in values) and kind == "factor" else "data"
        elif names == {"<number>"} and factor:
            kind = "number"
        if not factor or parameters:
            return Reason(kind, call, parameters)
        buffers = frozenset(n for v in values for n in self.explained.buffers_behind(v))
        return Reason(kind, call, fixed_by=buffers, made_at=self.explained.place_of_zero(values[0]))

    def _fixed_conditions(self, call: int, operand: int) -> list[int]:
        """Conditions that keep everything of an operand out, and do not depend on data."""
        nodes = (self.graph.nodes[i] for i in self._spelled.get(call, ()))
        chosen = [n for n in nodes if n.op in ("where", "masked_fill") and operand in n.inputs]
        conditions = [n.inputs[0] if n.op == "where" else n.inputs[1] for n in chosen if len(n.inputs) > 1]
        return [c for c in conditions if c != operand and not self.explained.moves(c)]

    def _underflows(self, call: int, partners: list[int]) -> bool:
        """Whether what an operation sends is too small for half precision."""
        factor = max((self.explained.value(p) or 0.0 for p in partners), default=1.0)
        return 0.0 < self.arriving.get(call, 0.0) * factor < _HALF_STEP

    def _is_multiplied_by_nothing(self, call: int, operand: int) -> bool:
        """Whether an operation multiplies an operand by the number zero: code computes numbers, by counters maybe."""
        readers = (n for n in map(self.graph.nodes.__getitem__, self._spelled.get(call, ())) if operand in n.inputs)
        return any(map(is_nothing, readers))

    def _is_only_passed(self, call: int, operand: int) -> bool:
        """Whether an operation does nothing with an operand but add it, move it or put it beside others.

        That passes every error on, and is no reason for there being none.
        """
        readers = [n for n in map(self.graph.nodes.__getitem__, self._spelled.get(call, ())) if operand in n.inputs]
        return bool(readers) and all(n.op in ("add", "cat", "stack") or ops.does(n.op, Does.MOVES) for n in readers)

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
            elif inside and current.call in self.seen.applied and current.call not in self.arriving:
                fresh = set(current.inputs) - seen
            else:
                continue
            seen |= fresh
            stack += fresh
        return False

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

    def reads_several(self, target: int | str, edges: list[tuple[int, float]]) -> bool:
        """Whether the terms of an error are products with different values of data, which need not cancel next time."""
        others: set[int] = set()
        for call in {c for c, size in edges if size != 0.0}:
            inputs = self.graph.calls[call].inputs
            own = {i for i in inputs if self._is_shown(i, target, inside=call in self.seen.python)}
            others |= {p for i in own for p in self._partners(call, i) if self.graph.nodes[p].data} - own
        return len(others) > 1
