"""Each of these networks is decided by one rule of the finder alone."""

import pytest
import torch
from networks import WIDTH
from one_rule_each import NETWORKS
from torch import nn

from lit_resinit.find.branches import find_additions
from lit_resinit.graph.trace import trace


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.rule.replace(" ", "-"))
def test_number_of_residual_additions(network: type[nn.Module]) -> None:
    graph = trace(network(), (torch.randn(2, WIDTH),))
    assert len(find_additions(graph)) == network.additions
