"""Carry out a plan, and fold inserted gates back into the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit.errors import FoldError, ResInitError, TrainedWeightsError
from lit_resinit.find.gates import Gate, inserted_name
from lit_resinit.graph.where import clean_name, is_below
from lit_resinit.plan.hooks import (
    ConstantHook,
    GateHook,
    attach,
    detach,
    forget_applied,
    gate_hooks,
    insert_gate,
    mark_applied,
)
from lit_resinit.plan.values import Branch, ResidualPlan
from lit_resinit.words import without_numbers

_CONSTANT = 1e-6  # spread, relative to size, up to which a weight counts as constant
_BY_DEPTH = 4  # scalars that are no longer in order by chance
_BIAS_SPREAD = 1e-2  # spread of a norm's bias that an initialisation does not give


class ScalarGate(nn.Module):
    """Multiply by one learnable number that starts at zero.

    For ``y = x + gate(f(x))`` the block is the identity until the gate moves. For code that cannot be reached with a
    hook: a branch that ends in a function call inside the block's own forward.

    Example:
        >>> gate = ScalarGate()
        >>> gate(torch.ones(2))
        tensor([0., 0.], grad_fn=<MulBackward0>)

    Reference:
        De and Smith (2020), Batch Normalization Biases Residual Blocks Towards the Identity, arXiv:2002.10444.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gate to zero."""
        nn.init.zeros_(self.gate)

    def forward(self, branch: Tensor) -> Tensor:
        """Multiply the branch ``(...)`` by the gate, in the branch's own dtype."""
        return branch * self.gate.to(branch.dtype)


def apply_(model: nn.Module, plan: ResidualPlan, *, overwrite_trained: bool = False) -> nn.Module:
    """Carry out a plan in place: close the gates, keep every other parameter bit for bit.

    Parameters keep their identity, so an optimizer that holds them stays valid; inserted gates are new parameters and
    have to be there before the optimizer is built.

    Args:
        model: The model the plan was made for.
        plan: What :func:`make_plan` returned.
        overwrite_trained: Close branches of trained blocks too, which destroys what they have learned.

    Returns:
        The model.

    Raises:
        TrainedWeightsError: If a norm or scale of a block is no longer constant, the mark of training.
        ResInitError: If the plan does not fit the model, or was applied already.

    Example:
        >>> from lit_resinit import make_plan
        >>> encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> plan = make_plan(encoder, torch.randn(2, 3, 8))
        >>> _ = apply_(encoder, plan)
        >>> [g.parameter for g in plan.gates]
        ['self_attn.residual_gate', 'linear2.residual_gate']
    """
    parameters = {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    modules = {clean_name(n): m for n, m in model.named_modules(remove_duplicate=False)}
    todo = [b for b in plan.active if b.action not in ("already_closed", "observe")]
    _check_fits(todo, parameters, modules)
    if not overwrite_trained:
        _check_untrained(todo, parameters)
    with torch.no_grad():
        for gate, branch in {(g.parameter, g.index): (g, b) for b in todo for g in b.gates}.values():
            _write(gate, branch, parameters, modules)
    mark_applied(model, plan)
    return model


def _check_fits(branches: Iterable[Branch], parameters: dict[str, nn.Parameter], modules: dict[str, nn.Module]) -> None:
    for branch in branches:
        for gate in branch.gates:
            if gate.kind == "inserted" and gate.module:
                _check_insertable(gate, modules)
                continue
            for name in (gate.parameter, *gate.biases):
                if name not in parameters:
                    raise ResInitError(
                        f"applying the plan to branch {branch.name}: expected a parameter {name}, found none. The plan "
                        "belongs to another model; make a new one with `make_plan`. Nothing was changed."
                    )


def _check_insertable(gate: Gate, modules: dict[str, nn.Module]) -> None:
    module = modules.get(gate.module)
    if module is None:
        raise ResInitError(
            f"inserting a gate: expected a module {gate.module}, found none. The plan belongs to another model; make a "
            "new one with `make_plan`. Nothing was changed."
        )
    if any(isinstance(h, GateHook | ConstantHook) for h in module._forward_hooks.values()):
        raise ResInitError(
            f"inserting a gate: expected none on {gate.module}, found one. The plan was applied before; apply it once, "
            "or fold the gates with `fold_` first. Nothing was changed."
        )


def _check_untrained(branches: Sequence[Branch], parameters: dict[str, nn.Parameter]) -> None:
    evidence = _uneven_scalars(branches, parameters)
    for branch in branches:
        for name in (*branch.norms, *(g.parameter for g in branch.gates if g.kind in ("norm", "scale"))):
            if name in parameters and name not in evidence and _looks_trained(name, parameters):
                evidence[name] = branch.name
    if not evidence:
        return
    name, block = next(iter(evidence.items()))
    values = parameters[name].detach().float()
    if values.numel() > 1:
        size = f"mean {values.mean():.3g} and spread {values.std():.3g}"
    else:
        size = f"value {values.item():.3g}, another in every block"
    more = f" and {len(evidence) - 1} more" if len(evidence) > 1 else ""
    raise TrainedWeightsError(
        f"closing {block}: expected weights at their initialisation, where norms and scales are constant; found {name} "
        f"with {size}{more}, which looks trained. Closing the branch "
        "would destroy what it learned, whichever way. Pass `include` to pick the new branches of a pretrained "
        "network, scheme='observe' to only watch, or `overwrite_trained=True`. Nothing was changed.",
        evidence,
    )


def _uneven_scalars(branches: Iterable[Branch], parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    """Scales of one element with another value in every block, and their branches.

    Each alone is constant, trained or not. Values that only fall or only rise over the blocks are an initialisation.
    """
    alike: dict[str, dict[str, str]] = {}
    for branch in branches:
        for gate in branch.gates:
            scalar = parameters[gate.parameter] if gate.kind == "scale" and gate.index is None else None
            if scalar is not None and scalar.numel() == 1 and not scalar.is_meta:
                alike.setdefault(without_numbers(gate.parameter), {})[gate.parameter] = branch.name
    found: dict[str, str] = {}
    for names in alike.values():
        values = torch.stack([parameters[n].detach().float().reshape(()).cpu() for n in names])
        steps = values.diff()
        by_depth = len(values) >= _BY_DEPTH and bool((steps >= 0).all() or (steps <= 0).all())
        if _spread(values) > _CONSTANT and not by_depth:
            found |= names
    return found


def _looks_trained(name: str, parameters: dict[str, nn.Parameter]) -> bool:
    bias = parameters.get(name.removesuffix("weight") + "bias") if name.endswith("weight") else None
    return _spread(parameters[name]) > _CONSTANT or (bias is not None and _spread(bias) > _BIAS_SPREAD)


def _spread(tensor: Tensor) -> float:
    if tensor.numel() < 2 or tensor.is_meta:
        return 0.0
    values = tensor.detach()
    return float(values.max() - values.min())


def _write(gate: Gate, branch: Branch, parameters: dict[str, nn.Parameter], modules: dict[str, nn.Module]) -> None:
    if branch.action == "sqrt_depth":
        attach(modules[gate.module], ConstantHook(gate.leaf, branch.length**-0.5))
    elif branch.action == "downscale":
        for name in (gate.parameter, *gate.biases):
            parameters[name].mul_(branch.length**-0.5)
    elif gate.kind == "inserted" and gate.module:
        _insert(gate, branch, modules[gate.module], parameters)
    else:
        target = parameters[gate.parameter]
        (target if gate.index is None else target[gate.index]).fill_(gate.value)
        for name in gate.biases:
            parameters[name].zero_()


def _insert(gate: Gate, branch: Branch, module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """A scalar that learns, but in a frozen block that runs without gradients: a teacher."""
    near = next(module.parameters(), None)
    near = next(iter(parameters.values())) if near is None else near
    folds = tuple((name, gate.value) for name in gate.folds_into)
    trains = branch.graded or any(p.requires_grad for n, p in parameters.items() if is_below(n, branch.block))
    insert_gate(module, GateHook(gate.leaf, gate.module, folds), near.device, trains)


# -------------------------------------------------------------------- folding


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
        >>> from lit_resinit import make_plan
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> _ = apply_(layer, make_plan(layer, torch.randn(2, 3, 8)))
        >>> fold_(layer)
        ['self_attn.residual_gate', 'linear2.residual_gate']
    """
    parameters = {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    uses: dict[int, int] = {}
    for parameter in parameters.values():
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
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
    name: str, hook: GateHook, parameters: dict[str, nn.Parameter], uses: dict[int, int]
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


# -------------------------------------------------------------------- optimizer


def param_groups(
    model: nn.Module,
    plan: ResidualPlan,
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    gate_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Two parameter groups for an optimizer: everything else, and the gates without weight decay.

    Args:
        model: The model, with the plan applied.
        plan: The plan.
        lr: Learning rate of everything else; the optimizer's own when None.
        weight_decay: Weight decay of everything else; the optimizer's own when None.
        gate_lr: Learning rate of the gates; ``lr`` when None.

    Returns:
        ``[rest, gates]``, every parameter of the model in exactly one of them.

    Raises:
        ResInitError: If a gate of the plan is no parameter of the model.

    Example:
        >>> from lit_resinit import make_plan
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> plan = make_plan(layer, torch.randn(2, 3, 8))
        >>> _ = apply_(layer, plan)
        >>> [len(group["params"]) for group in param_groups(layer, plan, lr=1e-3, gate_lr=1e-2)]
        [12, 2]

    Reference:
        Zhang et al. (2019), Fixup Initialization, arXiv:1901.09321: scalars get a learning rate of their own.
    """
    wanted = {g.parameter for g in plan.gates}
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
