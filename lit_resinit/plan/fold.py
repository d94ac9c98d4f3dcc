"""Fold inserted gates back into the weights before them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from lit_resinit.errors import FoldError
from lit_resinit.find.gates import inserted_name
from lit_resinit.graph.where import clean_name
from lit_resinit.plan.hooks import GateHook, detach, gate_hooks
from lit_resinit.plan.mark import forget_applied


def fold_(model: nn.Module) -> list[str]:
    """Multiply every inserted gate into the weights before it, and remove it.

    A layer ``W h + b`` followed by a gate ``g`` becomes ``(g W) h + g b``, so that the state dict loads into the plain
    model again.

    Args:
        model: A model with inserted gates, or a part of one.

    Returns:
        The names of the gates that were folded.

    Raises:
        FoldError: If one gate cannot be folded exactly; nothing is changed then.

    Example:
        >>> import torch
        >>> from lit_resinit import apply_, make_plan
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> _ = apply_(layer, make_plan(layer, torch.randn(2, 3, 8)))
        >>> fold_(layer)
        ['self_attn.residual_gate', 'linear2.residual_gate']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected argument `model` to be a torch.nn.Module but got {type(model).__name__}")
    parameters = {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    uses = Counter(id(parameter) for parameter in parameters.values())
    found = [(clean_name(n), m, key, hook) for n, m in model.named_modules() for key, hook in gate_hooks(m)]
    targets = [_fold_targets(name, hook, parameters, uses) for name, _, _, hook in found]
    names = []
    with torch.no_grad():
        for (name, module, key, hook), weights in zip(found, targets, strict=True):
            gate = module._parameters.pop(inserted_name(hook.leaf))
            assert gate is not None
            for parameter, value in weights:
                parameter.sub_(value).mul_(gate.to(parameter.dtype)).add_(value)
            detach(module, key)
            names.append(f"{name}.{inserted_name(hook.leaf)}".lstrip("."))
    if names:
        forget_applied(model)
    return names


def _fold_targets(
    name: str, hook: GateHook, parameters: Mapping[str, nn.Parameter], uses: Mapping[int, int]
) -> list[tuple[nn.Parameter, float]]:
    prefix = len(hook.module) - len(name) if hook.module.endswith(name) else 0
    targets = [(key[prefix:], value) for key, value in hook.folds_into]
    shared = [key for key, _ in targets if key in parameters and uses[id(parameters[key])] > 1]
    missing = [key for key, _ in targets if key not in parameters]
    if not targets or shared or missing:
        why = (
            f"{shared[0]} is used elsewhere too"
            if shared
            else f"{missing[0]} is gone"
            if missing
            else ("the module does not end in a layer whose output it multiplies directly")
        )
        raise FoldError(
            f"folding the gate on {name}: expected weights before it that can take its value exactly, but {why}. Keep "
            "the gate, or leave that branch out. Nothing was changed."
        )
    return [(parameters[key], value) for key, value in targets]
