"""What is put back after a forward that nobody is to notice: generators, buffers, gradients, attributes."""

from __future__ import annotations

import collections
import contextlib
import gc
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# Parameters, buffers, sub-modules and hooks of a module lie in such containers too.
_CONTAINERS = (dict, collections.OrderedDict, list, set)

_ALL_ONES = 0x12DD9BB3  # what a Mersenne Twister holds where it gives 32 ones


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Leave garbage for later: a graph is many objects, none of it garbage, and looking takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def cast_lots(lot: float) -> None:
    """Let the next few hundred draws of Python's and numpy's generators all be zero, or all be nearly one."""
    words = [_ALL_ONES if lot else 0] * 623 + [1]  # the last one ends it: a loop may wait for another draw
    random.setstate((3, (*words, 0), None))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.set_state(("MT19937", numpy.array(words, dtype=numpy.uint32), 0))


@contextlib.contextmanager
def keep_rng() -> Iterator[None]:
    """Put every random number generator back afterwards: torch, Python and, where it is loaded, numpy."""
    state, python = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    array = numpy.random.get_state() if numpy is not None else None
    device = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(array)
        if device:
            torch.cuda.set_rng_state_all(device)


@contextlib.contextmanager
def keep_state(model: nn.Module) -> Iterator[None]:
    """Put buffers, gradients, training flags and attributes of every module back, with what is in their containers."""
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    grads = [(p, p.grad) for p in model.parameters()]
    attributes = [(vars(m), dict(vars(m))) for m in model.modules()]
    containers = {id(v): (v, v.copy()) for _, own in attributes for v in own.values() if type(v) in _CONTAINERS}
    try:
        yield
    finally:
        for current, own in attributes:
            current.clear()
            current.update(own)
        for current, content in containers.values():
            current.clear()
            current.extend(content) if isinstance(current, list) else current.update(content)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, grad in grads:
            parameter.grad = grad


def host_random_state() -> tuple[Any, ...]:
    """Where the generators of Python and, where it is loaded, numpy stand."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    _, words, *rest = numpy.random.get_state()
    return random.getstate(), (words.tobytes(), *rest)
