"""Networks on which one rule of the finder decides that others do not; each says how many additions it has."""

from __future__ import annotations

import torch
from networks import WIDTH, mlp
from torch import Tensor, nn


class LinearBesideMlp(nn.Module):
    """``(linear(n) + mlp(n)) + x``: one branch with two summands, no projection inside it."""

    rule, additions = "summands", 1

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), mlp()

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return (self.linear(n) + self.mlp(n)) + x


class MeanAndDeviation(nn.Module):
    """``mean + noise * exp(log_deviation)`` with two heads is a random draw, no residual."""

    rule, additions = "random draw", 0

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(), mlp()
        self.mean, self.log_deviation = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        mean = self.mean(h)
        return self.decoder(mean + torch.randn_like(mean) * torch.exp(self.log_deviation(h)))


class DirectTerm(nn.Module):
    """``x + out(f(u) + u * d)``: the direct term of a state-space layer is arithmetic of the branch."""

    rule, additions = "inner arithmetic", 1

    def __init__(self) -> None:
        super().__init__()
        self.into, self.f, self.out = nn.Linear(WIDTH, WIDTH), mlp(), nn.Linear(WIDTH, WIDTH)
        self.direct = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        u = self.into(x)
        return x + self.out(self.f(u) + u * self.direct)


class PartsPutTogether(nn.Module):
    """``cat(a, b) + f(x)`` with ``a, b = x.chunk(2)``: the concatenation is the stream itself."""

    rule, additions = "concatenation", 1

    def __init__(self) -> None:
        super().__init__()
        self.f = mlp()

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a, b], -1) + self.f(x)


class GatedSum(nn.Module):
    """``(x + f(x)) * sigmoid(t(x))``: a gated update, whose sum no stream goes on from."""

    rule, additions = "blend", 0

    def __init__(self) -> None:
        super().__init__()
        self.f, self.t = mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.f(x)) * torch.sigmoid(self.t(x))


NETWORKS = (LinearBesideMlp, MeanAndDeviation, DirectTerm, PartsPutTogether, GatedSum)
