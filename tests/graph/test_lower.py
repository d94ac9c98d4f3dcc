"""One call as its parts."""

from collections.abc import Callable

import pytest
import torch
from graphs import graph_of, result
from networks import WIDTH
from torch import Tensor, nn

from lit_resinit import NoBranchError, make_plan
from lit_resinit.graph.trace import trace


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x, w: x + w, "add"),
        (lambda x, w: x - w, "add"),
        (lambda x, w: torch.addcmul(x, x, w), "add"),
        (lambda x, w: torch.lerp(x, x * w, 0.5), "add"),
        (lambda x, w: torch.stack([x, x * w], -1).sum(-1), "add"),
        (lambda x, w: torch.sum(torch.stack([x, x * w]), 0), "add"),
        (lambda x, w: torch.stack([x, x * w], 1).sum(0), "sum"),
        (lambda x, w: torch.stack([x, x, x * w]).sum(0), "sum"),
        (lambda x, w: torch.stack([x, x * w]).sum(), "sum"),
        (lambda x, w: x * w, "mul"),
        (lambda x, w: x / w, "mul"),
        (lambda x, w: 3.0 * x, "scale"),
        (lambda x, w: -x, "scale"),
        (lambda x, w: x + 1.0, "shift"),
        (lambda x, w: 1.0 - x, "shift"),
        (lambda x, w: x.view(-1), "view"),
        (lambda x, w: x[:, :2], "part"),
        (lambda x, w: torch.nn.functional.layer_norm(x, (WIDTH,)), "norm"),
        (lambda x, w: torch.nn.functional.layer_norm(x, (WIDTH,), w), "mul"),
        (lambda x, w: torch.relu(x), "relu"),
    ],
)
def test_operations_are_spelled_in_their_parts(function: Callable, op: str) -> None:
    assert result(graph_of(function)).op == op


def test_subtraction_is_an_addition_of_the_negative() -> None:
    graph = graph_of(lambda x, w: x - 2.0 * w)
    left, right = (graph.nodes[i] for i in result(graph).inputs)
    assert (left.op, right.op, right.number) == ("input", "scale", -1.0)


@pytest.mark.parametrize(
    ("function", "steps"),
    [
        (lambda z: z + 1j, ["shift"]),
        (lambda z: z - 1j, ["shift"]),
        (lambda z: 2 - z, ["scale", "shift"]),
        (lambda z: z.sub(z.conj().resolve_conj(), alpha=1j), ["scale", "add"]),
        (lambda z: z.add(z.roll(1), alpha=2), ["scale", "add"]),
    ],
)
def test_numbers_added_are_shifts_whatever_their_kind(function: Callable[[Tensor], Tensor], steps: list[str]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, z: Tensor) -> Tensor:
            return function(z * self.weight)

    graph = trace(Net(), (torch.randn(2, 3, dtype=torch.complex64),))
    assert [n.op for n in graph.nodes if n.op in ("shift", "scale", "add")] == steps
    with pytest.raises(NoBranchError):
        make_plan(Net(), torch.randn(2, 3, dtype=torch.complex64))
