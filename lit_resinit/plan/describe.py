"""What a plan says of every branch and stream, in names in place of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import nn

from lit_resinit.find.closing import closing
from lit_resinit.find.norms import is_normalised
from lit_resinit.find.overwritten import overwritten_by
from lit_resinit.find.streams import Addition
from lit_resinit.find.views import is_weight
from lit_resinit.graph import ops
from lit_resinit.graph.lower import stacking
from lit_resinit.graph.ops import Does
from lit_resinit.graph.where import is_below
from lit_resinit.plan.decide import Decision
from lit_resinit.plan.survey import Survey
from lit_resinit.plan.values import Branch, Stream

# What a block still does to its sum: a norm, a function, a dropout or two. It is named in a remark; where a whole
# network is one forward, the walk would go on to its end.
_AFTER = 8


def describe(survey: Survey, decisions: Mapping[int, Decision]) -> tuple[Branch, ...]:
    """Every branch, in the order of execution."""
    norms, lengths = _norm_parameters(survey), _lengths(survey)
    return tuple(
        _branch(survey, addition, decisions[addition.node], lengths[addition.node], norms)
        for addition in survey.additions
    )


def _branch(
    survey: Survey, addition: Addition, decision: Decision, length: int, norms: Mapping[int | str, list[str]]
) -> Branch:
    graph, link, factors = survey.graph, survey.link(addition), list(_factors(survey, addition))
    call = graph.calls[graph.nodes[addition.node].call]
    nearby: list[int | str] = [addition.block, *sorted(addition.interior), *link.between]
    stopped_by, reason = _obstacle(survey, decision)
    stack = stacking(graph, call.inputs[0]) if ops.base_name(call.func) == "sum" else None
    inputs = call.inputs if stack is None else stack[1]
    skip_input = _input_position(survey, addition.skip, inputs)
    overwritten = overwritten_by(graph, addition, survey.streams)
    writer = None if overwritten is None else graph.calls[graph.nodes[overwritten].call]
    return Branch(
        name=survey.names[addition.node],
        block=addition.block,
        skip="projection" if addition.projection else "identity",
        gates=tuple(dict.fromkeys(decision.gates)),
        action=decision.action,
        source=call.source,
        address=addition.address,
        skip_input=0 if skip_input is None else skip_input,
        branch_input=_input_position(survey, addition.branch, inputs),
        stacked=None if stack is None else stack[0],
        previous=None if link.previous is None else survey.names[link.previous],
        between=labels(survey, link.between),
        factor=tuple(name for name, _ in factors),
        units=tuple(unit for _, unit in factors),
        norms=tuple(dict.fromkeys(name for place in nearby for name in norms.get(place, ()))),
        length=length,
        graded=call.graded,
        reason=reason,
        culprit="" if stopped_by is None else graph.owner(stopped_by),
        overwritten_by="" if writer is None else f"{ops.base_name(writer.func)}_",
        overwritten_in="" if writer is None else writer.owner,
        overwritten_at="" if writer is None else writer.source,
    )


def _obstacle(survey: Survey, decision: Decision) -> tuple[int | None, str]:
    """Where the way to a gate ended, and why, for a branch without gates."""
    stopped = next((t for t in decision.tail.summands() if not t.gates), None) if not decision.gates else None
    if stopped is None or stopped.stopped_by is None:
        return None, ""
    source = survey.graph.source(stopped.stopped_by)
    return stopped.stopped_by, f"{stopped.reason} ({f'at {source}' if source else 'a leaf'})"


def _input_position(survey: Survey, node: int, inputs: tuple[int, ...]) -> int | None:
    """Which input of an operation a value is, be it as its only source."""
    if node in inputs:
        return inputs.index(node)
    sources = survey.graph.nodes[node].inputs
    return inputs.index(sources[0]) if len(sources) == 1 and sources[0] in inputs else None


def labels(survey: Survey, nodes: Iterable[int]) -> tuple[str, ...]:
    """Operations by the modules that run them, where these have no modules below, else by their own names."""
    found: dict[str, None] = {}
    for index in nodes:
        owner = survey.graph.owner(index)
        alone = owner and owner in survey.called and _has_no_modules(survey, owner)
        found[owner if alone else survey.graph.nodes[index].op] = None
    return tuple(found)


def _has_no_modules(survey: Survey, name: str) -> bool:
    return name in survey.modules and next(survey.modules[name].children(), None) is None


def _factors(survey: Survey, addition: Addition) -> Iterator[tuple[str, float | None]]:
    """What multiplies the skip, with the value at which that is one: 0 for the parameter of ``1 - g``."""
    graph = survey.graph
    for index in addition.scales:
        node = graph.nodes[index]
        learned = [i for i in node.inputs if graph.nodes[i].learned and not graph.nodes[i].data]
        for expression in learned:
            found = closing(graph, expression, target=1.0)
            if found is not None and found.index is None:
                yield found.parameter, found.value
            else:
                yield from ((name, 1.0) for name in survey.parameters_below([expression]))
        if not learned:
            yield (f"{node.op} {node.number:g}" if node.number else node.op), None


def _norm_parameters(survey: Survey) -> dict[int | str, list[str]]:
    """Affine parameters of norms, by the product in which they are read, and of the norms in every block."""
    graph, blocks = survey.graph, {a.block for a in survey.additions if a.block}
    found: dict[int | str, list[str]] = {b: [] for b in blocks}
    for node in graph.nodes:
        if node.op != "mul":
            continue
        left, right = node.inputs
        factors = [f for n, f in ((left, right), (right, left)) if is_weight(graph, f) and is_normalised(graph, n)]
        if not factors:
            continue
        names = found[node.index] = survey.parameters_below(factors)
        owner = graph.owner(node.index)
        while owner:
            if owner in blocks:
                found[owner] += names
            owner = owner.rpartition(".")[0]
    return found


# -------------------------------------------------------------------- streams


def streams(survey: Survey) -> tuple[Stream, ...]:
    """The streams in the order of their first branches; where one parts, what goes on second is one of its own."""
    chains: list[list[Addition]] = []
    chain_at: dict[int, list[Addition]] = {}
    for addition in survey.additions:
        previous = survey.link(addition).previous
        chain = None if previous is None else chain_at.get(previous)
        if chain is None or chain[-1].node != previous:
            chain = []
            chains.append(chain)
        chain.append(addition)
        chain_at[addition.node] = chain
    return tuple(_stream(survey, chain) for chain in chains)


def _stream(survey: Survey, chain: list[Addition]) -> Stream:
    links = [survey.link(a) for a in chain]
    previous = links[0].previous
    return Stream(
        branches=tuple(survey.names[a.node] for a in chain),
        between=tuple(labels(survey, link.between) for link in links),
        after=_after(survey, chain[-1]),
        parts_from=None if previous is None else survey.names[previous],
    )


def _after(survey: Survey, addition: Addition) -> tuple[str, ...]:
    """What the block does to the sum of an addition after which the stream has no other."""
    passed: list[int] = []
    current = addition.node
    while len(passed) < _AFTER and addition.block:
        readers = survey.reads(current)
        if len(readers) != 1 or not is_below(survey.graph.owner(readers[0]), addition.block):
            break
        current = readers[0]
        if survey.graph.nodes[current].op != "view":
            passed.append(current)
    return labels(survey, passed)


def _lengths(survey: Survey) -> dict[int, int]:
    """For every addition how many its stream has, with all its parts."""
    first: dict[int, int] = {}
    for addition in survey.additions:
        previous = survey.link(addition).previous
        first[addition.node] = addition.node if previous is None else first[previous]
    count = Counter(first.values())
    return {node: count[start] for node, start in first.items()}


# -------------------------------------------------------------------- outside the branches


def zero_layers(survey: Survey, gates: Collection[str]) -> tuple[str, ...]:
    """All-zero weights of layers that are no gates."""
    found: dict[str, None] = {}
    for node in survey.graph.nodes:
        if not ops.does(node.op, Does.APPLIES_WEIGHT):
            continue
        for source in node.inputs:
            weight = survey.graph.nodes[source]
            if weight.learned and not weight.data:
                names = survey.parameters_below([source])
                found |= dict.fromkeys(n for n in names if n not in gates and survey.zeros.holds(n))
    return tuple(found)


def idle_modules(survey: Survey) -> tuple[str, ...]:
    """The outermost modules with parameters, none of which the forward read, under whatever name."""
    own = [(n, p) for n, m in survey.modules.items() for _, p in m.named_parameters(recurse=False)]
    names = {n.name for n in survey.graph.nodes if n.op == "parameter" and survey.readers[n.index]}
    read = {id(p) for name in names for p in [_parameter(survey, name)] if p is not None}
    busy = {place for name, p in own if id(p) in read for place in _and_above(name)}
    idle = {next(place for place in _and_above(name) if place not in busy): None for name, _ in own if name not in busy}
    return tuple(idle)


def _parameter(survey: Survey, name: str) -> nn.Parameter | None:
    owner, _, own = name.rpartition(".")
    known = survey.modules[owner].named_parameters(recurse=False) if owner in survey.modules else ()
    return next((p for n, p in known if n == own), None)


def _and_above(name: str) -> list[str]:
    """A module and those that it lies in, the outermost first."""
    parts = name.split(".")
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))] if name else [""]
