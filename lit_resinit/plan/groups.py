"""Parameter groups for an optimizer: the gates on their own."""

from __future__ import annotations

from typing import Any

from torch import nn

from lit_resinit.errors import ResInitError
from lit_resinit.graph.where import clean_name
from lit_resinit.plan.mark import applied_plan
from lit_resinit.plan.values import ResidualPlan


def param_groups(
    model: nn.Module,
    plan: ResidualPlan | None = None,
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    gate_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Two parameter groups for an optimizer: everything else, and the gates without weight decay.

    Args:
        model: The model, with the plan applied.
        plan: The plan; the one that was applied to the model, or to a part of it, when None. A callback has applied
            it before ``configure_optimizers`` is called.
        lr: Learning rate of everything else; the optimizer's own when None.
        weight_decay: Weight decay of everything else; the optimizer's own when None.
        gate_lr: Learning rate of the gates; ``lr`` when None.

    Returns:
        ``[rest, gates]``, every parameter of the model in exactly one of them.

    Raises:
        ResInitError: If no plan is given and none was applied, or a gate of the plan is no parameter of the model.

    Example:
        >>> import torch
        >>> from lit_resinit import apply_, make_plan
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> plan = make_plan(layer, torch.randn(2, 3, 8))
        >>> _ = apply_(layer, plan)
        >>> [len(group["params"]) for group in param_groups(layer, lr=1e-3, gate_lr=1e-2)]
        [12, 2]

    Reference:
        Zhang et al. (2019), Fixup Initialization, arXiv:1901.09321: scalars get a learning rate of their own.
    """
    wanted = {g.parameter for g in (_applied(model) if plan is None else plan).gates}
    gates = [p for n, p in model.named_parameters() if clean_name(n) in wanted]
    found = {clean_name(n) for n, _ in model.named_parameters(remove_duplicate=False)}
    if not wanted <= found:
        raise ResInitError(
            f"building parameter groups: expected a parameter {min(wanted - found)}, found none. Apply the plan first: "
            "`apply_(model, plan)`."
        )
    taken = {id(p) for p in gates}
    rest: dict[str, Any] = {"params": [p for p in model.parameters() if id(p) not in taken]}
    own: dict[str, Any] = {"params": gates, "weight_decay": 0.0}
    gate_lr = lr if gate_lr is None else gate_lr
    rest |= {k: v for k, v in (("lr", lr), ("weight_decay", weight_decay)) if v is not None}
    return [rest, own | ({} if gate_lr is None else {"lr": gate_lr})]


def _applied(model: nn.Module) -> ResidualPlan:
    found = applied_plan(model)
    if found is None:
        raise ResInitError(
            f"building parameter groups: expected a plan that was applied to {type(model).__name__}, or to a part of "
            "it, found none. Pass the plan, or apply one first: `apply_(model, make_plan(model, ...))`; under a "
            "Trainer, `ResidualInit` does that before `configure_optimizers`, where the network is built in `__init__`."
        )
    name, mark = found
    return mark.plan.below(name)
