"""Kinds of sums met in other people's packages: how many are residual is known by construction."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from networks import WIDTH, mlp
from torch import Tensor, nn
from torch.nn import functional

from lit_resinit.find.branches import find
from lit_resinit.graph.trace import trace

HALF = WIDTH // 2


class Net(nn.Module):
    """A network written as a function of its input and of its parts."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def block() -> nn.Module:
    return Net(lambda net, x: x + net.f(x), f=mlp())


def half() -> nn.Sequential:
    return nn.Sequential(nn.Linear(HALF, 16), nn.GELU(), nn.Linear(16, HALF))


def both_halves() -> nn.Module:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        a = a + net.f(b)
        b = b + net.g(a)
        return torch.cat([a, b], -1)

    return Net(forward, f=half(), g=half())


def one_half() -> nn.Module:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([b + net.f(a), a], -1)

    return Net(forward, f=half())


def nested(norm: bool = True) -> nn.Module:
    parts = {"into": linear(), "out": linear(), "stack": nn.Sequential(block(), block())}
    parts["norm"] = nn.LayerNorm(WIDTH) if norm else nn.Identity()
    return Net(lambda net, x: x + net.out(net.stack(net.into(net.norm(x)))), **parts)


def add_norm() -> nn.Module:
    return Net(lambda net, x, skip: net.norm(x + skip), norm=nn.LayerNorm(WIDTH))


def reads_what_attention_added() -> nn.Module:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        y = net.attn(x)
        x = net.norm1(x + y)
        return net.norm2(x + net.ff(y))

    return Net(forward, attn=mlp(), ff=mlp(), norm1=nn.LayerNorm(WIDTH), norm2=nn.LayerNorm(WIDTH))


def joined_streams(twice: bool) -> nn.Module:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        p, q = net.a(x), net.b(x)
        joined = torch.cat([p, q], -1)
        return net.head(joined + net.f(torch.cat([p, q], -1) if twice else joined))

    wide = nn.Sequential(nn.Linear(2 * WIDTH, 16), nn.GELU(), nn.Linear(16, 2 * WIDTH))
    return Net(forward, a=block(), b=block(), f=wide, head=nn.Linear(2 * WIDTH, 2))


class Code(nn.Module):
    """A vector quantiser: the nearest of a few learned codes."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(32, WIDTH))

    def forward(self, z: Tensor) -> Tensor:
        nearest = self.codes[torch.cdist(z, self.codes).argmin(-1)]
        return z + (nearest - z).detach()


def residual_quantiser() -> nn.Module:
    def forward(net: nn.Module, z: Tensor) -> Tensor:
        rest, out = z, torch.zeros_like(z)
        for code in (net.a, net.b, net.c):
            found = code(rest)
            rest = rest - found.detach()
            out = out + found
        return out

    return Net(forward, a=Code(), b=Code(), c=Code())


def rest_of_subtractions() -> nn.Module:
    def forward(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        rest = x
        for f in (net.f, net.g):
            rest = rest - f(rest)
        return net.head(rest), x - rest

    return Net(forward, f=mlp(), g=mlp(), head=linear())


def mean_put_back() -> nn.Module:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True).detach()
        out = net.head(net.block(net.into(x - mean)))
        return out * x.std() + mean[:, 0, :].unsqueeze(1).repeat(1, x.shape[1], 1)

    return Net(forward, into=linear(), block=block(), head=linear())


def soft_threshold() -> nn.Module:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        v = net.f(x)
        size = v.abs()
        mean = size.mean(1)
        threshold = (mean * net.fc(mean))[:, None]
        return x + torch.sign(v) * torch.max(size - threshold, torch.zeros_like(size))

    return Net(forward, f=mlp(), fc=nn.Sequential(linear(), nn.ReLU(), linear(), nn.Sigmoid()))


def skip_from_the_start() -> nn.Module:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(block(), block(), block()), linear()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x) + self.weight * x)

    return Long()


def projected_in_turn() -> nn.Module:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        y = net.into(x)
        x = x + net.f(y)
        y = y + net.g(x)
        return net.head(torch.cat([x, y], -1))

    return Net(forward, into=linear(), f=mlp(), g=mlp(), head=nn.Linear(2 * WIDTH, 2))


SEQUENCES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "both halves, then a layer": (lambda: nn.Sequential(linear(), both_halves(), linear()), 2),
    "both halves, then a norm": (lambda: nn.Sequential(linear(), both_halves(), nn.LayerNorm(WIDTH), linear()), 2),
    "both halves, then a block": (lambda: nn.Sequential(linear(), both_halves(), block(), linear()), 3),
    "both halves between blocks": (lambda: nn.Sequential(linear(), block(), both_halves(), block(), linear()), 4),
    "both halves twice": (lambda: nn.Sequential(both_halves(), both_halves()), 4),
    "both halves alone": (both_halves, 2),
    "one half, then a layer": (lambda: nn.Sequential(linear(), one_half(), linear()), 1),
    "two flows": (lambda: nn.Sequential(one_half(), one_half()), 2),
    "three flows": (lambda: nn.Sequential(one_half(), one_half(), one_half()), 3),
    "a stack in a branch, behind a layer": (lambda: nn.Sequential(linear(), nested(), linear()), 3),
    "a stack in a branch, without a norm": (lambda: nn.Sequential(linear(), nested(norm=False), linear()), 3),
    "a stack in a branch, behind a norm": (lambda: nn.Sequential(nn.LayerNorm(WIDTH), nested(), linear()), 3),
    "stacks in branches": (lambda: nn.Sequential(linear(), nested(), nested(), linear()), 6),
    "a pooled end": (lambda: nn.Sequential(linear(), block(), block(), Net(lambda net, x: x.mean(1))), 2),
    "a pooled end of the top module": (lambda: Net(lambda net, x: (x + net.f(x)).mean(1), f=mlp()), 1),
    "a result in a plain object": (lambda: Net(lambda net, x: SimpleNamespace(out=[x + net.f(x)]), f=mlp()), 1),
    "a stack in a branch, behind an activation": (
        lambda: nn.Sequential(block(), nn.ReLU(), nested(norm=False), linear()),
        4,
    ),
    "a stream and a projection of it in turn": (projected_in_turn, 2),
    "a sum in a module of its own": (
        lambda: Net(lambda net, x: net.add(net.f(x), net.skip(x)), f=mlp(), skip=linear(), add=add_norm()),
        1,
    ),
    "a branch that reads an earlier value": (
        lambda: nn.Sequential(linear(), reads_what_attention_added(), reads_what_attention_added(), linear()),
        4,
    ),
    "joined streams": (lambda: joined_streams(twice=False), 3),
    "joined streams, joined twice": (lambda: joined_streams(twice=True), 3),
    "a skip from the start behind a scale": (skip_from_the_start, 4),
    "a residual quantiser between blocks": (lambda: nn.Sequential(block(), residual_quantiser(), block()), 2),
    "what subtractions took away": (rest_of_subtractions, 2),
    "a mean that is put back": (mean_put_back, 1),
    "a soft threshold": (lambda: nn.Sequential(linear(), soft_threshold(), soft_threshold(), linear()), 2),
    "the mean of a stream beside it": (
        lambda: nn.Sequential(block(), Net(lambda net, x: x + x.mean(-1, keepdim=True).expand_as(x)), linear()),
        1,
    ),
    "a layer's output minus what it computes": (
        lambda: Net(lambda net, x: net.f(h := net.k(x)) - h, f=mlp(), k=linear()),
        0,
    ),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_residual_sums_of_sequences(name: str) -> None:
    make, additions = SEQUENCES[name]
    assert len(find(trace(make(), (torch.randn(2, 5, WIDTH),))).streams) == additions


def conv(stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(WIDTH, WIDTH, 3, stride, 1)


def hourglass(net: nn.Module, x: Tensor) -> Tensor:
    return x + functional.interpolate(net.b(functional.gelu(net.a(functional.avg_pool2d(x, 2)))), scale_factor=2.0)


def pyramid(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    fine = torch.relu(net.skip(x) + net.f(x))
    coarse = net.top(net.down(fine).relu())
    return coarse, net.smooth(net.lateral(fine) + functional.interpolate(coarse, scale_factor=2.0))


IMAGES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "hourglasses written inline": (lambda: nn.Sequential(*(Net(hourglass, a=conv(), b=conv()) for _ in range(3))), 3),
    "a pyramid in one module": (
        lambda: Net(
            pyramid,
            skip=conv(),
            f=nn.Sequential(conv(), nn.ReLU(), conv()),
            down=conv(2),
            top=conv(),
            lateral=conv(),
            smooth=conv(),
        ),
        1,
    ),
}


@pytest.mark.parametrize("name", IMAGES)
def test_residual_sums_of_images(name: str) -> None:
    make, additions = IMAGES[name]
    assert len(find(trace(make(), (torch.randn(2, WIDTH, 8, 8),))).streams) == additions
