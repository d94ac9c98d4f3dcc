"""Makes the decision per branch: what is closed, how, and what cannot be."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from torch import nn

from lit_resinit.errors import GateError, NoBranchError
from lit_resinit.find.branches import find_additions
from lit_resinit.find.gates import Gate, GateFinder, Tail, inserted_name
from lit_resinit.find.injections import closed_injections
from lit_resinit.find.streams import Addition, Link, Streams
from lit_resinit.find.views import is_weight
from lit_resinit.graph import ops
from lit_resinit.graph.keep import no_collection
from lit_resinit.graph.ops import Does
from lit_resinit.graph.trace import Run, call_model, trace
from lit_resinit.graph.values import Graph
from lit_resinit.graph.where import clean_name, is_below
from lit_resinit.plan.names import branch_names
from lit_resinit.plan.values import Action, Branch, ResidualPlan, Scheme


def make_plan(
    model: nn.Module,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    scheme: Scheme = "auto",
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
) -> ResidualPlan:
    """Find every residual branch of a model and decide what closes it; nothing is written.

    For a block ``y = x + g * u(x)`` the gate ``g`` is the first learned factor read backwards from the addition. With
    ``auto`` it is zeroed where it is a trailing norm or scale; else a scalar is inserted where a module's output is the
    end of the branch; else the last layer is zeroed.

    Args:
        model: Any module.
        args: Inputs of one forward: a tuple, or one tensor.
        kwargs: Keyword inputs.
        scheme: ``auto``, ``zero``, ``insert``, ``last_layer``, ``sqrt_depth``, ``downscale`` or ``observe``.
        include: Globs on branch names; only these are touched.
        exclude: Globs on branch names that are left alone.

    Returns:
        The plan, one :class:`Branch` for each executed residual addition.

    Raises:
        ValueError: For an unknown scheme or a pattern that matches nothing.
        TypeError: For arguments of a wrong type.
        TraceError: If the forward cannot run with these inputs.
        NoBranchError: If the model has no residual branch.
        GateError: If the scheme has nothing to close in some branch.

    Note:
        One training-mode forward is traced, on fake tensors where possible; the model, its buffers and the random
        state stay as they are. Cost: about one plain forward.

    Example:
        >>> import torch
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        ...         self.gain = nn.Parameter(torch.ones(1))
        ...     def forward(self, x):
        ...         return x + self.gain * self.down(self.up(x).relu())
        >>> plan = make_plan(nn.Sequential(Block(), Block()), torch.randn(2, 4))
        >>> [(b.name, b.action, b.gates[0].parameter) for b in plan.branches]
        [('0', 'zero', '0.gain'), ('1', 'zero', '1.gain')]

    Reference:
        Bachlechner et al. (2020), ReZero is All You Need, arXiv:2003.04887; Goyal et al. (2017), arXiv:1706.02677, 5.1.
    """
    check_arguments(model, scheme, include, exclude)
    return plan_forward(model, as_arguments(args), kwargs or {}, call_model, scheme, include, exclude)


def plan_forward(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: Run,
    scheme: Scheme,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
) -> ResidualPlan:
    """:func:`make_plan` for a forward that is something else than ``model(*args, **kwargs)``."""
    check_arguments(model, scheme, include, exclude)
    with no_collection():
        return _Planner(model, trace(model, args, kwargs, run=run), scheme).plan(include, exclude)


def as_arguments(args: Any) -> tuple[Any, ...]:
    """Positional inputs as a tuple; a single input may be given bare."""
    return tuple(args) if isinstance(args, tuple | list) else (args,)


def check_arguments(
    model: object, scheme: object, include: str | Sequence[str] | None, exclude: str | Sequence[str] | None
) -> None:
    """Raise for arguments that no plan can be made of."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected argument `model` to be a torch.nn.Module but got {type(model).__name__}")
    if scheme not in get_args(Scheme):
        raise ValueError(f"Expected argument `scheme` to be one of {', '.join(get_args(Scheme))} but got {scheme!r}")
    check_patterns(include, exclude)
    if next(iter(model.parameters()), None) is None:
        raise NoBranchError(
            f"looked for residual branches in {type(model).__name__}; expected a model with parameters, found none, so "
            "there is nothing to close. Pass the network itself, built, not a container that builds it later."
        )


def check_patterns(include: object, exclude: object) -> None:
    """Raise for patterns that are no globs."""
    for name, patterns in (("include", include), ("exclude", exclude)):
        listed = isinstance(patterns, Sequence) and all(isinstance(p, str) for p in patterns)
        if patterns is not None and not listed:
            raise TypeError(f"Expected argument `{name}` to be a glob or a list of globs but got {patterns!r}")


class _Planner:
    def __init__(self, model: nn.Module, graph: Graph, scheme: Scheme) -> None:
        self.model, self.graph, self.scheme = model, graph, scheme
        self.modules = {clean_name(n): m for n, m in model.named_modules(remove_duplicate=False)}
        found = find_additions(graph)
        self.finder = GateFinder(graph, found, model)
        injections = closed_injections(graph, found, self.finder)
        self.streams = Streams(graph, found)
        self.additions = sorted([*found, *injections], key=lambda a: a.node)
        self.called: dict[str, list[tuple[int, ...]]] = {}
        for output in graph.outputs:
            self.called.setdefault(output.module, []).append(output.nodes)
        self.outputs: dict[int, list[tuple[str, int]]] = {}
        for output in graph.outputs:
            for leaf, node in enumerate(output.nodes):
                self.outputs.setdefault(node, []).append((output.module, leaf))
        self.sums = {a.node for a in self.additions}
        self.leaves = {n.name: n.index for n in graph.nodes if n.op == "parameter"}
        self.tails = {a.node: self.finder.tail(a) for a in self.additions}
        self.names = branch_names(graph, self.additions, {node: t.passed for node, t in self.tails.items()})

    def plan(self, include: str | Sequence[str] | None, exclude: str | Sequence[str] | None) -> ResidualPlan:
        chosen = select(list(self.names.values()), include, exclude)
        if not self.additions and self.scheme != "observe":
            raise NoBranchError(self._nothing_found())
        self.closed = {a.node: self.finder.closed_gates(a) for a in self.additions}
        self.scalable = {
            node
            for a in self.additions
            if self.names[a.node] in chosen
            for tail in (self.tails[a.node], *self.tails[a.node].leaves())
            for node in tail.insertable
        }
        self.closing = frozenset(
            leaf.gated_at
            for a in self.additions
            if self.names[a.node] in chosen
            for leaf in self.tails[a.node].leaves()
            if leaf.gated_at is not None
        )
        for leaf in (leaf for tail in self.tails.values() for leaf in tail.leaves()):
            self._leave_out_shared(leaf)
        decisions = {a.node: self._decide(a, self.names[a.node] in chosen) for a in self.additions}
        self._share_inserted(decisions)
        lengths, norms = self._stream_lengths(), self._norm_parameters()
        branches = [self._branch(a, *decisions[a.node], lengths[a.node], norms) for a in self.additions]
        self._refuse_what_cannot_be_closed(branches)
        zero_layers = self._zero_layers({g.parameter for b in branches for g in b.gates})
        if not branches and not zero_layers:
            raise NoBranchError(self._nothing_found())
        return ResidualPlan(self.scheme, tuple(branches), zero_layers, self._after_last())

    def _leave_out_shared(self, leaf: Tail) -> None:
        """Take back a gate that the network also reads where no branch of the plan is closed by it."""
        for gate in leaf.gates:
            other = self.finder.read_elsewhere(gate, self.closing)
            if other is not None:
                leaf.gates, leaf.stopped_by = [], other
                leaf.reason = f"{gate.parameter} is used elsewhere too"
                return

    def _share_inserted(self, decisions: dict[int, tuple[Action, list[Gate], Tail]]) -> None:
        """A branch that passes a value scaled for another branch is closed by that scalar, not by a second zero."""
        scaled: dict[int, Gate] = {}
        for action, gates, _ in decisions.values():
            for gate in gates if action == "insert" else ():
                scaled |= {n[gate.leaf]: gate for n in self.called.get(gate.module, ()) if gate.leaf < len(n)}
        for node, (action, gates, tail) in decisions.items():
            if action not in ("zero", "last_layer", "insert"):
                continue
            own = {id(leaf): next((scaled[n] for n in leaf.passed if n in scaled), None) for leaf in tail.leaves()}
            closed = [g for leaf in tail.leaves() for g in leaf.gates if own[id(leaf)] is not None]
            shared = [g for g in own.values() if g is not None]
            if any(g in gates for g in closed):
                kept = [g for g in gates if g not in closed]
                decisions[node] = "insert", list(dict.fromkeys([*kept, *shared])), tail

    def _nothing_found(self) -> str:
        return (
            f"looked for residual additions `x + f(x)` in one forward of {type(self.model).__name__} "
            f"({len(self.graph.calls)} operations); expected at least one, found none. Zeroing a layer of a network "
            "without a skip would cut its signal for good, so nothing was changed. If the network does have residual "
            "blocks, the inputs did not reach them: pass other `example_inputs`."
        )

    # ---------------------------------------------------------------- one branch

    def _branch(
        self,
        addition: Addition,
        action: Action,
        gates: list[Gate],
        tail: Tail,
        length: int,
        norms: dict[int | str, list[str]],
    ) -> Branch:
        call = self.graph.calls[self.graph.nodes[addition.node].call]
        link = self.streams.link(addition.node) if addition.node in self.streams else Link(addition.skip, None, ())
        nearby: list[int | str] = [addition.block, *sorted(addition.interior), *link.between]
        stopped = next((t for t in tail.leaves() if not t.gates), None) if not gates else None
        return Branch(
            name=self.names[addition.node],
            block=addition.block,
            skip="projection" if addition.projection else "identity",
            gates=tuple(dict.fromkeys(gates)),
            action=action,
            source=call.source,
            address=addition.address,
            skip_input=self._input_position(addition.skip, call.inputs) or 0,
            branch_input=self._input_position(addition.branch, call.inputs),
            previous=None if link.previous is None else self.names.get(link.previous),
            between=self._labels(link.between),
            factor=self._factor_names(addition),
            norms=tuple(dict.fromkeys(name for place in nearby for name in norms.get(place, ()))),
            length=length,
            graded=call.graded,
            reason=f"{stopped.reason} ({_at(self.graph.source(stopped.stopped_by))})"
            if stopped and stopped.stopped_by
            else "",
            culprit=self.graph.owner(stopped.stopped_by) if stopped and stopped.stopped_by else "",
        )

    def _input_position(self, node: int, inputs: tuple[int, ...]) -> int | None:
        if node in inputs:
            return inputs.index(node)
        sources = self.graph.nodes[node].inputs
        return inputs.index(sources[0]) if len(sources) == 1 and sources[0] in inputs else None

    def _decide(self, addition: Addition, chosen: bool) -> tuple[Action, list[Gate], Tail]:
        closed, tail = self.closed[addition.node], self.tails[addition.node]
        own = [g for leaf in tail.leaves() for g in leaf.gates] if tail.closable else []
        if not chosen:
            return "excluded", closed or own, tail
        if closed:
            return "already_closed", closed, tail
        if self.scheme == "observe":
            return "observe", own or self._named_factors(addition), tail
        if self.scheme == "insert" or self.scheme == "sqrt_depth":
            return self.scheme, self._inserted(tail), tail
        if self.scheme in ("last_layer", "downscale"):
            return self.scheme, own, tail
        trailing = [g for g in own if g.kind != "layer"]
        if self.scheme == "zero":
            return "zero", trailing if len(trailing) == len(own) else [], tail
        return self._decide_auto(tail)

    def _named_factors(self, addition: Addition) -> list[Gate]:
        tail = self.finder.tail(addition, any_slope=True)
        return [g for leaf in tail.leaves() for g in leaf.gates] if tail.closable else []

    def _decide_auto(self, tail: Tail) -> tuple[Action, list[Gate], Tail]:
        if self._in_series(tail):
            whole_gate = self._inserted_into(tail)
            if whole_gate:
                return "insert", whole_gate, tail
        gates: list[Gate] = []
        kinds: set[Action] = set()
        for leaf in tail.leaves():
            if leaf.gates and self.finder.is_zero(leaf.passed[0]):
                gates += leaf.gates  # a summand that arrives closed: a second zero would kill it
                continue
            trailing = [g for g in leaf.gates if g.kind != "layer"]
            inserted = [] if trailing else self._inserted_into(leaf)
            gates += trailing or inserted or leaf.gates
            kinds.add("zero" if trailing else "insert" if inserted else "last_layer")
            if not (trailing or inserted or leaf.gates):
                return "insert", self._inserted(tail), tail
        return next(a for a in ("insert", "last_layer", "zero") if a in kinds), gates, tail

    def _in_series(self, tail: Tail) -> bool:
        """Whether one summand is computed from another: closing both would put two zeros in series."""
        leaves = list(tail.leaves())
        ends = {leaf.passed[-1] for leaf in leaves if leaf.passed}
        if len(leaves) < 2:
            return False
        for leaf in leaves:
            stack, seen = list(self.graph.nodes[leaf.passed[-1]].inputs), set[int]()
            lowest = min(ends)
            while stack:
                node = stack.pop()
                if node in ends:
                    return True
                fresh = [i for i in self.graph.nodes[node].inputs if i >= lowest and i not in seen]
                seen.update(fresh)
                stack += fresh
        return False

    def _inserted(self, tail: Tail) -> list[Gate]:
        closed = {id(leaf) for leaf in tail.leaves() if leaf.gates and self.finder.is_zero(leaf.passed[0])}
        each = [leaf.gates if id(leaf) in closed else self._inserted_into(leaf) for leaf in tail.leaves()]
        if all(each):
            return [g for gates in each for g in gates]
        return self._inserted_into(tail)

    def _inserted_into(self, tail: Tail) -> list[Gate]:
        """A scalar on the output of the module nearest the branch's end, one with parameters if there is any."""
        places = [
            (module, leaf, node)
            for node in tail.insertable
            for module, leaf in reversed(self.outputs.get(node, ()))
            if self._can_carry(module, leaf, node, tail)
        ]
        if not places:
            return []
        with_parameters = [p for p in places if next(iter(self.modules[p[0]].parameters()), None) is not None]
        module, leaf, node = (with_parameters or places)[0]
        bent = tail.bent_at is not None and tail.bent_at < node
        folds = tuple(f for g in tail.gates for f in g.folds_into) if len(tail.gates) == 1 and not bent else ()
        folds = folds if self._only_used_here(folds, len(self.called[module])) else ()
        return [Gate("inserted", f"{module}.{inserted_name(leaf)}", module=module, leaf=leaf, folds_into=folds)]

    def _can_carry(self, module: str, leaf: int, node: int, tail: Tail) -> bool:
        if not module or module not in self.modules:
            return False
        readers = self.finder.readers[node]
        if any(self.graph.is_inside(r, module) for r in readers):
            return False  # read before the module returns
        return all(r in self.sums or r in tail.passed or r in self.scalable for r in readers) and all(
            leaf < len(nodes) and nodes[leaf] in self.scalable for nodes in self.called[module]
        )

    def _only_used_here(self, names: tuple[str, ...], calls: int) -> bool:
        return all(len(self._reads(self.leaves[n])) <= calls for n in names if n in self.leaves)

    def _reads(self, node: int) -> list[int]:
        return [r for r in self.finder.readers[node] if self.graph.nodes[r].op != "statistic"]

    # ---------------------------------------------------------------- streams

    def _stream_lengths(self) -> dict[int, int]:
        first: dict[int, int] = {}
        count: dict[int, int] = {}
        for a in self.additions:
            previous = self._previous(a)
            first[a.node] = a.node if previous is None else first.get(previous, a.node)
            count[first[a.node]] = count.get(first[a.node], 0) + 1
        return {node: count[start] for node, start in first.items()}

    def _previous(self, addition: Addition) -> int | None:
        return self.streams.link(addition.node).previous if addition.node in self.streams else None

    def _labels(self, nodes: Iterable[int]) -> tuple[str, ...]:
        labels = []
        for index in nodes:
            node = self.graph.nodes[index]
            owner = self.graph.owner(index)
            labels.append(owner if owner in self.called and self._is_leaf_module(owner) else node.op)
        return tuple(dict.fromkeys(labels))

    def _is_leaf_module(self, name: str) -> bool:
        return name in self.modules and next(self.modules[name].children(), None) is None and bool(name)

    def _after_last(self) -> dict[str, tuple[str, ...]]:
        followed = {self._previous(a) for a in self.additions}
        result = {}
        for addition in self.additions:
            if addition.node not in followed:
                nodes: list[int] = []
                current = addition.node
                while len(nodes) < 8:
                    readers = self._reads(current)
                    if len(readers) != 1:
                        break
                    current = readers[0]
                    if not is_below(self.graph.owner(current), addition.block) or not addition.block:
                        break
                    if self.graph.nodes[current].op != "view":
                        nodes.append(current)
                result[self.names[addition.node]] = self._labels(nodes)
        return result

    def _factor_names(self, addition: Addition) -> tuple[str, ...]:
        names: list[str] = []
        for index in addition.scales:
            node = self.graph.nodes[index]
            learned = [i for i in node.inputs if self.graph.nodes[i].learned and not self.graph.nodes[i].data]
            names += self._parameters_below(learned) or [f"{node.op} {node.number:g}" if node.number else node.op]
        return tuple(names)

    def _parameters_below(self, nodes: list[int]) -> list[str]:
        stack, found = list(nodes), []
        while stack:
            node = self.graph.nodes[stack.pop()]
            if node.op == "parameter":
                found.append(node.name)
            stack += node.inputs
        return found

    def _norm_parameters(self) -> dict[int | str, list[str]]:
        """Affine parameters of norms, by the product in which they are read, and of the norms in every block."""
        blocks = {a.block for a in self.additions if a.block}
        found: dict[int | str, list[str]] = {b: [] for b in blocks}
        for node in self.graph.nodes:
            if node.op != "mul":
                continue
            left, right = node.inputs
            factors = [f for n, f in ((left, right), (right, left)) if self.finder.is_normalised(n)]
            names = found[node.index] = self._parameters_below([f for f in factors if is_weight(self.graph, f)])
            owner = self.graph.owner(node.index)
            while owner:
                if owner in blocks:
                    found[owner] += names
                owner = owner.rpartition(".")[0]
        return found

    # ---------------------------------------------------------------- what is judged, what is refused

    def _zero_layers(self, gates: set[str]) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for node in self.graph.nodes:
            if ops.does(node.op, Does.APPLIES_WEIGHT):
                for source in node.inputs:
                    leaf = self.graph.nodes[source]
                    if leaf.learned and not leaf.data:
                        for name in self._parameters_below([source]):
                            if name not in gates and self.finder.is_closed(name, 0.0, None):
                                found[name] = None
        return tuple(found)

    def _refuse_what_cannot_be_closed(self, branches: list[Branch]) -> None:
        if self.scheme == "observe":
            return
        stuck = [b for b in branches if b.action not in ("excluded", "already_closed") and not b.gates]
        if stuck:
            raise GateError(_cannot_close(self.scheme, stuck))


def _at(source: str) -> str:
    return f"at {source}" if source else "a leaf"


def _cannot_close(scheme: str, stuck: list[Branch]) -> str:
    first = stuck[0]
    why = (
        f"{first.reason}, in {first.culprit.split('.parametrizations')[0] or 'the top module'}" if first.reason else ""
    )
    because = f": {why}" if why else ""
    names = ", ".join(b.name for b in stuck[:3]) + (f" and {len(stuck) - 3} more" if len(stuck) > 3 else "")
    what = {
        "zero": f"a trailing norm or scale to zero; found none{because}. Use scheme='auto', which may insert a scalar",
        "last_layer": f"a last layer to zero; found none: {why}. Use scheme='insert' or scheme='auto'",
        "downscale": f"a last layer to scale; found none: {why}. Use scheme='sqrt_depth'",
    }.get(
        scheme,
        f"a module whose output is the end of the branch; found none: {why or 'the end is computed inline'}. "
        f"Edit the block at {first.source}: `self.gate = lit_resinit.ScalarGate()` in `__init__`, and "
        "`x + self.gate(branch)` in `forward`; or leave the branch out with `exclude`",
    )
    return f"scheme {scheme!r} on {names}: expected {what}. The addition is at {first.source}. Nothing was changed."


# -------------------------------------------------------------------- include and exclude


def select(names: list[str], include: str | Sequence[str] | None, exclude: str | Sequence[str] | None) -> set[str]:
    """The names that the patterns leave.

    Raises:
        ValueError: If a pattern matches nothing; the message lists the nearest names.
    """
    kept = set(names) if include is None else set(_matches("include", names, include))
    return kept - set(_matches("exclude", names, exclude or ()))


def _matches(argument: str, names: list[str], patterns: str | Sequence[str]) -> list[str]:
    found: list[str] = []
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        hits = [n for n in names if fnmatch.fnmatchcase(n, pattern)]
        if not hits:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise ValueError(
                f"Expected argument `{argument}` to match branch names but got {pattern!r}, which matches none of the "
                f"{len(names)} branches; the nearest are {', '.join(near) or 'none'}"
            )
        found += hits
    return found
