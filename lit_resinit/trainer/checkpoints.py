"""Checkpoints of a run with inserted scalars: the plain network's state dict, and what a resume needs beside it.

Lightning calls a module's own ``on_save_checkpoint`` last, after every callback, also for files of weights only, and
its ``on_load_checkpoint`` first, before the weights are loaded; so both are wrapped, on the one module that is trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit.errors import FoldError
from lit_resinit.graph.tensors import is_sharded
from lit_resinit.graph.where import clean_name
from lit_resinit.plan.hooks import inserted_gates, lend_method, method_before
from lit_resinit.plan.mark import is_inserted, mark_of
from lit_resinit.plan.states import BEFORE, Folding, fold_state, folded_state, hang_plain_states, unfold_state
from lit_resinit.words import together


def keep_plain(module: Any) -> None:
    """From now on checkpoints of this module hold the plain network's weights, where it has inserted scalars."""
    if not any(True for _ in inserted_gates(module)):
        return
    lend_method(module, on_save_checkpoint)
    lend_method(module, on_load_checkpoint)
    hang_plain_states(module).active = False


def end_training(module: Any) -> None:
    """From now on the module's state dict is the plain network's too, for packages that save it themselves."""
    if any(True for _ in inserted_gates(module)):
        hang_plain_states(module).active = True


def on_save_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
    """Fold first, so that the user's own hook meets the plain network, as it does without this package."""
    full = "callbacks" in checkpoint
    checkpoint["state_dict"], before = folded_state(self, checkpoint["state_dict"], keep=full)
    notes = getattr(checkpoint["state_dict"], "_metadata", {})
    if not before:  # after a training the module folds by itself
        before = notes.get("", {}).get(BEFORE, {})
        for note in notes.values() if not full else ():
            note.update({BEFORE: {}} if BEFORE in note else {})
    state = state_of_ours(checkpoint)
    if state is not None and not before and not notes:
        before = _replaced(self)  # sharded strategies hand on no metadata; every rank comes here
    if state is not None and before:
        state[BEFORE] = before
    method_before(self, "on_save_checkpoint")(checkpoint)


def _replaced(module: nn.Module) -> dict[str, Tensor]:
    """What the module's own folding replaces in its state dict now."""
    states = hang_plain_states(module)
    active, states.active = states.active, False
    try:
        return folded_state(module, module.state_dict())[1]
    finally:
        states.active = active


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


def expect_plain(trainer: Any, module: nn.Module) -> None:
    """Let a strategy that loads after sharding, key by key, load files that do not have the scalars.

    What it calls to read a checkpoint is wrapped until :func:`expect_nothing`.
    """
    strategy = trainer.strategy
    if not strategy.restore_checkpoint_after_setup or not any(True for _ in inserted_gates(module)):
        return
    load = strategy.load_checkpoint

    def load_checkpoint(path: Any, *rest: Any, **options: Any) -> Any:
        for part in module.modules():
            mark = mark_of(part)
            if mark is not None:
                mark.moved = True  # scalars that the file does not have become one, until what was folded is put back
        with _plain_file(module) if _lacks_scalars(path, module) else contextlib.nullcontext():
            return load(path, *rest, **options)

    vars(strategy)["load_checkpoint"] = load_checkpoint


def expect_nothing(trainer: Any) -> None:
    """The strategy reads checkpoints as before."""
    vars(trainer.strategy).pop("load_checkpoint", None)


def _lacks_scalars(path: Any, module: nn.Module) -> bool:
    """Whether a file, or a folder of shards, has everything of this module but its inserted scalars."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        if Path(path).is_dir():
            stored = {
                key.removeprefix("state_dict.") for key in FileSystemReader(path).read_metadata().state_dict_metadata
            }
        else:
            stored = set(torch.load(path, mmap=True, map_location="meta", weights_only=True)["state_dict"])
    except Exception:  # whoever reads it after us says what is wrong
        return False
    lacking = module.state_dict().keys() - stored
    return bool(lacking) and all(is_inserted(key) for key in lacking)


@contextlib.contextmanager
def _plain_file(module: Any) -> Iterator[None]:
    """Inside, scalars are no part of the state dict, nobody asks for them, and they become one."""

    def hide(_: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in [k for k in state if is_inserted(k)]:
            del state[key]

    handle, strict = module._register_state_dict_hook(hide), module._strict_loading
    module.strict_loading = False
    try:
        yield
        with torch.no_grad():
            for _, parameter in (n for n in module.named_parameters() if is_inserted(n[0])):
                parameter.fill_(1.0)
    finally:
        handle.remove()
        module._strict_loading = strict


def state_of_ours(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """The state of ResidualInit in a checkpoint."""
    states = checkpoint.get("callbacks")
    for state in states.values() if isinstance(states, dict) else ():
        if isinstance(state, dict) and {"closed", "history"} <= set(state):
            return state
    return None


def fold_checkpoint(checkpoint: dict[str, Any], name: object) -> tuple[list[str], list[str]]:
    """Fold, in place, a checkpoint that has inserted scalars in its state dict, as older versions wrote them.

    Args:
        checkpoint: The checkpoint; its optimizer states stay as they are, so that the run still resumes.
        name: What the checkpoint is called in messages.

    Returns:
        The scalars that were folded, and those that cannot be.

    Raises:
        FoldError: If the checkpoint does not say into which weights its scalars fold.
    """
    state = checkpoint.get("state_dict")
    if not isinstance(state, dict):
        raise FoldError(
            f"folding {name}: expected a checkpoint with a `state_dict`, found keys {sorted(checkpoint)[:5]}."
        )
    gates = [key for key in state if is_inserted(key)]
    ours = state_of_ours(checkpoint) or {}
    folds = ours.get("folds") or {}
    unknown = [key for key in gates if clean_name(key) not in folds and not _alias(state, key, gates, folds)]
    if unknown:
        raise FoldError(
            f"folding {name}: expected the state of ResidualInit to say into which weights {len(gates)} inserted "
            f"scalars fold, found nothing of {together(unknown)}. A file of weights only does not know it: load it "
            "with `Trainer.validate(..., ckpt_path=...)` and the callback, or fold another checkpoint of that run."
        )
    todo = [_folding(state, key, folds[clean_name(key)]) for key in gates if clean_name(key) in folds]
    checkpoint["state_dict"], before = fold_state(state, todo)
    if before and ours:
        ours[BEFORE] = before
    kept = [key for key in gates if key in checkpoint["state_dict"]]
    return [key for key in gates if key not in kept], kept


def _folding(state: Mapping[str, Any], gate: str, folds: Any) -> Folding:
    raw = {clean_name(key): key for key in state}
    into = tuple((tuple(_same(state, raw[n])), float(value)) for n, value in folds if n in raw)
    return Folding(tuple(_same(state, gate)), into, "" if len(into) == len(folds) and folds else "its weights are gone")


def _alias(state: Mapping[str, Any], key: str, gates: list[str], folds: Mapping[str, Any]) -> bool:
    return any(other in gates and clean_name(other) in folds for other in _same(state, key))


def _same(state: Mapping[str, Any], key: str) -> list[str]:
    """The keys of one tensor, the given one first: a module may have several names."""
    own = state[key]
    others = [k for k, v in state.items() if k != key and isinstance(v, Tensor) and _is_same(v, own)]
    return [key, *others]


def _is_same(left: Tensor, right: Tensor) -> bool:
    return left.numel() > 0 and left.shape == right.shape and left.data_ptr() == right.data_ptr()


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
