"""The end of a branch: what a walk back passes, and where it stops."""

import torch
from networks import WIDTH, Plain
from torch import Tensor, nn

from lit_resinit import make_plan
from lit_resinit.find.branches import find
from lit_resinit.find.tails import Tail, Tails
from lit_resinit.graph.trace import trace

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class ManySummands(nn.Module):
    """``x + bias + tanh(f1(x) + (f2(x) + (f3(x) + ...)))``, every sum nested in the one before."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        total = self.layers[-1](x.relu())
        for layer in reversed(self.layers[:-1]):
            total = layer(x.relu()) + total
        return x + (torch.tanh(total) + self.bias)


def tail_of(model: nn.Module) -> Tail:
    graph = trace(model, (X,))
    found = find(graph)
    (addition,) = found.streams
    return Tails(graph, found.facts.readers, found.streams).of(addition)


def test_every_summand_has_its_gate_and_the_biases_after_it() -> None:
    tail = tail_of(ManySummands(3))
    assert [g.parameter for g in tail.every_gate] == [f"layers.{i}.weight" for i in range(3)]
    assert [g.biases for g in tail.every_gate] == [("bias", f"layers.{i}.bias") for i in range(3)]
    assert all(s.nonlinear and not s.insertable for s in tail.summands())
    assert tail.closable


def test_a_thousand_summands_are_no_deeper_than_one() -> None:
    tail = tail_of(ManySummands(1000))
    assert len(tail.every_gate) == len(list(tail.summands())) == 1000


def test_a_stop_says_where_and_why() -> None:
    class Rectified(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.relu(self.f(x))

    tail = tail_of(Rectified())
    assert (tail.gates, tail.forks, tail.closable) == ((), (), False)
    assert tail.reason == "`relu` has slope 0 at zero"
    assert tail.stopped_by == tail.passed[-1]


def test_a_plan_of_many_summands_is_made() -> None:
    (branch,) = make_plan(ManySummands(400), X, scheme="last_layer").branches
    assert len(branch.gates) == 400
