"""Carry out a plan."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lit_resinit.errors import ResInitError
from lit_resinit.find.gates import Gate
from lit_resinit.graph.where import clean_name, is_below
from lit_resinit.plan.evidence import check_untrained
from lit_resinit.plan.hooks import ConstantHook, GateHook, attach, insert_gate
from lit_resinit.plan.mark import mark_applied
from lit_resinit.plan.values import Branch, ResidualPlan, check_plan


class ScalarGate(nn.Module):
    """Multiply by one learnable number that starts at zero.

    For ``y = x + gate(f(x))`` the block is the identity until the gate moves. For code that cannot be reached with a
    hook: a branch that ends in a function call inside the block's own forward.

    Example:
        >>> import torch
        >>> gate = ScalarGate()
        >>> gate(torch.ones(2))
        tensor([0., 0.], grad_fn=<MulBackward0>)

    Reference:
        De and Smith (2020), Batch Normalization Biases Residual Blocks Towards the Identity, arXiv:2002.10444.
    """

    __module__ = "lit_resinit"  # a pickle names no room

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
        TrainedWeightsError: If a norm or scale of a block is no longer constant, the mark of training; in blocks that
            have neither, if no initialisation leaves their last layers as they are.
        ResInitError: If the plan does not fit the model, or was applied already.

    Example:
        >>> from lit_resinit import make_plan
        >>> encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> plan = make_plan(encoder, torch.randn(2, 3, 8))
        >>> _ = apply_(encoder, plan)
        >>> [g.parameter for g in plan.gates]
        ['self_attn.residual_gate', 'linear2.residual_gate']
    """
    check_plan(model, plan)
    parameters = {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    modules = {clean_name(n): m for n, m in model.named_modules(remove_duplicate=False)}
    todo = [b for b in plan.active if b.action not in ("already_closed", "observe")]
    _check_fits(todo, parameters, modules)
    if not overwrite_trained:
        check_untrained(todo, parameters)
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


def _write(gate: Gate, branch: Branch, parameters: dict[str, nn.Parameter], modules: dict[str, nn.Module]) -> None:
    if branch.action == "sqrt_depth":
        attach(modules[gate.module], ConstantHook(gate.leaf, branch.length**-0.5))
    elif branch.action == "downscale":
        for name in (gate.parameter, *gate.biases):
            parameters[name].mul_(branch.length**-0.5)
    elif gate.kind == "inserted" and gate.module:
        _insert(gate, branch, modules[gate.module], parameters)
    else:
        gate.close_(parameters)


def _insert(gate: Gate, branch: Branch, module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """A scalar that learns, but in a frozen block that runs without gradients: a teacher."""
    near = next(module.parameters(), None)
    near = next(iter(parameters.values())) if near is None else near
    folds = tuple((name, gate.value) for name in gate.folds_into)
    trains = branch.graded or any(p.requires_grad for n, p in parameters.items() if is_below(n, branch.block))
    insert_gate(module, GateHook(gate.leaf, gate.module, folds), near.device, trains)
