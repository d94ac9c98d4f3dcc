"""The chain rule of one observed step: which of its links failed."""

from __future__ import annotations

import math
from typing import Literal

import torch

from lit_resinit.graph import ops
from lit_resinit.graph.ops import Does
from lit_resinit.judge.links import Links
from lit_resinit.judge.seen import BY_BATCH, Reason, Seen

EPS = float(torch.finfo(torch.float32).eps)
_NOISE = 32 * EPS  # what rounding leaves of terms that cancel: sums of a thousand terms lose about sqrt(1000) units
_REASONS = 8  # kept for each operation, or a deep network would carry every parameter's along; the best come first

State = Literal["live", "zero", "noise", "nonfinite", "absent"]


class Flow:
    """The chain rule of one step, operation by operation.

    Args:
        seen: The step.
    """

    def __init__(self, seen: Seen) -> None:
        self.seen, self.graph, self.edges, self.arriving = seen, seen.graph, seen.edges, seen.arriving
        self.links = Links(seen)
        self.leaves = {n.name: n.index for n in seen.graph.nodes if n.op == "parameter"}
        self._readers = self._find_readers()
        self.alive = {
            n for n, e in seen.edges.items() if isinstance(n, str) and any(s > 0.0 for _, s in e)
        } - seen.frozen
        self.state: dict[int, State] = {}
        self.reasons: dict[int, tuple[Reason, ...]] = {}
        self.partly: dict[int, tuple[Reason, ...]] = {}
        self.origins: dict[int, tuple[int, ...]] = {}
        for call in range(len(seen.graph.calls) - 1, -1, -1):
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
        elif error == 0.0 and call in self.seen.replaced:
            self.state[call], self.reasons[call] = "zero", (Reason("hook", call),)
        elif error == 0.0:
            self.state[call], self.reasons[call] = "zero", self.reasons_of(call, edges) or (Reason("data", call),)
        elif self.is_noise(call, edges, error):
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

    def is_noise(self, target: int | str, edges: list[tuple[int, float]], total: float) -> bool:
        """Whether the error that an operation or a parameter gets is what rounding left of terms that cancel."""
        if not edges:
            return False
        if all(size == 0.0 or self._edge_is_noise(consumer, target, size) for consumer, size in edges):
            return True
        return len(edges) > 1 and total <= _NOISE * max(size for _, size in edges)

    def _edge_is_noise(self, consumer: int, target: int | str, size: float) -> bool:
        if self.state[consumer] == "noise" or self._cancels(consumer, size):
            return True
        return self.links.rounding(consumer, target) is not None

    def may_round(self, target: str, end: int) -> bool:
        """Whether something between a parameter and the end of its branch may leave nothing but rounding of an error.

        That is asked where no error arrived that would show it.
        """
        stack: list[int | str] = [target]
        seen = set(stack)
        while stack:
            current = stack.pop()
            readers = {consumer for consumer, _ in self.edges.get(current, ()) if consumer <= end}
            if len(readers) > 1 or any(self._may_round(consumer, current) for consumer in readers):
                return True
            stack += readers - seen
            seen |= readers
        return False

    def _may_round(self, call: int, target: int | str) -> bool:
        subtracts = ops.does(ops.base_name(self.graph.calls[call].func), Does.SHARES | Does.NORMALISES)
        return subtracts or self.links.rounding(call, target) is not None

    def _cancels(self, call: int, size: float) -> bool:
        """A norm or softmax subtracts means from the error: what is left may be rounding only."""
        base, outputs = ops.base_name(self.graph.calls[call].func), self.graph.calls[call].outputs
        if ops.does(base, Does.SHARES):
            gain = 1.0
        elif ops.does(base, Does.NORMALISES) and len(outputs) > 1:
            gain = self.seen.values.get(outputs[min(2, len(outputs) - 1)], 0.0)
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
            elif size != 0.0 and (place := self.links.rounding(consumer, target)) is not None:
                found[Reason("rounding", consumer, made_at=place)] = None
            elif size != 0.0:
                several = not self._cancels(consumer, size) and self.links.reads_several(target, edges)
                found[Reason("balance" if several else "cancel", consumer)] = None
            else:
                local = self.links.reasons(consumer, target)
                found |= dict.fromkeys(local)
                if parts and consumer not in self.seen.full and all(r.kind in BY_BATCH for r in local):
                    found |= dict.fromkeys(self.partly.get(consumer, ()))
        return tuple(sorted(found, key=self._rank)[:_REASONS])

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
