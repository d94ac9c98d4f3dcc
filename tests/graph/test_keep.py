"""What is put back after a forward."""

import random

import numpy
import pytest
import torch
from graphs import Everything

from lit_resinit.graph.keep import keep_rng, keep_state


def test_keep_rng_covers_torch_python_and_numpy() -> None:
    before = torch.rand(1), random.random(), numpy.random.rand()
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    with keep_rng():
        first = torch.rand(1), random.random(), numpy.random.rand()
    assert (torch.rand(1), random.random(), numpy.random.rand()) == first != before


def test_keep_state_survives_an_exception() -> None:
    model = Everything()

    def change() -> None:
        model.seen += 1
        model.calls = 7
        model.eval()
        model.conv.bn1.weight.grad = torch.ones(3)
        raise KeyError

    with pytest.raises(KeyError), keep_state(model):
        change()
    assert (float(model.seen), model.calls, model.training, model.conv.training) == (0.0, 0, True, True)
    assert model.conv.bn1.weight.grad is None
