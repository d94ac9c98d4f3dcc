"""The decision per branch: a table of schemes, each of which chooses gates among what the survey has found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from lit_resinit.find.closing import depends_on
from lit_resinit.find.gates import Gate, inserted_name, shows_element
from lit_resinit.find.norms import is_divided_by_its_size
from lit_resinit.find.streams import Addition
from lit_resinit.find.tails import Tail, change_summands
from lit_resinit.plan.survey import Survey
from lit_resinit.plan.values import Action, Scheme

_Key = tuple[str, int | None]  # a gate's parameter, and which element of it


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What is done with one branch, through which gates, and the end of the branch that they were chosen from."""

    action: Action
    gates: tuple[Gate, ...]
    tail: Tail


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What may be closed, once the branches to be touched are known.

    Args:
        survey: What is known.
        chosen: The additions of these branches.
        tails: The ends of all branches, without gates that would close something else too.
        scalable: The values that a scalar could multiply, with the chosen additions that it would close.
    """

    survey: Survey
    chosen: Collection[int]
    tails: Mapping[int, Tail]
    scalable: Mapping[int, Collection[int]]

    def is_closed(self, summand: Tail) -> bool:
        """Whether a summand arrives closed: a second zero would kill it."""
        return bool(summand.gates) and self.survey.zeros.at(summand.passed[0])


def decide(survey: Survey, scheme: Scheme, chosen: Collection[int]) -> dict[int, Decision]:
    """Decide for every branch, by the node of its addition."""
    choice = _choose(survey, chosen)
    decisions = {a.node: _decide(choice, scheme, a) for a in survey.additions}
    scaled = _scaled(survey, decisions.values())
    decisions = {node: _with_shared_scalars(decision, scaled) for node, decision in decisions.items()}
    return _without_zeros_in_series(survey, decisions)


def _choose(survey: Survey, chosen: Collection[int]) -> Choice:
    """Take back every gate through which something else than its branches would be closed."""
    passing, gated = _passing(survey, chosen), _gated(survey, chosen)
    sums = {node: survey.branch_of[node] for node in chosen}  # a way into another branch ends there, closed as that is
    escaping = {key: _escape(survey, key, ends, sums) for key, ends in gated.items()}

    def without_escaping(summand: Tail) -> Tail:
        for gate in summand.gates:
            reader = escaping.get((gate.parameter, gate.index))
            if reader is not None:
                reason = _read_elsewhere(survey, gate.parameter, reader)
                return dataclasses.replace(summand, gates=(), stopped_by=reader, reason=reason)
        return summand

    left = {node: change_summands(tail, without_escaping) for node, tail in survey.tails.items()}
    return Choice(survey, chosen, left, passing)


def _passing(survey: Survey, chosen: Collection[int]) -> dict[int, set[int]]:
    """The values that a scalar could multiply, with the additions of the branches that it would close."""
    found: dict[int, set[int]] = {}
    for addition in chosen:
        tail = survey.tails[addition]
        for part in (tail, *tail.summands()):
            for node in part.insertable:
                found.setdefault(node, set()).add(addition)
    return found


def _gated(survey: Survey, chosen: Collection[int]) -> dict[_Key, dict[int, frozenset[int]]]:
    """The gates that the ends of branches have, with the additions of these branches and what their ends pass."""
    found: dict[_Key, dict[int, frozenset[int]]] = {}
    for addition in chosen:
        tail = survey.tails[addition]
        for summand in tail.summands():
            for gate in summand.gates:
                ends = found.setdefault((gate.parameter, gate.index), {})
                ends[addition] = ends.get(addition, frozenset()) | _way(tail, summand)
    return found


def _way(tail: Tail, summand: Tail) -> frozenset[int]:
    gated = () if summand.gated_at is None else (summand.gated_at,)
    return frozenset((*tail.passed, *summand.passed, *gated))


def _escape(survey: Survey, key: _Key, ends: Mapping[int, frozenset[int]], sums: Mapping[int, int]) -> int | None:
    """Who reads what a gate closes, outside the branches that are meant."""
    parameter, index = key
    start = survey.parameters[parameter]
    values = [start] if index is None else [r for r in survey.readers[start] if shows_element(survey.graph, r, index)]
    return survey.dominance.escapes(values, sums, frozenset().union(*ends.values()))


def _read_elsewhere(survey: Survey, parameter: str, reader: int) -> str:
    """In words who reads the parameter itself, or else what it makes."""
    nodes = survey.graph.nodes
    fixed = [i for i in nodes[reader].inputs if nodes[i].learned and not nodes[i].data]
    if any(depends_on(survey.graph, i, parameter) for i in fixed) or not nodes[reader].data:
        return f"{parameter} is used elsewhere too"
    return f"what {parameter} closes is read elsewhere too, or returned"


def _decide(choice: Choice, scheme: Scheme, addition: Addition) -> Decision:
    closed, tail = choice.survey.closed[addition.node], choice.tails[addition.node]
    if addition.node not in choice.chosen:
        return Decision("excluded", closed or _any_factor(choice, addition, tail), tail)
    if closed:
        return Decision("already_closed", closed, tail)
    if scheme != "observe" and choice.survey.zeros.at(addition.branch):  # whatever the reason: no second zero
        return Decision("already_closed", (), tail)
    return SCHEMES[scheme](choice, addition, tail)


# -------------------------------------------------------------------- schemes


def _auto(choice: Choice, addition: Addition, tail: Tail) -> Decision:
    """Zero a trailing norm or scale of each summand, else insert a scalar that folds away, else zero the last layer.

    A scalar that does not fold away is the last resort: the state dict keeps a key of its own for it.
    """
    whole = inserted_into(choice, tail) if _is_in_series(choice.survey, tail) else ()
    if whole:
        return Decision("insert", whole, tail)
    gates: list[Gate] = []
    actions: set[Action] = set()
    for summand in tail.summands():
        if choice.is_closed(summand):
            gates += summand.gates
            continue
        action, own = _for_summand(choice, summand)
        if not own:
            return Decision("insert", _inserted(choice, tail), tail)
        gates += own
        actions.add(action)
    return Decision(next((a for a in _FIRST if a in actions), "already_closed"), tuple(gates), tail)


_CLOSING: tuple[Action, ...] = ("zero", "last_layer", "insert")
_FIRST: tuple[Action, ...] = ("insert", "last_layer", "zero")  # by which a branch with several is named


def _for_summand(choice: Choice, summand: Tail) -> tuple[Action, tuple[Gate, ...]]:
    trailing = _trailing(summand.gates)
    if trailing:
        return "zero", trailing
    inserted = inserted_into(choice, summand)
    folds = all(g.folds_into for g in inserted)
    steep = any(is_divided_by_its_size(choice.survey.graph, node) for node in summand.nonlinear)
    by_scalar = inserted and (folds or steep or not summand.gates)  # a zero layer before a norm has a huge gradient
    return ("insert", inserted) if by_scalar else ("last_layer", summand.gates)


def _zero(choice: Choice, addition: Addition, tail: Tail) -> Decision:
    own = tail.every_gate
    return Decision("zero", own if len(_trailing(own)) == len(own) else (), tail)


def _insert(choice: Choice, addition: Addition, tail: Tail) -> Decision:
    return Decision("insert", _inserted(choice, tail), tail)


def _sqrt_depth(choice: Choice, addition: Addition, tail: Tail) -> Decision:
    return Decision("sqrt_depth", _inserted(choice, tail), tail)


def _last_layer(choice: Choice, addition: Addition, tail: Tail) -> Decision:
    return Decision("last_layer", tail.every_gate, tail)


def _downscale(choice: Choice, addition: Addition, tail: Tail) -> Decision:
    return Decision("downscale", tail.every_gate, tail)


def _observe(choice: Choice, addition: Addition, tail: Tail) -> Decision:
    """Nothing is closed."""
    return Decision("observe", _any_factor(choice, addition, tail), tail)


def _any_factor(choice: Choice, addition: Addition, tail: Tail) -> tuple[Gate, ...]:
    """Where nothing is closed, any factor will do to name what is watched."""
    return tail.every_gate or choice.survey.walks.of(addition, any_slope=True).every_gate


SCHEMES: dict[Scheme, Callable[[Choice, Addition, Tail], Decision]] = {
    "auto": _auto,
    "zero": _zero,
    "insert": _insert,
    "last_layer": _last_layer,
    "sqrt_depth": _sqrt_depth,
    "downscale": _downscale,
    "observe": _observe,
}


def _trailing(gates: tuple[Gate, ...]) -> tuple[Gate, ...]:
    return tuple(g for g in gates if g.kind != "layer")


def _is_in_series(survey: Survey, tail: Tail) -> bool:
    """Whether one summand is computed from another: closing both would put two zeros in series."""
    ends = {summand.passed[-1] for summand in tail.summands() if summand.passed}
    if not tail.forks:
        return False
    nodes, lowest = survey.graph.nodes, min(ends)
    for summand in tail.summands():
        waiting, seen = list(nodes[summand.passed[-1]].inputs), set[int]()
        while waiting:
            node = waiting.pop()
            if node in ends:
                return True
            new = [i for i in nodes[node].inputs if i >= lowest and i not in seen]
            seen.update(new)
            waiting += new
    return False


# -------------------------------------------------------------------- scalars to be inserted


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """A value that a module returns, as which of its tensors."""

    module: str
    position: int
    node: int


def _inserted(choice: Choice, tail: Tail) -> tuple[Gate, ...]:
    """A scalar for each summand, where each has a place for one, else one for the whole."""
    each = [s.gates if choice.is_closed(s) else inserted_into(choice, s) for s in tail.summands()]
    return tuple(g for gates in each for g in gates) if all(each) else inserted_into(choice, tail)


def inserted_into(choice: Choice, tail: Tail) -> tuple[Gate, ...]:
    """A scalar on the output of the module nearest the branch's end, which folds into weights if there is any."""
    places = list(_places(choice, tail))
    if not places:
        return ()
    usual = next(_with_parameters(choice, places), places[0])
    alike = [p for p in places if _closes(choice, p) <= _closes(choice, usual)]  # none that closes more
    folding = {p: folds for p in (usual, *alike) if (folds := _folds_into(choice.survey, tail, p))}
    place = usual if usual in folding or not folding else next(_with_parameters(choice, folding), next(iter(folding)))
    name = f"{place.module}.{inserted_name(place.position)}"
    folds = folding.get(place, ())
    return (Gate("inserted", name, module=place.module, leaf=place.position, folds_into=folds),)


def _places(choice: Choice, tail: Tail) -> Iterator[_Place]:
    for node in tail.insertable:
        for module, position in reversed(choice.survey.returned.get(node, ())):
            place = _Place(module, position, node)
            if _can_carry(choice, place, tail):
                yield place


def _can_carry(choice: Choice, place: _Place, tail: Tail) -> bool:
    """Whether a scalar on a module's output multiplies ends of branches, and nothing else."""
    survey, module = choice.survey, place.module
    if not module or module not in survey.modules:
        return False
    readers = [r for r in survey.readers[place.node] if survey.dominance.is_read(r)]
    if any(survey.graph.is_inside(r, module) for r in readers):
        return False  # read before the module returns
    if not all(r in survey.names or r in tail.passed or r in choice.scalable for r in readers):
        return False  # read beside the branch's end, or by another summand: two zeros in series
    calls = survey.called[module]
    if not all(place.position < len(nodes) and nodes[place.position] in choice.scalable for nodes in calls):
        return False
    values = [nodes[place.position] for nodes in calls]
    sums = {node: survey.branch_of[node] for value in values for node in choice.scalable[value]}
    return survey.dominance.escapes(values, sums) is None


def _with_parameters(choice: Choice, places: Iterable[_Place]) -> Iterator[_Place]:
    modules = choice.survey.modules
    return (p for p in places if next(iter(modules[p.module].parameters()), None) is not None)


def _closes(choice: Choice, place: _Place) -> set[int]:
    """The additions whose branches a scalar on a module's output closes."""
    values = (nodes[place.position] for nodes in choice.survey.called[place.module])
    return {addition for value in values for addition in choice.scalable[value]}


def _folds_into(survey: Survey, tail: Tail, place: _Place) -> tuple[str, ...]:
    """The parameters before the place in which its value is linear, where the module is all that reads them."""
    nonlinear = any(node <= place.node for node in tail.nonlinear)
    if nonlinear or len(tail.gates) != 1 or tail.gates[0].value != 0.0:  # `1 + w` is no multiple of `w`
        return ()
    folds, calls = tail.gates[0].folds_into, len(survey.called[place.module])
    nodes = (survey.parameters[name] for name in folds if name in survey.parameters)
    return folds if all(len(survey.reads(node)) <= calls for node in nodes) else ()


def _scaled(survey: Survey, decisions: Collection[Decision]) -> dict[int, Gate]:
    """The values that inserted scalars multiply."""
    inserted = [g for d in decisions if d.action == "insert" for g in d.gates]
    return {
        nodes[gate.leaf]: gate
        for gate in inserted
        for nodes in survey.called.get(gate.module, ())
        if gate.kind == "inserted" and gate.module and gate.leaf < len(nodes)
    }


def _with_shared_scalars(decision: Decision, scaled: Mapping[int, Gate]) -> Decision:
    """A branch that passes a value scaled for another branch is closed by that scalar, not by a second zero."""
    if decision.action not in _CLOSING:
        return decision
    summands = [(s, next((scaled[n] for n in s.passed if n in scaled), None)) for s in decision.tail.summands()]
    closed = [g for summand, scalar in summands if scalar is not None for g in summand.gates]
    if not any(g in decision.gates for g in closed):
        return decision
    kept = [g for g in decision.gates if g not in closed]
    shared = [scalar for _, scalar in summands if scalar is not None]
    return Decision("insert", tuple(dict.fromkeys([*kept, *shared])), decision.tail)


# -------------------------------------------------------------------- zeros in series across branches


def _without_zeros_in_series(survey: Survey, decisions: Mapping[int, Decision]) -> dict[int, Decision]:
    """A branch that the gate of another one closes too is closed by that gate, not by a second zero.

    One layer makes the shifts and factors of several branches: with it closed, each of them is.
    """
    found, ends = dict(decisions), {end: node for node, end in survey.branch_of.items()}
    joined = set[int]()
    for node, decision in decisions.items():
        if decision.action not in _CLOSING or node in joined:
            continue
        for gate, zeros in _closed_values(survey, decision):
            others = {ends[i] for i in survey.walks.zero_with(zeros, len(survey.graph.nodes)) if i in ends} - {node}
            for other in others - joined:
                if found[other].action in _CLOSING and gate not in found[other].gates:
                    found[other] = Decision(decision.action, (gate,), found[other].tail)
                    joined.add(other)
    return found


def _closed_values(survey: Survey, decision: Decision) -> Iterator[tuple[Gate, set[int]]]:
    """The gates of a branch whose values others read too, each with what is zero at the branch's end when closed."""
    for summand in decision.tail.summands():
        zeros = {*summand.passed, *(() if summand.gated_at is None else (summand.gated_at,))}
        known = zeros.union(decision.tail.passed, survey.names)
        for gate in summand.gates:
            if gate in decision.gates and any(r not in known for n in zeros for r in survey.reads(n)):
                yield gate, zeros
