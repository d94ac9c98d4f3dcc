"""Graphs of one small function."""

import random
from collections.abc import Callable

import numpy
import torch
from networks import WIDTH, ConvBlock
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lit_resinit.graph.trace import trace
from lit_resinit.graph.values import Graph, Node

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def graph_of(function: Callable[[Tensor, nn.Parameter], Tensor]) -> Graph:
    """The graph of a module that runs one function of its input and of its weight."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return function(x, self.weight)

    return trace(Net(), (X,))


def result(graph: Graph) -> Node:
    """The node that the top module returned."""
    return graph.nodes[graph.outputs[-1].nodes[0]]


class Everything(nn.Module):
    """All that a forward can change: buffers, a metric, a counter, flags, random numbers."""

    def __init__(self, look: bool = False) -> None:
        super().__init__()
        self.conv, self.drop = ConvBlock(3, 3), nn.Dropout(0.5)
        self.metric, self.calls, self.cache, self.look = MeanMetric(), 0, [], look
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.cache = [*self.cache, 1]
        random.random()
        numpy.random.rand()
        x = self.drop(self.conv(x))
        self.metric.update(x.detach().mean())
        if self.look and x.mean() > 1e9:
            return x
        return x
