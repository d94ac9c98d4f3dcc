"""Outputs of the network that its closed branches leave the same for every batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from lit_resinit.find.constant import closed_off
from lit_resinit.graph.record import Recorder
from lit_resinit.graph.tensors import local
from lit_resinit.plan.values import ResidualPlan


def silenced(recorder: Recorder, plan: ResidualPlan, parameters: Mapping[str, Tensor], output: Any) -> tuple[str, ...]:
    """The outputs that a plan's gates make the same for every batch, of a forward recorded as a whole."""
    gates = {g.parameter for b in plan.active if b.action != "observe" for g in b.gates}
    nodes = [(name, recorder.memory.find(tensor)) for name, tensor in _named_tensors(output)]
    known = [(name, node) for name, node in nodes if node is not None]
    found = closed_off(recorder.graph, parameters, gates, [node for _, node in known])
    return tuple(name for name, node in known if node in found)


def may_be_silenced(output: Any) -> bool:
    """Whether one of the outputs does not differ between samples, or is of a single one."""
    return any(_may_be_constant(tensor) for _, tensor in _named_tensors(output))


def _named_tensors(output: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output, and those that plain objects in it hold, by the way to them."""
    for path, leaf in tree_flatten_with_path(output)[0]:
        if isinstance(leaf, Tensor):
            yield keystr(path) or "the output", leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type):
            yield from ((f"{keystr(path)}.{n}", v) for n, v in vars(leaf).items() if isinstance(v, Tensor))


def _may_be_constant(tensor: Tensor) -> bool:
    """Whether a result is the same for every sample, or of a single one; what is a single number is a loss."""
    values = local(tensor)
    if values.ndim == 0 or values.numel() < 2 or not values.is_floating_point() or values.is_meta or values.is_nested:
        return False
    return bool((values == values[:1]).all())
