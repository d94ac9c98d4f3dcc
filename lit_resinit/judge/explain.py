"""Why a value of the forward is zero, or fixed: parameters, data, draws or counters."""

from __future__ import annotations

import math
from collections.abc import Collection

from lit_resinit.find.zeros import stays_zero, zero_sources
from lit_resinit.graph import ops
from lit_resinit.graph.ops import Does, Zero
from lit_resinit.graph.values import Graph, Node

_BUFFER = "<buffer "
_FIXED = ("<constant>", "<number>", _BUFFER)  # what neither training, data, draws nor counters change
_ROUNDING = 4 * 2.0**-23  # of the largest term: what is left of two in float32 that cancel


class Explained:
    """The values of one forward, and what stands behind those that are zero.

    Args:
        graph: The recorded forward.
        values: Largest absolute value of every node.
        counters: Names of buffers that the step itself has written or replaced.
    """

    def __init__(self, graph: Graph, values: dict[int, float], counters: Collection[str] = ()) -> None:
        self.graph, self.values = graph, values
        self._explained: dict[int, frozenset[str]] = {}
        written = {n.index for n in graph.nodes if n.op == "buffer" and n.name in counters}
        self._counters = _written_buffers(graph) | written
        self._zero: list[bool] = []
        self._moves: list[bool] = []  # whether a value that is not zero depends on data, draws or counters
        for node in graph.nodes:
            self._zero.append(self._is_zero(node))
            self._moves.append(not self._zero[-1] and self._is_moved(node))
        self._rounding: dict[int, int] = {}  # values that are what rounding left, and where
        for node in graph.nodes:
            self._note_rounding(node)

    def moves(self, node: int) -> bool:
        """Whether a value that is not zero depends on data, draws or counters."""
        return self._moves[node]

    def value(self, node: int) -> float | None:
        """Largest absolute value of a node, if it was measured."""
        known = self.values.get(node)
        if known is None and ops.does(self.graph.nodes[node].op, Does.COPIES):
            return self.value(self.graph.nodes[node].inputs[0])
        return known

    @property
    def rounds(self) -> bool:
        """Whether any value is what rounding left."""
        return bool(self._rounding)

    def rounding(self, node: int) -> int | None:
        """Where the terms cancelled of which a value is what rounding left; None for any other value."""
        return self._rounding.get(node)

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

    def place_of_zero(self, node: int) -> int | None:
        """The operation that makes a value zero of values that are not all zero, seen back from it."""
        while True:
            current = self.graph.nodes[node]
            before = [i for i in current.inputs if self.graph.nodes[i].data]
            if current.call < 0 or not before or not all(self._zero[i] for i in before):
                return current.call if current.call >= 0 else None
            node = before[0]

    def _is_nan(self, node: int) -> bool:
        value = self.value(node)
        return value is not None and math.isnan(value)

    def reads_zero(self, call: int) -> bool:
        """Whether one of an operation's inputs is zero."""
        return any(self.value(i) == 0.0 for i in self.graph.calls[call].inputs)

    def explain(self, node: int) -> frozenset[str]:
        """The parameters behind a value that is zero, or fixed by zeros; ``<data>`` and the like where none is.

        Constants and buffers are named only where there is nothing else.
        """
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
                found.add("<data>" if current.data and not self._is_always_zero(current) else "<constant>")
            fresh = [i for i in causes if i not in seen]
            seen.update(fresh)
            stack += fresh
        moving = {word for word in found if not word.startswith(_FIXED)}
        self._explained[node] = frozenset(moving or found)
        return self._explained[node]

    def is_fixed(self, node: int) -> bool:
        """Whether a value that is zero is so because of constants and buffers alone."""
        return all(word.startswith(_FIXED) for word in self.explain(node))

    def buffers_behind(self, node: int) -> list[str]:
        """The buffers because of which a value is zero, where no parameter, data, draw or counter is behind it."""
        return sorted(w.removeprefix(_BUFFER)[:-1] for w in self.explain(node) if w.startswith(_BUFFER))

    def _is_always_zero(self, node: Node) -> bool:
        """Whether an operation is zero whatever data it gets."""
        call = self.graph.calls[node.call] if node.call >= 0 else None
        if call is None or len(call.inputs) != 1 or ops.written_arguments(call.func):
            return False
        return ops.is_always_zero(call.func, call.args, call.kwargs, self.graph.nodes[call.inputs[0]].shape)

    def _leaf_word(self, node: Node) -> str:
        if node.op == "parameter":
            return node.name
        if node.index in self._counters:
            return "<counter>"
        if node.op == "input" or node.noise or (node.op == "scale" and node.number == 0):
            return "<data>"
        if node.op == "buffer":
            return f"{_BUFFER}{node.name}>"
        made = "<constant>" if ops.kind(node.op).zero is Zero.ALWAYS else "<number>"
        return "" if node.inputs else made

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

    def _note_rounding(self, node: Node) -> None:
        """A sum that is far smaller than its terms is rounding, and what is zero where it is zero is so too."""
        if self._zero[node.index] or not node.data:
            return
        if node.op in ("add", "shift") and node.call >= 0:
            size, terms = self.value(node.index), [self._size(i) for i in node.inputs]
            terms += [abs(node.number)] if node.op == "shift" and node.number is not None else []
            if size and len(terms) > 1 and None not in terms and size <= _ROUNDING * max(t or 0.0 for t in terms):
                self._rounding[node.index] = node.call
        if node.index not in self._rounding and self._rounding:
            sources = zero_sources(self.graph, node, lambda i: self._zero[i] or i in self._rounding)
            places = [self._rounding[i] for i in sources if i in self._rounding]
            self._rounding |= {node.index: places[0]} if places else {}

    def _size(self, node: int) -> float | None:
        """The value of a node, of a multiple of one too, which is not measured inside of an operation."""
        known, record = self.value(node), self.graph.nodes[node]
        if known is not None or record.op != "scale" or record.number is None:
            return known
        size = self._size(record.inputs[0])
        return None if size is None else abs(record.number) * size

    def _is_zero(self, node: Node) -> bool:
        known = self.value(node.index)
        if known is None:
            return stays_zero(self.graph, node, self._zero.__getitem__)
        return known == 0.0

    def _is_moved(self, node: Node) -> bool:
        leaf = self._leaf_word(node)
        return leaf in ("<data>", "<counter>") or any(self._moves[i] for i in node.inputs)


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
