"""What is recorded of a running forward."""

from collections.abc import Callable

import pytest
import torch
from graphs import graph_of, result
from networks import WIDTH
from torch import Tensor

from lit_resinit.graph.values import Graph, Node


def leaves(graph: Graph, node: Node) -> set[str]:
    """Names (or kinds) of the leaves behind a node."""
    stack_, found = [node], set()
    while stack_:
        current = stack_.pop()
        if not current.inputs:
            found.add(current.name or current.op)
        stack_ += [graph.nodes[i] for i in current.inputs]
    return found


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (x * w).detach() + 0.0,
        lambda x, w: (x * w).view(-1).view(4, WIDTH) + 0.0,
        lambda x, w: (x * w).t().t() + 0.0,
        lambda x, w: torch.utils.checkpoint.checkpoint(lambda y: y * w, x, use_reentrant=False) + 0.0,
    ],
    ids=["detach", "view", "transpose", "checkpoint"],
)
def test_values_are_followed_through_aliases(function: Callable) -> None:
    graph = graph_of(function)
    assert leaves(graph, result(graph)) == {"input", "weight"}


def test_in_place_operations_show_in_every_view() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        view = out.view(-1)
        out.add_(x * w)
        return view * 2.0

    graph = graph_of(function)
    assert leaves(graph, result(graph)) >= {"input", "weight"}


def test_writing_into_a_part_keeps_the_rest() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        out = x.clone()
        out[:, :1] = w[:1]
        return out * 1.5

    graph = graph_of(function)
    assert leaves(graph, result(graph)) == {"input", "weight"}


def test_data_and_learned_are_told_apart() -> None:
    graph = graph_of(lambda x, w: x * torch.tanh(w))
    moving, fixed = (graph.nodes[i] for i in result(graph).inputs)
    assert (moving.data, moving.learned) == (True, False)
    assert (fixed.data, fixed.learned) == (False, True)


def test_noise_is_marked() -> None:
    graph = graph_of(lambda x, w: x + torch.randn_like(x))
    assert result(graph).noise


def test_a_backward_inside_the_forward_is_left_out() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = (x * w).exp().sum()
        y.backward()
        return x * w

    assert [n.op for n in graph_of(function).nodes if n.op == "exp"] == ["exp"]
