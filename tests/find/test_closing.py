"""Which parameter, at which value, makes an expression equal to a number."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lit_resinit.find.closing import Closing, closing, depends_on
from lit_resinit.graph.trace import trace
from lit_resinit.graph.values import Graph

Expression = Callable[[Tensor, Tensor], Tensor]


class Product(nn.Module):
    """Multiplies the input by an expression of two parameters."""

    def __init__(self, expression: Expression) -> None:
        super().__init__()
        self.expression = expression
        self.w, self.v = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.expression(self.w, self.v)


def expression_of(expression: Expression) -> tuple[Graph, int]:
    """The traced graph, and the node of the expression in it."""
    graph = trace(Product(expression), (torch.randn(2, 4),))
    product = next(n for n in reversed(graph.nodes) if n.op == "mul" and n.data)
    return graph, next(i for i in product.inputs if not graph.nodes[i].data)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (lambda w, v: w, Closing("w", 0.0, None)),
        (lambda w, v: 1 + w, Closing("w", -1.0, None)),
        (lambda w, v: 2 * w + 3, Closing("w", -1.5, None)),
        (lambda w, v: w.view(2, 2).reshape(4).double(), Closing("w", 0.0, None)),
        (lambda w, v: w.repeat(1), Closing("w", 0.0, None)),
        (lambda w, v: w[2], Closing("w", 0.0, 2)),
        (lambda w, v: w[-1:], Closing("w", 0.0, 3)),
        (lambda w, v: torch.tanh(w), Closing("w", 0.0, None, linear=False)),
        (lambda w, v: w * v, Closing("w", 0.0, None)),
        (lambda w, v: torch.exp(w) * v, Closing("v", 0.0, None)),
    ],
)
def test_closing_names_parameter_value_and_element(expression: Expression, expected: Closing) -> None:
    assert closing(*expression_of(expression)) == expected


@pytest.mark.parametrize(
    "expression",
    [
        lambda w, v: torch.exp(w),  # never zero
        lambda w, v: torch.relu(w),  # no slope there
        lambda w, v: w * w,  # neither factor can move alone
        lambda w, v: w[1:3].repeat(2),  # two elements of several
        lambda w, v: w[1:3][0],  # an element of a part
        lambda w, v: 1 + w * v,  # a product that has to be -1
    ],
)
def test_what_no_one_parameter_closes_with_a_slope_has_no_closing(expression: Expression) -> None:
    assert closing(*expression_of(expression)) is None


def test_depends_on_finds_a_parameter_behind_shared_values() -> None:
    graph, node = expression_of(lambda w, v: torch.exp(w) + torch.exp(w) * 2)
    assert depends_on(graph, node, "w")
    assert not depends_on(graph, node, "v")
