"""What closes a branch: the first learned factor, read backwards from the addition."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from lit_resinit.find.streams import Addition
from lit_resinit.graph import ops
from lit_resinit.graph.ops import Does
from lit_resinit.graph.values import Graph, Node
from lit_resinit.graph.where import clean_name

GateKind = Literal["norm", "scale", "layer", "inserted"]

_TAIL_LIMIT = 10_000


@dataclasses.dataclass(frozen=True, slots=True)
class Gate:
    """The one parameter whose closing value makes a branch output exactly zero.

    Args:
        kind: ``norm`` (affine weight of a trailing norm), ``scale`` (LayerScale, ReZero and the like), ``layer`` (last
            linear or convolution weight) or ``inserted`` (a scalar of ours).
        parameter: Dotted name in ``model.named_parameters()``; for ``inserted`` the name after :func:`apply_`.
        value: Closing value: 0, or -1 where the code multiplies by ``1 + w``.
        index: Which element along the first axis, when one parameter holds the gates of several blocks.
        biases: Dotted names of what is added after the gate and is closed with it.
        module: For ``inserted``: the module whose output is multiplied.
        leaf: For ``inserted``: which tensor of that output.
        folds_into: Parameters in which the branch is linear, so that a factor after them can be folded exactly.
    """

    kind: GateKind
    parameter: str
    value: float = 0.0
    index: int | None = None
    biases: tuple[str, ...] = ()
    module: str = ""
    leaf: int = 0
    folds_into: tuple[str, ...] = ()


@dataclasses.dataclass(slots=True, eq=False)
class Tail:
    """The end of a branch (or of one summand): what it passes, and the gate or the reason why there is none.

    ``insertable`` are the values that a scalar could multiply; ``gated_at`` is the product in which the gate meets the
    branch; ``bent_at`` is the function nearest the end that is not linear, before which a scalar could not be folded.
    """

    passed: list[int] = dataclasses.field(default_factory=list)
    insertable: list[int] = dataclasses.field(default_factory=list)
    bent_at: int | None = None
    gates: list[Gate] = dataclasses.field(default_factory=list)
    gated_at: int | None = None
    forks: list[Tail] = dataclasses.field(default_factory=list)
    stopped_by: int | None = None
    reason: str = ""

    def leaves(self) -> Iterator[Tail]:
        """Every summand: the tail itself, or those of its forks."""
        if self.forks:
            for fork in self.forks:
                yield from fork.leaves()
        else:
            yield self

    @property
    def closable(self) -> bool:
        """Whether every summand has a gate."""
        return all(tail.gates for tail in self.leaves())


@dataclasses.dataclass(frozen=True, slots=True)
class _Closing:
    parameter: str
    value: float
    index: int | None
    linear: bool = True


class GateFinder:
    """Finds gates in one graph.

    Args:
        graph: The traced forward.
        additions: Its residual additions; a branch that ends in one of them has no factor of its own.
        model: The model itself, for the values that parameters have now.
    """

    def __init__(self, graph: Graph, additions: list[Addition], model: nn.Module) -> None:
        self.graph, self.nodes = graph, graph.nodes
        self._sums = {a.node for a in additions}
        self.readers = graph.consumers()
        self.parameters = {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
        self._leaves = {n.name: n.index for n in graph.nodes if n.op == "parameter"}
        self._zero_leaf: dict[str, bool] = {}
        self._zero: list[bool] | None = None
        self._any_slope = False
        self._factors: list[tuple[int, _Closing] | None] = []
        self._probes: dict[tuple[object, ...], tuple[float, float] | None] = {}

    # ---------------------------------------------------------------- the gate that could close a branch

    def tail(self, addition: Addition, *, any_slope: bool = False) -> Tail:
        """The tail of a branch, with the learned factor nearest its end.

        With ``any_slope`` a function that is zero at zero is passed whatever its slope: good enough to name what should
        be zero in a branch that is judged as it is, not to close one.
        """
        self._any_slope = any_slope
        tail = self._walk(addition.branch, addition)
        for leaf in tail.leaves():
            self._leave_out_double_zeros(leaf, tail.passed if leaf is not tail else [], addition.branch)
        return tail

    def _walk(self, node: int, addition: Addition) -> Tail:
        tail = Tail()
        biases: list[str] = []
        for _ in range(_TAIL_LIMIT):
            current = self.nodes[node]
            tail.passed.append(node)
            if not biases:
                tail.insertable.append(node)
            if node in self._sums or node == addition.stream or not current.inputs:
                return self._stop(tail, node, "the stream itself is part of this sum" if current.inputs else "no layer")
            step = self._step(current, addition, tail, biases)
            if step is None:
                return tail
            node = step
        return self._stop(tail, node, "the branch is too long")

    def _leave_out_double_zeros(self, tail: Tail, after: Sequence[int], end: int) -> None:
        """Take back a gate, and places for a scalar, that would make both factors of a product zero."""
        place = {node: position for position, node in enumerate(tail.passed, start=1)}
        ends = [len(tail.passed)] if tail.gates else []
        blind = {
            n: self._double_zero([*after, *tail.passed[:n]], end) for n in {*ends, *map(place.get, tail.insertable)}
        }
        tail.insertable = [i for i in tail.insertable if blind[place[i]] is None]
        product = blind[ends[0]] if ends else None
        if product is not None:
            tail.gates = []
            self._stop(tail, product, f"`{self.nodes[product].op}` multiplies two values that are zero together")

    def _double_zero(self, zeros: Iterable[int], end: int) -> int | None:
        """The first product up to ``end`` both factors of which are zero when these values are: neither has a slope."""
        zero = defaultdict(bool, dict.fromkeys(zeros, True))
        queue = sorted({r for node in zero for r in self.readers[node] if r <= end})
        seen = set(queue)
        while queue:
            node = self.nodes[heapq.heappop(queue)]
            if not zero[node.index] and not self._stays_zero(node, zero):
                continue
            zero[node.index] = True
            factors = node.inputs[:2] if ops.does(node.op, Does.MULTIPLIES | Does.ATTENDS) else ()
            if factors and all(zero[i] and self.nodes[i].data for i in factors):
                return node.index
            fresh = [r for r in self.readers[node.index] if r <= end and r not in seen]
            seen.update(fresh)
            for reader in fresh:
                heapq.heappush(queue, reader)
        return None

    def _stop(self, tail: Tail, node: int, reason: str) -> Tail:
        tail.stopped_by, tail.reason = node, reason
        return tail

    def _step(self, node: Node, addition: Addition, tail: Tail, biases: list[str]) -> int | None:
        if (ops.does(node.op, Does.MOVES) and node.number != 0) or (node.op == "shift" and node.number == 0):
            return node.inputs[0]
        if node.op == "add":
            return self._through_sum(node, addition, tail, biases)
        if ops.does(node.op, Does.MERGES):
            values = ops.values_of(node.op, node.inputs)
            return self._fork([i for i in values if self.nodes[i].data], addition, tail, biases)
        if ops.does(node.op, Does.ATTENDS):
            return node.inputs[2]
        if ops.does(node.op, Does.MULTIPLIES | Does.APPLIES_WEIGHT):
            return self._through_product(node, addition, tail, biases)
        if node.op == "norm":
            self._stop(tail, node.index, "a norm without weights")
            return None
        return self._through_function(node, tail)

    def _through_sum(self, node: Node, addition: Addition, tail: Tail, biases: list[str]) -> int | None:
        moving = [i for i in node.inputs if self._moving(i, addition)]
        if len(moving) == 2:
            return self._fork(moving, addition, tail, biases)
        fixed = next((i for i in node.inputs if i not in moving), None)
        if not moving or fixed is None:
            self._stop(tail, node.index, "a sum of constants")
            return None
        closing = self._closing(fixed) if self.nodes[fixed].learned else None
        if closing is None or closing.value != 0.0:
            self._stop(tail, node.index, "a constant is added")
            return None
        biases.append(closing.parameter)
        return moving[0]

    def _fork(self, sources: list[int], addition: Addition, tail: Tail, biases: list[str]) -> int | None:
        sources = list(dict.fromkeys(sources))
        if len(sources) == 1:
            return sources[0]
        if not sources:
            self._stop(tail, tail.passed[-1], "a sum of constants")
            return None
        tail.forks = [self._walk(source, addition) for source in sources]
        for leaf in tail.leaves():
            leaf.gates = [dataclasses.replace(g, biases=(*biases, *g.biases)) for g in leaf.gates]
            leaf.insertable = [] if biases else leaf.insertable
            leaf.bent_at = tail.bent_at if leaf.bent_at is None else leaf.bent_at
        return None

    def _through_product(self, node: Node, addition: Addition, tail: Tail, biases: list[str]) -> int | None:
        moving = [i for i in node.inputs if self._moving(i, addition)]
        fixed = [i for i in node.inputs if i not in moving]
        if len(moving) == 1 and fixed:
            if not self.nodes[fixed[0]].learned:
                return moving[0]
            closing = self._closing(fixed[0])
            if closing is not None:
                tail.gates, tail.gated_at = [self._gate(node, moving[0], closing, biases)], node.index
                return None
            if ops.does(node.op, Does.APPLIES_WEIGHT):
                self._stop(tail, node.index, "its weight is computed in a way that cannot be zero")
                return None
            return moving[0]
        if len(moving) == 2:
            return self._through_data_product(node, moving, addition, tail, biases)
        self._stop(tail, node.index, "no layer")
        return None

    def _through_data_product(
        self, node: Node, moving: list[int], addition: Addition, tail: Tail, biases: list[str]
    ) -> int | None:
        """A product of two moving tensors is closed by closing either; one that follows the branch comes first."""
        order = sorted(dict.fromkeys(moving), key=lambda i: i not in addition.interior)
        tails = [self._walk(source, addition) for source in order]
        best = [t for t in tails if t.closable] or tails
        best.sort(key=lambda t: any(g.kind == "layer" for leaf in t.leaves() for g in leaf.gates))
        chosen = best[0]
        tail.passed += chosen.passed
        tail.insertable += [] if biases else chosen.insertable
        tail.bent_at = chosen.bent_at if tail.bent_at is None else tail.bent_at
        tail.gates, tail.gated_at, tail.forks = chosen.gates, chosen.gated_at, chosen.forks
        tail.stopped_by, tail.reason = chosen.stopped_by, chosen.reason
        for leaf in tail.leaves():
            leaf.gates = [dataclasses.replace(g, biases=(*biases, *g.biases)) for g in leaf.gates]
        return None

    def read_elsewhere(self, gate: Gate, known: frozenset[int]) -> int | None:
        """A place outside ``known`` where the gate's parameter meets a value of the network, if there is one."""
        stack = [self._leaves[gate.parameter]]
        seen = set(stack)
        while stack:
            for reader in self.readers[stack.pop()]:
                node = self.nodes[reader]
                if reader in seen or reader in known or node.op == "statistic" or self._is_other_element(node, gate):
                    continue
                seen.add(reader)
                if not node.data:
                    stack.append(reader)
                elif math.prod(node.shape) > 1:  # a single number is a penalty in the loss
                    return reader
        return None

    def _is_other_element(self, node: Node, gate: Gate) -> bool:
        return gate.index is not None and node.op == "part" and self._element(node) not in (gate.index, None)

    def _through_function(self, node: Node, tail: Tail) -> int | None:
        moving = [i for i in node.inputs if self.nodes[i].data or self.nodes[i].learned]
        probe = self._probe(node) if moving else None
        if probe is None:
            self._stop(tail, node.index, f"`{node.op}` is no factor")
        elif probe[0] != 0.0:
            self._stop(tail, node.index, f"`{node.op}` is not zero at zero")
        elif not self._any_slope and (probe[1] == 0.0 or not math.isfinite(probe[1])):
            self._stop(tail, node.index, f"`{node.op}` has slope {probe[1]:g} at zero")
        else:
            tail.bent_at = node.index if tail.bent_at is None else tail.bent_at
            return moving[0]
        return None

    def _moving(self, index: int, addition: Addition) -> bool:
        return self.nodes[index].data or index in addition.interior

    def _gate(self, node: Node, moving: int, closing: _Closing, biases: list[str]) -> Gate:
        kind: GateKind = "layer" if node.op != "mul" else "norm" if self.is_normalised(moving) else "scale"
        if closing.parameter.rpartition(".")[2].startswith(INSERTED_NAME):
            kind = "inserted"
        folds = (closing.parameter, *biases) if closing.linear and closing.index is None else ()
        return Gate(kind, closing.parameter, closing.value, closing.index, tuple(biases), folds_into=folds)

    # ---------------------------------------------------------------- closing values

    def _closing(self, start: int, target: float = 0.0) -> _Closing | None:
        """The parameter, and its value, that makes a data-free expression equal to ``target`` everywhere."""
        index, linear = None, True
        for _ in range(64):
            node = self.nodes[start]
            if node.op == "parameter":
                return _Closing(node.name, target, index, linear)
            if node.op == "part":
                position = self._element(node)
                if position is None or index is not None:
                    return None
                index, start = position, node.inputs[0]
            elif node.op in ("view", "clone", "_to_copy", "expand", "repeat", "_unsafe_view", "alias", "detach"):
                start = node.inputs[0]
            elif node.op == "shift" and node.number is not None:
                start, target = node.inputs[0], target - node.number
            elif node.op == "scale" and node.number:
                start, target = node.inputs[0], target / node.number
            elif ops.does(node.op, Does.MULTIPLIES) and target == 0.0:
                return self._closing_of_product(node)
            elif node.op.startswith("_weight_norm") and target == 0.0:
                start = node.inputs[1]
            else:
                probe = self._probe(node) if len(node.inputs) == 1 else None
                if probe is None or probe[0] != target or probe[1] == 0.0 or not math.isfinite(probe[1]):
                    return None
                start, target, linear = node.inputs[0], 0.0, False
        return None

    def _closing_of_product(self, node: Node) -> _Closing | None:
        for chosen, other in (node.inputs, tuple(reversed(node.inputs))):
            if not self.nodes[chosen].learned:
                continue
            closing = self._closing(chosen)
            if closing is not None and not self._depends(other, closing.parameter):
                return closing
        return None

    def _depends(self, node: int, parameter: str) -> bool:
        stack, seen = [node], {node}
        while stack:
            current = self.nodes[stack.pop()]
            if current.name == parameter and current.op == "parameter":
                return True
            fresh = [i for i in current.inputs if i not in seen]
            seen.update(fresh)
            stack += fresh
        return False

    def _element(self, node: Node) -> int | None:
        """Which element along the first axis a partial view shows; None for anything else."""
        call = self.graph.calls[node.call]
        base, length = ops.base_name(call.func), self.nodes[node.inputs[0]].shape[0]
        if base == "select" and call.args[1] == 0:
            return int(call.args[2]) % length
        if base == "unbind" and (len(call.args) < 2 or call.args[1] == 0):
            return call.outputs.index(node.index)
        if base == "slice" and call.args[1] == 0 and node.shape[0] == 1:
            return int(call.args[2]) % length
        return None

    def is_normalised(self, index: int) -> bool:
        """Whether a value is a norm's output, also one written out in Python: a value times a statistic of itself."""
        node = self.nodes[index]
        while node.op in ("view", "clone", "_to_copy"):
            node = self.nodes[node.inputs[0]]
        if node.op == "norm":
            return True
        if node.op != "mul":
            return False
        return any(self._is_statistic(factor, base) for factor, base in (node.inputs, tuple(reversed(node.inputs))))

    def _is_statistic(self, factor: int, base: int) -> bool:
        for _ in range(16):
            node = self.nodes[factor]
            if not node.inputs:
                return False
            if ops.does(node.op, Does.REDUCES):
                return self._depends_on(node.inputs[0], base)
            factor = node.inputs[0]
        return False

    def _depends_on(self, node: int, base: int) -> bool:
        for _ in range(16):
            current = self.nodes[node]
            if node == base or current.inputs[:1] == self.nodes[base].inputs[:1] != ():
                return True
            if not current.inputs:
                return False
            node = current.inputs[0]
        return False

    def _probe(self, node: Node) -> tuple[float, float] | None:
        call = self.graph.calls[node.call]
        if len(call.inputs) != 1 or len(call.outputs) != 1:
            return None
        key = (call.func, repr(call.args), repr(call.kwargs))
        if key not in self._probes:
            self._probes[key] = ops.at_zero(call.func, call.args, call.kwargs)
        return self._probes[key]

    # ---------------------------------------------------------------- branches that arrive closed

    def is_zero(self, node: int) -> bool:
        """Whether a value is zero for every input, because a learned factor is at its closing value now."""
        if self._zero is None:
            self._zero = self._all_zero()
        return self._zero[node]

    def _all_zero(self) -> list[bool]:
        zero: list[bool] = []
        self._factors = []
        for node in self.nodes:
            factor = self._closed_factor(node, zero)
            self._factors.append(factor)
            zero.append(factor is not None or self._stays_zero(node, zero))
        return zero

    def _closed_factor(self, node: Node, zero: list[bool]) -> tuple[int, _Closing] | None:
        """(other operand, parameter) of a product whose learned factor is at its closing value."""
        if not ops.does(node.op, Does.MULTIPLIES | Does.APPLIES_WEIGHT):
            return None
        for factor, other in (node.inputs[:2], tuple(reversed(node.inputs[:2]))):
            known = self.nodes[factor]
            if not known.learned or known.data:
                continue
            closing = self._closing(factor)
            if closing is not None and self.is_closed(closing.parameter, closing.value, closing.index):
                return other, closing
            if closing is None and node.op == "mul" and zero[factor]:
                return other, _Closing(self._zero_parameter(factor), 0.0, None, False)
        return None

    def _zero_parameter(self, expression: int) -> str:
        """A zero parameter behind an expression that is zero, however it is written (``a ** 2``, ``relu(a)``)."""
        stack = [expression]
        while True:
            node = self.nodes[stack.pop()]
            if node.op == "parameter" and self.is_closed(node.name, 0.0, None):
                return node.name
            stack += [i for i in node.inputs if self.nodes[i].learned]

    def _stays_zero(self, node: Node, zero: Sequence[bool] | Mapping[int, bool]) -> bool:
        if node.op == "parameter":
            return self.is_closed(node.name, 0.0, None)
        if ops.does(node.op, Does.SHARES):
            return False
        if ops.does(node.op, Does.ATTENDS):
            return zero[node.inputs[2]]
        moving = [i for i in node.inputs if self.nodes[i].data or self.nodes[i].learned]
        if not moving:
            return False
        if ops.does(node.op, Does.MULTIPLIES):
            return any(zero[i] for i in node.inputs)
        if not all(zero[i] for i in moving):
            return False
        if node.op == "shift":
            return node.number == 0
        if node.call >= 0 and self.graph.calls[node.call].inputs == node.inputs:
            probe = self._probe(node)
            return probe is None or probe[0] == 0.0
        return True

    def is_closed(self, name: str, value: float, index: int | None) -> bool:
        """Whether a parameter (or its element) has a value everywhere."""
        parameter = self.parameters[name]
        if index is None and value == 0.0:
            if name not in self._zero_leaf:
                self._zero_leaf[name] = holds(parameter, 0.0)
            return self._zero_leaf[name]
        return holds(parameter if index is None else parameter[index], value)

    def closed_gates(self, addition: Addition) -> list[Gate]:
        """The zero factors nearest the end of a branch that arrives closed, whatever lies between."""
        if not self.is_zero(addition.branch):
            return []
        gates: dict[tuple[str, int | None], Gate] = {}
        stack: list[tuple[int, tuple[str, ...]]] = [(addition.branch, ())]
        seen = {addition.branch}
        while stack:
            index, biases = stack.pop()
            node, factor = self.nodes[index], self._factors[index]
            if factor is not None:
                gate = self._gate(node, factor[0], factor[1], list(biases))
                gates.setdefault((gate.parameter, gate.index), gate)
                continue
            if node.op == "add":
                own = (self._closing(i) for i in node.inputs if not self.nodes[i].data and self.nodes[i].learned)
                biases = (*biases, *(c.parameter for c in own if c is not None))
            for source in node.inputs:
                if source not in seen and self.is_zero(source) and self.nodes[source].data:
                    seen.add(source)
                    stack.append((source, biases))
        return list(gates.values())


INSERTED_NAME = "residual_gate"


def inserted_name(leaf: int) -> str:
    """Name of an inserted scalar on its module: one for each tensor that the module returns."""
    return INSERTED_NAME if leaf == 0 else f"{INSERTED_NAME}_{leaf}"


def holds(tensor: Tensor, value: float) -> bool:
    """Whether every element of a tensor equals ``value``; False for a tensor without values (meta)."""
    with torch.no_grad():
        return tensor.numel() > 0 and not tensor.is_meta and bool((tensor.detach() == value).all())
