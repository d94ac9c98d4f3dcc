"""For every rule and stage of the finder a network on which it decides, and a neighbour on which it does not.

Every network says how many residual additions it has.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH = 8


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))


def conv(kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(WIDTH, WIDTH, kernel, stride, kernel // 2)


class Network(nn.Module):
    """A stem, then a function of its output and of parts made by name, then a head."""

    def __init__(self, additions: int, forward: Callable[..., Tensor], image: bool = False, **parts: nn.Module) -> None:
        super().__init__()
        self.additions, self.function, self.image = additions, forward, image
        stem, self.head = (conv(), conv()) if image else (linear(), linear())
        self.stem = nn.Sequential(stem, nn.GELU())
        self.names = list(parts)
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        out = self.function(self.stem(x), **{name: getattr(self, name) for name in self.names})
        return self.head(out) if isinstance(out, Tensor) else out[0]

    def data(self) -> Tensor:
        return torch.randn(2, WIDTH, 8, 8) if self.image else torch.randn(2, 6, WIDTH)


class Scale(nn.Module):
    """A learned factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class TwoHeads(nn.Module):
    """``head(h) + head2(gelu(l(h)))`` at the end of a network; what is in between may have a head of its own."""

    def __init__(self, additions: int, third: bool) -> None:
        super().__init__()
        self.additions = additions
        self.inner, self.first, self.second = linear(), linear(), linear()
        self.stem = nn.Sequential(linear(), nn.GELU())
        self.third = linear() if third else None

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.stem(x)
        inner = nn.functional.gelu(self.inner(h))
        out = self.first(h) + self.second(inner)
        return out if self.third is None else (out, self.third(inner))

    def data(self) -> Tensor:
        return torch.randn(2, 6, WIDTH)


class Resized(nn.Module):
    """Half the resolution and back, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.work, self.up = conv(stride=2), conv(), nn.Upsample(scale_factor=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.work(self.down(x).relu()).relu())


def pooled(h: Tensor) -> Tensor:
    return h.mean(1, keepdim=True).expand_as(h)


def mixed_streams(h: Tensor, f: nn.Module, a: nn.Module, b: nn.Module) -> Tensor:
    return b(h) + a(h + f(h))


def conv_block() -> nn.Sequential:
    return nn.Sequential(conv(), nn.ReLU(), conv())


def down_and_up(h: Tensor, f: nn.Module, d: nn.Module, g: nn.Module) -> Tensor:
    h = h + f(h)
    low = d(h)
    return nn.functional.interpolate(low + g(low), scale_factor=2.0) + h


def draw(h: Tensor, mean: nn.Module, deviation: nn.Module, noise: bool) -> Tensor:
    middle = mean(h)
    spread = torch.exp(deviation(h))
    return middle + (torch.randn_like(middle) * spread if noise else spread)


def position_for_one_reader(h: Tensor, f: nn.Module, k: nn.Module, g: nn.Module, o: nn.Module, go_on: bool) -> Tensor:
    h = h + f(h)
    t = k(h)
    h = h + g(h + t)
    return h + o(torch.cat([t + f(t) if go_on else f(t)] * 2, -1)[..., :WIDTH])


def coupled(h: Tensor, f: nn.Module, g: nn.Module) -> Tensor:
    a, b = h.chunk(2, -1)
    a = a + f(b)
    b = b + g(a)
    a = a + f(b)
    return torch.cat([a, b], -1)


def half() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH // 2, 16), nn.GELU(), nn.Linear(16, WIDTH // 2))


# rule or stage: (a network on which it decides, one on which it does not)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "subtracted skip": (
        lambda: Network(0, lambda h, f: f(h) - h, f=mlp()),
        lambda: Network(1, lambda h, f: h - f(h), f=mlp()),
    ),
    "cancels": (
        lambda: Network(0, lambda h, f: h + (f(h) - h), f=mlp()),
        lambda: Network(1, lambda h, f: h + (f(h) - 0.5 * h), f=mlp()),
    ),
    "one projection": (
        lambda: Network(0, lambda h, k: (y := k(h)) + y**3, k=linear()),
        lambda: Network(1, lambda h, k, f: k(h) + f(h), k=linear(), f=mlp()),
    ),
    "spread mean": (
        lambda: Network(0, lambda h, f: f(h - pooled(h)) + pooled(h), f=mlp()),
        lambda: Network(1, lambda h, f: f(h - pooled(h)) + h, f=mlp()),
    ),
    "an earlier sum again": (
        lambda: Network(2, down_and_up, image=True, f=conv_block(), d=conv(stride=2), g=conv_block()),
        lambda: Network(2, lambda h, f, g: (h + f(h)) + g(h), f=mlp(), g=mlp()),
    ),
    "mix of streams": (
        lambda: Network(1, mixed_streams, f=mlp(), a=Scale(), b=Scale()),
        lambda: Network(1, lambda h, f, a: a(h) + f(h), f=mlp(), a=Scale()),
    ),
    "factor on both": (
        lambda: Network(0, lambda h, a, b: a(h) + b(pooled(h)), a=Scale(), b=Scale()),
        lambda: Network(1, lambda h, b: h + b(pooled(h)), b=Scale()),
    ),
    "nothing learned": (
        lambda: Network(0, lambda h: h + pooled(h)),
        lambda: Network(1, lambda h, n: h + n(h), n=nn.LayerNorm(WIDTH)),
    ),
    "heads added up": (lambda: TwoHeads(0, third=True), lambda: TwoHeads(1, third=False)),
    "one kernel": (
        lambda: Network(0, lambda h, a, b: a(h) + b(h) + h, image=True, a=conv(3), b=conv(1)),
        lambda: Network(1, lambda h, a, b: a(h).relu() + b(h) + h, image=True, a=conv(3), b=conv(1)),
    ),
    "no deeper than its skip": (
        lambda: Network(0, lambda h, a, b: a(h) + b(h), image=True, a=conv(1), b=conv(3)),
        lambda: Network(1, lambda h, a, b, c: a(h) + c(b(h).relu()), image=True, a=conv(1), b=conv(3), c=conv(3)),
    ),
    "random draw": (
        lambda: Network(0, lambda h, m, d: draw(h, m, d, noise=True), m=linear(), d=linear()),
        lambda: Network(1, lambda h, m, d: draw(h, m, d, noise=False), m=linear(), d=linear()),
    ),
    "down and up again": (
        lambda: Network(
            0,
            lambda h, a, b, u: h + u(b(a(h).relu()).relu()),
            True,
            a=conv(stride=2),
            b=conv(),
            u=nn.Upsample(scale_factor=2),
        ),
        lambda: Network(1, lambda h, f: h + f(h), image=True, f=Resized()),
    ),
    "gated update": (
        lambda: Network(0, lambda h, f, t: (h + f(h)) * torch.sigmoid(t(h)), f=mlp(), t=linear()),
        lambda: Network(1, lambda h, f, t: (s := h + f(h)) * torch.sigmoid(t(s)), f=mlp(), t=linear()),
    ),
    "without summands": (
        lambda: Network(1, lambda h, n, k, f: (k(n(h)) + f(n(h))) + h, n=nn.LayerNorm(WIDTH), k=linear(), f=mlp()),
        lambda: Network(2, lambda h, k, f, o: o((k(h) + f(h)).relu()) + h, k=linear(), f=mlp(), o=linear()),
    ),
    "without inner arithmetic": (
        lambda: Network(
            1, lambda h, i, f, d, o: h + o(f(u := i(h)) + d(u)), i=linear(), f=mlp(), d=Scale(), o=linear()
        ),
        lambda: Network(1, lambda h, f, d: f(h) + d(h), f=mlp(), d=Scale()),
    ),
    "factors on a stream": (
        lambda: Network(1, lambda h, s: h + s(pooled(h)), s=Scale()),
        lambda: Network(1, lambda h, i, s, o: h + o((u := i(h)) + s(pooled(u))), i=linear(), s=Scale(), o=linear()),
    ),
    "without sums of streams": (
        lambda: Network(
            4,
            lambda h, **p: position_for_one_reader(h, go_on=True, **p),
            f=mlp(),
            k=linear(),
            g=mlp(),
            o=nn.Linear(WIDTH, WIDTH),
        ),
        lambda: Network(
            4, lambda h, **p: position_for_one_reader(h, go_on=False, **p), f=mlp(), k=linear(), g=mlp(), o=linear()
        ),
    ),
    "couplings": (
        lambda: Network(3, coupled, f=half(), g=half()),
        lambda: Network(0, lambda h, f: f(h.chunk(2, -1)[0] + h.chunk(2, -1)[1]), f=nn.Linear(WIDTH // 2, WIDTH)),
    ),
}
