"""What is zero, given what is: the one reading of the table of operations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lit_resinit.find.zeros import Zeros, stays_zero, zero_sources
from lit_resinit.graph import ops
from lit_resinit.graph.ops import Zero
from lit_resinit.graph.trace import trace
from lit_resinit.graph.values import Graph, Node

Function = Callable[[Tensor, Tensor], Tensor]


class Of(nn.Module):
    """A function of two layers' outputs."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.left(x), self.right(x))


def ends(graph: Graph) -> tuple[int, int, int]:
    """The outputs of the two layers and of the whole."""
    left, right, whole = ({o.module: o.nodes[0] for o in graph.outputs}[n] for n in ("left", "right", ""))
    return left, right, whole


def becomes_zero(function: Function, *zero: int) -> bool:
    """Whether the whole is zero when the chosen operands (0, 1) are, step by step from there."""
    graph = trace(Of(function), (torch.randn(2, 4),))
    *operands, whole = ends(graph)
    known = {operands[i] for i in zero}
    for node in graph.nodes:
        if node.index > min(known) and node.inputs and stays_zero(graph, node, known.__contains__):
            known.add(node.index)
    return whole in known


@pytest.mark.parametrize(
    ("function", "zero", "expected"),
    [
        (lambda a, b: a.view(4, 2).relu().sum(-1), (0,), True),
        (lambda a, b: a + b, (0,), False),
        (lambda a, b: a + b, (0, 1), True),
        (lambda a, b: a * b, (0,), True),
        (lambda a, b: a @ b.T, (1,), True),
        (lambda a, b: a + 1, (0,), False),
        (lambda a, b: a * 2, (0,), True),
        (lambda a, b: torch.cos(a), (0,), False),
        (lambda a, b: torch.sin(a), (0,), True),
        (lambda a, b: a.softmax(-1), (0,), False),
        (lambda a, b: a.logsumexp(-1), (0,), False),
        (lambda a, b: torch.cat([a, b]), (0,), False),
        (lambda a, b: torch.cat([a, b]), (0, 1), True),
        (lambda a, b: torch.where(b > 0, a, a * 2), (0,), True),
        (lambda a, b: torch.where(b > 0, a, b), (0,), False),
        (lambda a, b: nn.functional.layer_norm(a, (4,)), (0,), True),
        (lambda a, b: nn.functional.scaled_dot_product_attention(b[None], b[None], a[None]), (0,), True),
        (lambda a, b: nn.functional.scaled_dot_product_attention(a[None], a[None], b[None]), (0,), False),
    ],
)
def test_zero_goes_through_by_the_table(function: Function, zero: tuple[int, ...], expected: bool) -> None:
    assert becomes_zero(function, *zero) is expected


def test_sources_are_the_inputs_that_make_it_zero() -> None:
    graph = trace(Of(lambda a, b: a * b + a), (torch.randn(2, 4),))
    left, right, whole = ends(graph)
    product = next(n for n in reversed(graph.nodes) if n.op == "mul")
    assert zero_sources(graph, product, {left}.__contains__) == (left,)
    assert zero_sources(graph, product, {left, right}.__contains__) == (left, right)
    assert zero_sources(graph, graph.nodes[whole], {left}.__contains__) == ()


def test_a_leaf_is_zero_for_no_reason() -> None:
    graph = trace(Of(lambda a, b: a + b), (torch.randn(2, 4),))
    leaves = [n for n in graph.nodes if not n.inputs]
    assert leaves
    assert not any(stays_zero(graph, n, lambda index: True) for n in leaves)


def test_every_row_of_the_table_is_read() -> None:
    graph = Graph()
    graph.add("input", (), -1, (2,), data=True)
    read = set()
    for op, kind in ops.KINDS.items():
        node = Node(1, op, (0, 0, 0, 0), -1, (2,), data=True, number=0.0)
        assert stays_zero(graph, node, lambda index: True) is (kind.zero is not Zero.NEVER), op
        assert stays_zero(graph, node, lambda index: False) is (kind.zero is Zero.ALWAYS), op
        read.add(kind.zero)
    assert read == set(Zero)


def test_a_model_that_arrives_closed_names_the_factor() -> None:
    model = Of(lambda a, b: torch.tanh(a) + b)
    nn.init.zeros_(model.left.weight)
    nn.init.zeros_(model.left.bias)
    graph = trace(model, (torch.randn(2, 4),))
    zeros = Zeros(graph, dict(model.named_parameters()))
    left, right, whole = ends(graph)
    assert (zeros.at(left), zeros.at(right), zeros.at(whole)) == (True, False, False)
    factors = [f.closing.parameter for f in map(zeros.factor, range(len(graph.nodes))) if f is not None]
    assert factors == ["left.weight"]
    assert zeros.holds("left.bias")
    assert not zeros.holds("right.weight")
