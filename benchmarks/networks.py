"""Residual networks that several benchmarks time, and the steps of their training."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class GatedBlock(nn.Module):
    """``x + g * W2 relu(W1 x)`` with a scalar gate ``g = 0``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.down(self.up(x).relu())


class Training:
    """A network, one batch, and plain steps on it."""

    def __init__(self, name: str, net: nn.Module, x: Tensor, classes: int = 10) -> None:
        self.name, self.net, self.x = name, net, x
        self.y = torch.randint(classes, (len(x),))
        self.optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def loss(self) -> Tensor:
        return cross_entropy(self.net(self.x), self.y)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    @torch.no_grad()
    def forward(self) -> None:
        self.net(self.x)


def mlp(blocks: int, width: int = 256, batch: int = 256) -> Training:
    """Residual blocks of two linear layers each, and a head."""
    torch.manual_seed(0)
    net = nn.Sequential(*(GatedBlock(width) for _ in range(blocks)), nn.Linear(width, 10))
    return Training(f"{blocks}-block MLP, width {width}, batch {batch}", net, torch.randn(batch, width))


def resnet50(size: int = 64, batch: int = 16) -> Training:
    """Torchvision's ResNet-50 on small images."""
    from torchvision.models import resnet50 as build

    torch.manual_seed(0)
    images = torch.randn(batch, 3, size, size)
    return Training(f"ResNet-50, {size} px, batch {batch}", build(num_classes=10), images)
