"""Checkpoints of a run with inserted scalars: the plain network's state dict, and what a resume needs beside it.

Lightning calls a module's own ``on_save_checkpoint`` last, after every callback, also for files of weights only, and
its ``on_load_checkpoint`` first, before the weights are loaded; so both are wrapped, on the one module that is trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit.graph.tensors import is_sharded
from lit_resinit.graph.where import clean_name
from lit_resinit.plan.hooks import inserted_gates, lend_method, method_before
from lit_resinit.plan.states import BEFORE, folded_state, unfold_state


def keep_plain(module: Any) -> None:
    """From now on checkpoints of this module hold the plain network's weights, where it has inserted scalars."""
    if not any(True for _ in inserted_gates(module)):
        return
    lend_method(module, on_save_checkpoint)
    lend_method(module, on_load_checkpoint)


def on_save_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
    """Fold first, so that the user's own hook meets the plain network, as it does without this package."""
    full = "callbacks" in checkpoint
    checkpoint["state_dict"], before = folded_state(self, checkpoint["state_dict"], keep=full)
    state = state_of_ours(checkpoint)
    if state is not None and before:
        state[BEFORE] = before
    method_before(self, "on_save_checkpoint")(checkpoint)


def on_load_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
    """The user's own hook first; then what was folded is put back."""
    method_before(self, "on_load_checkpoint")(checkpoint)
    state = state_of_ours(checkpoint)
    before = state.get(BEFORE) if state is not None else None
    if not isinstance(before, dict):
        return
    if "state_dict" in checkpoint:
        unfold_state(self, checkpoint["state_dict"], before, ones=False)
    else:
        _write(self, before)


def state_of_ours(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """The state of ResidualInit in a checkpoint."""
    states = checkpoint.get("callbacks")
    for state in states.values() if isinstance(states, dict) else ():
        if isinstance(state, dict) and {"closed", "history"} <= set(state):
            return state
    return None


def learn_folds(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Tell gates that came with a checkpoint into which weights they fold."""
    state = state_of_ours(checkpoint) or {}
    folds = state.get("folds")
    for name, hook in inserted_gates(module):
        if isinstance(folds, dict) and not hook.folds_into and name in folds:
            hook.folds_into = tuple((str(n), float(v)) for n, v in folds[name])


@torch.no_grad()
def _write(module: nn.Module, before: dict[str, Tensor]) -> None:
    """What a sharded strategy has loaded already is overwritten by what was folded."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = before.get(clean_name(name))
        if isinstance(value, Tensor):
            parameter.copy_(_sharded_like(parameter, value))


def _sharded_like(parameter: Any, value: Tensor) -> Tensor:
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
