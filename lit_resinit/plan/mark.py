"""The mark that an applied plan leaves on a model, and what explains a state dict that does not fit it."""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit.errors import CheckpointError
from lit_resinit.find.gates import INSERTED_NAME
from lit_resinit.graph.where import clean_name
from lit_resinit.plan.hooks import GateHook, insert_gate, inserted_gates, take_back_methods
from lit_resinit.plan.states import BEFORE, take_down_plain_states, unfold_state
from lit_resinit.plan.values import ResidualPlan
from lit_resinit.words import together

_MARK = "_residual_plan"
_INSERTED = re.compile(rf"(?:(.*)\.)?{INSERTED_NAME}(?:_(\d+))?$")
_folded: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclasses.dataclass(slots=True)
class Applied:
    """The mark of an applied plan, kept on the model itself, so that its copies and pickles have it too.

    ``moved``: training, or a loaded state dict, has opened the gates, so there is no identity to prove any more.
    """

    __module__ = "lit_resinit"  # a pickle names no room

    plan: ResidualPlan
    moved: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Applied:
        """A plan is a value; only the mark is copied."""
        return Applied(self.plan, self.moved)


def mark_applied(model: nn.Module, plan: ResidualPlan, *, moved: bool = False) -> Applied:
    """Note on the model that this plan was applied to it."""
    if mark_of(model) is None:
        model.register_load_state_dict_pre_hook(LoadHook())
    mark = vars(model)[_MARK] = Applied(plan, moved)
    return mark


def applied_plan(model: nn.Module) -> tuple[str, Applied] | None:
    """(dotted name, mark) of the module in ``model`` that a plan was applied to, while its gates are there."""
    for name, module in model.named_modules():
        mark = mark_of(module)
        if mark is not None:
            there = {clean_name(n) for n, _ in module.named_parameters(remove_duplicate=False)}
            return (clean_name(name), mark) if {g.parameter for g in mark.plan.gates} <= there else None
    return None


def was_closed(model: nn.Module) -> bool:
    """Whether gates were inserted into this model before, or inserted and folded away in this process."""
    return any(True for _ in inserted_gates(model)) or any(m in _folded for m in model.modules())


def forget_applied(model: nn.Module) -> None:
    """Remove every mark, so that the model is the plain one again; this process still knows that it was closed."""
    _folded.add(model)
    take_down_plain_states(model)
    for module in model.modules():
        vars(module).pop(_MARK, None)
        take_back_methods(module)
        hooks = module._load_state_dict_pre_hooks
        for key in [k for k, h in hooks.items() if isinstance(getattr(h, "hook", h), LoadHook)]:
            del hooks[key]


def mark_of(module: nn.Module) -> Applied | None:
    """The mark on this very module, if a plan was applied to it."""
    mark: Applied | None = vars(module).get(_MARK)
    return mark


# -------------------------------------------------------------------- loading


@dataclasses.dataclass(slots=True)
class LoadHook:
    """State dict pre-hook: says what inserted gates that only one side has mean, or inserts them.

    A state dict in which the gates are folded is loaded as it was before, where that is known, and else with gates of
    one.

    Args:
        inserts: Insert the gates that the state dict has and the model does not.
    """

    __module__ = "lit_resinit"

    inserts: bool = False

    def __call__(
        self,
        module: nn.Module,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Compare the gates of the model with those of the state dict."""
        marks = [mark for part in module.modules() if (mark := mark_of(part)) is not None]
        before = local_metadata.get(BEFORE)
        if self.inserts:
            self._insert(module, _stored(state_dict, prefix))
        plain = before is not None or any(mark.moved for mark in marks)
        unfold_state(module, state_dict, before or {}, prefix, ones=plain)
        stored, own = _stored(state_dict, prefix), [name for name, _ in inserted_gates(module)]
        strange, lost = sorted({*stored} - {*own}), sorted({*own} - {*stored})
        if strict and lost:
            error_msgs.append(_without_gates(lost, len(own)))
        if strict and strange:
            error_msgs.append(_with_gates(strange))
        if marks and any(bool(state_dict[prefix + name].any()) for name in stored):
            for mark in marks:
                mark.moved = True

    def _insert(self, module: nn.Module, stored: list[str]) -> None:
        modules = dict(module.named_modules())
        own = {name for name, _ in inserted_gates(module)}
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        for name in stored:
            found = _INSERTED.match(name)
            assert found is not None
            target = modules.get(found[1] or "")
            if name not in own and target is not None:
                insert_gate(target, GateHook(int(found[2] or 0), clean_name(found[1] or ""), ()), device)


def is_inserted(name: str) -> bool:
    """Whether a key of a state dict is that of an inserted scalar."""
    return _INSERTED.match(name) is not None


def _stored(state_dict: Mapping[str, Tensor], prefix: str) -> list[str]:
    return [k.removeprefix(prefix) for k in state_dict if k.startswith(prefix) and is_inserted(k)]


def _without_gates(lost: list[str], count: int) -> str:
    return str(
        CheckpointError(
            f"loading a state dict into a model with {count} inserted gates: expected each in it, found "
            f"{len(lost)} missing ({together(lost)}): it was saved without them. Gates of one change nothing, so add "
            "them: `state_dict |= {name: torch.ones(1) for name in gates}`; or load into the plain model, without "
            "ResidualInit or with scheme='observe'; or pass `strict=False` to load the weights behind closed gates."
        )
    )


def _with_gates(strange: list[str]) -> str:
    return str(
        CheckpointError(
            f"loading a state dict with inserted gates: expected them in the model too, found {len(strange)} that it "
            f"does not have ({together(strange)}). Insert them first, with the scheme they were saved with, or "
            "multiply them into the weights before saving: `fold_(model)`, and the state dict is the plain model's."
        )
    )
