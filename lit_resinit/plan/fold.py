"""Fold inserted gates back into the weights before them."""

from __future__ import annotations

import torch
from torch import nn

from lit_resinit.errors import FoldError
from lit_resinit.graph.where import clean_name
from lit_resinit.plan.hooks import detach
from lit_resinit.plan.mark import forget_applied
from lit_resinit.plan.states import foldings, multiplied


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
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = list(foldings(model))
    stuck = next((folding for _, _, folding in found if folding.why_not), None)
    if stuck is not None:
        raise FoldError(
            f"folding the gate on {clean_name(stuck.gate.rpartition('.')[0])}: expected weights before it that can "
            f"take its value exactly, but {stuck.why_not}. Keep the gate, or leave that branch out. Nothing was "
            "changed."
        )
    with torch.no_grad():
        for module, key, folding in found:
            gate = module._parameters.pop(folding.gate.rpartition(".")[2])
            assert gate is not None
            for keys, value in folding.into:
                weight = parameters[keys[0]]
                weight.copy_(multiplied(weight, value, gate))
            detach(module, key)
    if found:
        forget_applied(model)
    return [clean_name(folding.gate) for _, _, folding in found]
