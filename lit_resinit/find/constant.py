"""Which values are the same whatever the batch, with the parameters as they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from lit_resinit.find.zeros import Zeros
from lit_resinit.graph.values import Graph


def closed_off(
    graph: Graph, parameters: Mapping[str, Tensor], gates: Collection[str], values: Iterable[int]
) -> set[int]:
    """The values that see the batch when the gates are open, and do not see it now.

    Args:
        graph: A forward, recorded with all its operations.
        parameters: The model's parameters by name, as they are now.
        gates: Names of those that a plan has closed.
        values: Nodes, outputs of the network for example.
    """
    opened = {name: torch.ones_like(parameters[name]) for name in gates if name in parameters}
    before, now = _sees_the_batch(graph, {**parameters, **opened}), _sees_the_batch(graph, parameters)
    return {value for value in values if before[value] and not now[value]}


def _sees_the_batch(graph: Graph, parameters: Mapping[str, Tensor]) -> list[bool]:
    zeros, found = Zeros(graph, parameters), list[bool]()
    for node in graph.nodes:
        starts = node.data and not any(graph.nodes[i].data for i in node.inputs)
        found.append(not zeros.at(node.index) and (starts or any(found[i] for i in node.inputs)))
    return found
