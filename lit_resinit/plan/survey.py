"""All that is known of a network before anything is decided."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping

from torch import nn

from lit_resinit.find.branches import Found, find
from lit_resinit.find.closed import closed_gates, closed_injections
from lit_resinit.find.dominance import Dominance
from lit_resinit.find.gates import Gate
from lit_resinit.find.streams import Addition, Link, Streams
from lit_resinit.find.tails import Tail, Tails
from lit_resinit.find.zeros import Zeros
from lit_resinit.graph.values import Graph
from lit_resinit.graph.where import clean_name
from lit_resinit.plan.names import branch_names


@dataclasses.dataclass(frozen=True, eq=False)
class Survey:
    """What a plan is made of, by the node of every addition where nothing else is said.

    Args:
        graph: The traced forward.
        readers: For every node the nodes that read it.
        modules: The modules by name.
        parameters: The nodes of parameters by name.
        streams: The residual additions on their streams.
        additions: These, and what is added closed from elsewhere, in the order of execution.
        unread: Residual additions from whose sum no output of the network is computed.
        walks: What follows a branch back from its end.
        tails: The end of every branch.
        closed: The gates of every branch that arrives closed.
        names: The name of every branch, and of those that are unread.
        zeros: What is zero for every input, with the parameters as they are.
        dominance: Which ways lead from a value to an output.
        called: What every call of a module returned, by the module's name.
        returned: For a value the modules that return it, and as which of their tensors.
    """

    graph: Graph
    readers: list[list[int]]
    modules: Mapping[str, nn.Module]
    parameters: dict[str, int]
    streams: Streams
    additions: tuple[Addition, ...]
    unread: tuple[Addition, ...]
    walks: Tails
    tails: dict[int, Tail]
    closed: dict[int, tuple[Gate, ...]]
    names: dict[int, str]
    zeros: Zeros
    dominance: Dominance
    called: dict[str, list[tuple[int, ...]]]
    returned: dict[int, list[tuple[str, int]]]

    def link(self, addition: Addition) -> Link:
        """How an addition hangs on its stream; what is added closed from elsewhere starts one of its own."""
        return self.streams.link(addition.node) if addition.node in self.streams else Link(addition.skip, None, ())

    @functools.cached_property
    def branch_of(self) -> dict[int, int]:
        """The branch's end of every addition."""
        return {a.node: a.branch for a in self.additions}

    def reads(self, node: int) -> list[int]:
        """The nodes that read a value, without statistics."""
        return [r for r in self.readers[node] if self.graph.nodes[r].op != "statistic"]

    def parameters_below(self, nodes: Iterable[int]) -> list[str]:
        """The parameters that expressions are computed from."""
        waiting, found = list(nodes), []
        while waiting:
            node = self.graph.nodes[waiting.pop()]
            if node.op == "parameter":
                found.append(node.name)
            waiting += node.inputs
        return found


def survey(model: nn.Module, graph: Graph) -> Survey:
    """Look at everything, once."""
    parameters = {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    found, zeros = find(graph), Zeros(graph, parameters)
    dominance = Dominance(graph, found.facts.readers)
    everything = _additions(graph, found, zeros)
    additions = tuple(a for a in everything if dominance.is_read(a.node))
    walks = Tails(graph, found.facts.readers, found.streams)
    tails = {a.node: walks.of(a) for a in everything}
    called, returned = _outputs(graph)
    return Survey(
        graph=graph,
        readers=found.facts.readers,
        modules={clean_name(n): m for n, m in model.named_modules(remove_duplicate=False)},
        parameters={n.name: n.index for n in graph.nodes if n.op == "parameter"},
        streams=found.streams,
        additions=additions,
        unread=tuple(a for a in everything if not dominance.is_read(a.node)),
        walks=walks,
        tails=tails,
        closed={a.node: closed_gates(graph, zeros, a.branch) for a in additions},
        names=branch_names(graph, everything, {node: tail.passed for node, tail in tails.items()}),
        zeros=zeros,
        dominance=dominance,
        called=called,
        returned=returned,
    )


def _additions(graph: Graph, found: Found, zeros: Zeros) -> tuple[Addition, ...]:
    everything = [*found.streams, *closed_injections(graph, found, zeros)]
    return tuple(sorted(everything, key=lambda a: a.node))


def _outputs(graph: Graph) -> tuple[dict[str, list[tuple[int, ...]]], dict[int, list[tuple[str, int]]]]:
    called: dict[str, list[tuple[int, ...]]] = {}
    returned: dict[int, list[tuple[str, int]]] = {}
    for output in graph.outputs:
        called.setdefault(output.module, []).append(output.nodes)
        for position, node in enumerate(output.nodes):
            returned.setdefault(node, []).append((output.module, position))
    return called, returned
