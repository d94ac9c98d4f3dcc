"""Behind open gates: layers that get no gradient are named once, with the line, and healthy ones never."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from networks import WIDTH, PreNorm, Scaled, mlp, stack
from test_trial import Loop
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Block(nn.Module):
    """``x + scale * f(x)`` with a function of a few layers."""

    def __init__(self, function: Callable[["Block", Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.one, self.two, self.three = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.zeros(1))
        self.register_buffer("nothing", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.function(self, x)


BROKEN: dict[str, tuple[Callable[[Block, Tensor], Tensor], set[str]]] = {
    "detach": (lambda m, x: m.three(m.two(m.one(x)).detach()), {"one", "two"}),  # lost here
    "no_grad": (lambda m, x: m.three(m.two(torch.no_grad()(m.one)(x))), {"one"}),  # lost here
    "an unused half": (lambda m, x: (m.three(m.two(x)), m.one(x))[0], {"one"}),  # lost here
    "zero buffer": (lambda m, x: m.three(m.two(x) + m.nothing * m.one(x)), {"one"}),  # lost here
    "rounding": (lambda m, x: m.three(m.two(m.one(x)).round()), {"one", "two"}),  # lost here
    "saturated": (lambda m, x: m.three(m.two(x) * F.relu(m.one(x).abs().neg() - 1.0)), {"one", "two"}),  # lost here
}


@pytest.mark.parametrize("name", BROKEN)
def test_layers_without_a_gradient_are_named_once_with_the_line(name: str) -> None:
    function, lost = BROKEN[name]
    torch.manual_seed(0)
    loop = Loop(nn.Sequential(Block(function), Block(lambda m, x: m.three(m.two(m.one(x)))), nn.Linear(WIDTH, 2)))
    said = [finding for _ in range(8) for finding in loop.step()]
    if name == "saturated":  # data decide
        assert said == []
        return
    (finding,) = said
    assert (finding.about, finding.level) == ("advice", "warning")
    assert f"0.{sorted(lost)[0]}." in finding.message
    assert f"none on {2 * len(lost)} parameters" in finding.message
    path, _, number = finding.message.split(", at ")[1].split(". ")[0].partition(".py:")
    assert "# lost here" in Path(path + ".py").read_text().splitlines()[int(number.split(".")[0]) - 1]


class Adapted(Scaled):
    """A low-rank update, zero at first, beside a frozen layer."""

    def __init__(self) -> None:
        super().__init__(value=0.0)
        self.f[0].requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.f[2](self.f[0](x) + self.b(self.a(x)))


class Experts(nn.Module):
    """The second expert gets no row of this batch."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.scale = nn.ModuleList([mlp(), mlp()]), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > -1e9).nonzero()[:, 0], (x[:, 0] < -1e9).nonzero()[:, 0]
        out = torch.zeros_like(x)
        for chosen, expert in zip(rows, self.experts, strict=True):
            out = out.index_add(0, chosen, expert(x[chosen]))
        return x + self.scale * out


class Normed(Scaled):
    """A bias before a norm, whose gradient is rounding."""

    def __init__(self) -> None:
        super().__init__(value=0.0)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.norm(self.f(x))


class Attention(nn.Module):
    """The bias of the keys has no gradient by calculus; nor have queries and keys of a single token."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.scale = tokens, nn.Parameter(torch.zeros(1))
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        t = x[:, None].expand(-1, self.tokens, -1) * torch.linspace(0.5, 1.5, self.tokens)[:, None]
        return x + self.scale * F.scaled_dot_product_attention(self.q(t), self.k(t), self.v(t)).mean(1)


class Gated(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.f[2](F.glu(torch.cat([self.f[0](x), x], -1), dim=-1))


HEALTHY = {
    "adapter": Adapted,
    "experts": Experts,
    "bias before a norm": Normed,
    "attention": lambda: Attention(3),
    "one token": lambda: Attention(1),
    "glu": lambda: Gated(value=0.0),
    "dropout": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.5, batch_first=True, norm_first=True),
    "pre-norm": PreNorm,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_healthy_blocks(name: str) -> None:
    torch.manual_seed(0)
    loop = Loop(stack(HEALTHY[name]))
    assert [finding.message for _ in range(8) for finding in loop.step()] == []


def test_nothing_is_looked_at_after_the_third_step_of_a_healthy_network() -> None:
    loop = Loop(stack(PreNorm))
    for _ in range(3):
        loop.step()
    assert not loop.trial.due
    loop.step()
    assert loop.phases == ["AWAKE"] * 4
