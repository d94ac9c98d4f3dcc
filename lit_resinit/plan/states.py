"""State dicts of a network with inserted scalars, as its plain network has them, and back again.

A layer ``W h + b`` followed by a scalar ``g`` is ``(g W) h + g b``: with the scalars multiplied in, the state dict has
the plain network's keys and computes the same to rounding.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit.find.gates import inserted_name
from lit_resinit.graph.tensors import is_sharded, whole
from lit_resinit.graph.where import clean_name
from lit_resinit.plan.hooks import GateHook, gate_hooks

BEFORE = "before_folding"  # scalars and weights as the network has them, beside a state dict in which they are folded


@dataclasses.dataclass(frozen=True, slots=True)
class Folding:
    """An inserted scalar and the weights that can take its value, by their keys in the state dict.

    Args:
        keys: The keys of the scalar: one, or as many as its module has names.
        into: For each parameter all keys that it has, and the value at which its factor is zero.
        why_not: In words, why it cannot be folded exactly; "" where it can.
    """

    keys: tuple[str, ...]
    into: tuple[tuple[tuple[str, ...], float], ...]
    why_not: str = ""

    @property
    def gate(self) -> str:
        """The scalar's first name."""
        return self.keys[0]


def foldings(model: nn.Module) -> Iterator[tuple[nn.Module, int, Folding]]:
    """(module, key of its hook, folding) of every inserted scalar of a model, in the order of its modules."""
    slots = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    keys: dict[int, list[str]] = defaultdict(list)
    named: dict[str, nn.Parameter] = {}
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        keys[id(parameter)].append(raw)
        named[clean_name(raw)] = parameter
    for name, module in model.named_modules():
        for key, hook in gate_hooks(module):
            gates = keys[id(module.get_parameter(inserted_name(hook.leaf)))]
            targets = [(_seen_from(clean_name(name), hook, target), value) for target, value in hook.folds_into]
            why_not = _obstacle([n for n, _ in targets], named, slots)
            into = () if why_not else tuple((tuple(keys[id(named[n])]), value) for n, value in targets)
            yield module, key, Folding(tuple(gates), into, why_not)


def _seen_from(name: str, hook: GateHook, target: str) -> str:
    """The name of a parameter for a module that is called otherwise here than when its gate was inserted."""
    start, goal = hook.module.split("."), target.split(".")
    shared = 0
    while shared < min(len(start), len(goal) - 1) and start[shared] == goal[shared]:
        shared += 1
    here = name.split(".") if name else []
    return ".".join([*here[: max(0, len(here) - (len(start) - shared))], *goal[shared:]])


def _obstacle(targets: list[str], named: Mapping[str, nn.Parameter], slots: Mapping[int, int]) -> str:
    if not targets:
        return "the module does not end in a layer whose output it multiplies directly"
    for name in targets:
        if name not in named:
            return f"{name} is gone"
        if slots[id(named[name])] > 1:
            return f"{name} is used elsewhere too"
    return ""


def folded_state(
    model: nn.Module, state: Mapping[str, Any], *, keep: bool = True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A state dict of this model as its plain network has it, and what was replaced, by clean names.

    The values may be other than the model's (an average over the training). Scalars that cannot be folded exactly keep
    their keys. Of a sharded state every rank has to come here.

    Args:
        model: The model.
        state: The state dict, which is left as it is.
        keep: Whether the metadata of the new one hold what was replaced, so that a model with these scalars loads it
            bit for bit.
    """
    folded, before = fold_state(state, [folding for _, _, folding in foldings(model)])
    if before:
        notes: dict[str, Any] = vars(folded).setdefault("_metadata", OrderedDict())
        for name, module in model.named_modules():
            if any(True for _ in _below(module)):
                start = f"{clean_name(name)}." if name else ""
                own = {n.removeprefix(start): v for n, v in before.items() if n.startswith(start)}
                notes[name] = {**notes.get(name, {}), BEFORE: own if keep else {}}
    return folded, before


def _below(module: nn.Module) -> Iterator[GateHook]:
    for part in module.modules():
        yield from (hook for _, hook in gate_hooks(part))


def fold_state(state: Mapping[str, Any], todo: list[Folding]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A state dict with some scalars multiplied into the weights before them, and what was replaced, by clean names."""
    folded, before = OrderedDict(state), dict[str, Tensor]()
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        vars(folded)["_metadata"] = OrderedDict((key, dict(value)) for key, value in metadata.items())
    for folding in todo:
        wanted = [key for keys, _ in folding.into for key in keys]
        if folding.why_not or any(key not in state for key in (*folding.keys, *wanted)):
            continue
        gate = folded[folding.gate]
        for key in folding.keys:
            del folded[key]
        before |= dict.fromkeys(map(clean_name, folding.keys), whole(gate))
        for keys, value in folding.into:
            weight = folded[keys[0]]
            before = {clean_name(key): whole(folded[key]) for key in keys} | before
            folded |= dict.fromkeys(keys, multiplied(weight, value, gate))
    return folded, before


def unfold_state(
    model: nn.Module, state: MutableMapping[str, Any], before: Mapping[str, Any], prefix: str = "", *, ones: bool
) -> None:
    """Give a plain state dict, in place, the scalars that this model has.

    Args:
        model: The model that is to load it.
        state: The state dict.
        before: What :func:`folded_state` replaced. It is put back where folding it gives what the state dict holds: a
            weight that was changed since is loaded as it is, with its scalar at one.
        prefix: What stands before the model's names in the state dict.
        ones: Whether scalars of which nothing is known become one, which changes nothing.
    """
    for module, _, folding in foldings(model):
        gate = prefix + folding.gate
        if gate in state or not _holds_weights(state, folding, prefix):
            continue
        known = _known(state, before, folding, prefix)
        if known is not None:
            state.update(known)
        elif before or ones:
            one = torch.ones_like(module.get_parameter(folding.gate.rpartition(".")[2]).detach())
            state.update((prefix + key, one) for key in folding.keys)


def _holds_weights(state: Mapping[str, Any], folding: Folding, prefix: str) -> bool:
    """Whether a state dict has the weights before a scalar; one of a part of the network may not."""
    place = prefix + folding.gate.rpartition(".")[0] + "."
    wanted = [prefix + key for keys, _ in folding.into for key in keys]
    return all(key in state for key in wanted) if wanted else any(key.startswith(place) for key in state)


def _known(
    state: Mapping[str, Any], before: Mapping[str, Any], folding: Folding, prefix: str
) -> dict[str, Tensor] | None:
    """Scalar and weights as they were, if they are what the state dict was made of."""
    gate = before.get(clean_name(folding.gate))
    if not isinstance(gate, Tensor) or gate.numel() != 1:
        return None
    found = {prefix + key: gate for key in folding.keys}
    for keys, value in folding.into:
        for key in keys:
            old, new = before.get(clean_name(key)), state.get(prefix + key)
            if not isinstance(old, Tensor) or not isinstance(new, Tensor) or old.shape != new.shape:
                return None
            if not _equal(multiplied(old.to(new.device), value, gate), new):
                return None
            found[prefix + key] = old
    return found


@torch.no_grad()
def multiplied(weight: Tensor, value: float, gate: Tensor) -> Tensor:
    """The weight, as far as it is from the value at which its factor is zero, times the scalar."""
    factor = whole(gate).to(weight.dtype).reshape(())
    moved = weight if value == 0.0 else weight - value
    scaled = moved * float(factor) if is_sharded(weight) else moved * factor.to(weight.device)
    return scaled if value == 0.0 else scaled + value


def _equal(left: Tensor, right: Tensor) -> bool:
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


# -------------------------------------------------------------------- outside of a training


@dataclasses.dataclass(slots=True, eq=False)
class PlainStates:
    """State dict hook: whoever asks a module itself for its state dict gets the plain network's, but in a training.

    One of these hangs on every module that has inserted scalars, or has them below it, so that it can be told to all
    at once when a training begins and ends. A module that has the scalars loads such a state dict bit for bit.

    Args:
        active: Whether state dicts are folded now.
    """

    __module__ = "lit_resinit"  # a pickle names no room

    active: bool = False

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Fold, in place, where this is the module that was asked."""
        if not self.active or prefix:
            return
        folded, before = folded_state(module, state)
        if before:
            state.clear()
            state.update(folded)
            vars(state)["_metadata"] = vars(folded)["_metadata"]

    def load(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
        """A part of the network takes such a state dict too."""
        if not prefix:
            unfold_state(module, state, metadata.get(BEFORE) or {}, ones=True)


def hang_plain_states(model: nn.Module) -> PlainStates:
    """The hook of a model, which is hung up where that was not done yet."""
    for _, hook in _plain_states(model):
        return hook
    hook = PlainStates()
    for module in model.modules():
        if any(True for _ in _below(module)):
            module._register_state_dict_hook(hook)
            module.register_load_state_dict_pre_hook(hook.load)
    return hook


def take_down_plain_states(model: nn.Module) -> None:
    """Remove the hook."""
    for module, _ in list(_plain_states(model)):
        hooks = module._state_dict_hooks
        for key in [k for k, hook in hooks.items() if isinstance(hook, PlainStates)]:
            del hooks[key]
        loading = module._load_state_dict_pre_hooks
        for key in [k for k, hook in loading.items() if isinstance(_owner(hook), PlainStates)]:
            del loading[key]


def _owner(hook: Any) -> Any:
    return getattr(getattr(hook, "hook", hook), "__self__", None)


def _plain_states(model: nn.Module) -> Iterator[tuple[nn.Module, PlainStates]]:
    for module in model.modules():
        yield from ((module, hook) for hook in module._state_dict_hooks.values() if isinstance(hook, PlainStates))
