"""Parameters and buffers without values: what a trace on them says is what one on real tensors says."""

import pytest
import torch
from networks import WIDTH, mlp
from torch import Tensor, nn

from lit_resinit import make_plan
from lit_resinit.graph.trace import trace

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    """A weight that is kept a second time, as a plain attribute that shows the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.head = mlp(), nn.Linear(WIDTH, 2)
        self.shown = [self.f[2].weight.data]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.f[1](self.f[0](x)) @ self.shown[0].t())


class OneStorage(nn.Module):
    """Two parameters that are parts of one block of memory."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(2 * WIDTH, WIDTH)
        self.first, self.second = nn.Parameter(memory[:WIDTH]), nn.Parameter(memory[WIDTH:])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + nn.functional.gelu(x @ self.first.t()) @ self.second.t())


class Strided(nn.Module):
    """A parameter whose memory is transposed, one of another type, a frozen one, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.coarse = nn.Parameter(torch.randn(WIDTH, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("order", torch.arange(WIDTH).flip(0))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, nn.Parameter)
        assert not self.weight.is_contiguous()
        assert not self.coarse.requires_grad
        return self.head(x + (x * self.coarse.float())[:, self.order] @ self.weight)


@pytest.mark.parametrize("build", [Tied, OneStorage, Strided])
def test_nothing_is_lost_but_the_values(build: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = build()
    fast = trace(model, (X,))
    with monkeypatch.context() as patch:
        patch.setattr("lit_resinit.graph.trace._faked", lambda mode, tensor, shared: mode.from_tensor(tensor))
        slow = trace(model, (X,))
    words = [(n.op, n.inputs, n.shape, n.name, n.data, n.learned) for n in fast.nodes]
    assert words == [(n.op, n.inputs, n.shape, n.name, n.data, n.learned) for n in slow.nodes]
    assert len(make_plan(model, X, scheme="observe")) == 1
