"""The hooks that multiply a module's output, by a gate or by a constant."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lit_resinit.find.gates import inserted_name


@dataclasses.dataclass(slots=True)
class GateHook:
    """Forward hook that multiplies one tensor of a module's output by the scalar kept on that very module.

    It holds no reference to a module, so that copies, pickles and shards of the model use their own scalar.
    """

    __module__ = "lit_resinit"  # a pickle names no room

    leaf: int
    module: str
    folds_into: tuple[tuple[str, float], ...]

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output with the tensor multiplied."""
        return _scaled(output, self.leaf, getattr(module, inserted_name(self.leaf)))


@dataclasses.dataclass(slots=True)
class ConstantHook:
    """Forward hook that multiplies one tensor of a module's output by a constant (1/sqrt(L))."""

    __module__ = "lit_resinit"

    leaf: int
    factor: float

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output with the tensor multiplied."""
        return _scaled(output, self.leaf, self.factor)


def _scaled(output: Any, position: int, factor: Tensor | float) -> Any:
    if isinstance(output, Tensor):
        if isinstance(factor, Tensor):
            factor = factor.to(output.dtype)
            factor = factor.reshape(()) if output.is_nested else factor  # these take no factor with an axis
        return output * factor
    values, spec = tree_flatten(output)
    chosen = [i for i, value in enumerate(values) if isinstance(value, Tensor)][position]
    values[chosen] = _scaled(values[chosen], 0, factor)
    return tree_unflatten(values, spec)


def insert_gate(module: nn.Module, hook: GateHook, device: torch.device, trains: bool = True) -> None:
    """Register the scalar, at zero, and the hook that multiplies by it."""
    with torch.inference_mode(False):  # a parameter made inside of one could never be trained
        gate = nn.Parameter(torch.zeros(1, device=device), requires_grad=trains)
    module.register_parameter(inserted_name(hook.leaf), gate)
    attach(module, hook)


def attach(module: nn.Module, hook: GateHook | ConstantHook) -> None:
    """Register a multiplying hook, in a way that compiled code sees.

    Compiled code does not look whether a module has hooks: what was compiled for a twin without would skip ours. It
    does look whether a module has a ``forward`` of its own, so that it gets its class's, bound to itself.
    """
    module.register_forward_hook(hook, prepend=True)
    vars(module).setdefault("forward", types.MethodType(type(module).forward, module))


def detach(module: nn.Module, key: int) -> None:
    """Remove a multiplying hook."""
    del module._forward_hooks[key]
    own = vars(module).get("forward")
    ours = getattr(own, "__self__", None) is module and getattr(own, "__func__", None) is type(module).forward
    if ours and not any(isinstance(h, GateHook | ConstantHook) for h in module._forward_hooks.values()):
        del vars(module)["forward"]


# -------------------------------------------------------------------- methods of a module's own

_LENT = "_residual_methods"  # the methods that were lent, with what the module had for itself before


def lend_method(module: nn.Module, function: Callable[..., Any]) -> None:
    """Give a module a method of its own, in place of its class's, until :func:`take_back_methods`.

    A copy of the module has it too; a pickle has its class's again, and names nothing of ours.
    """
    name = function.__name__
    own = vars(module).get(name)
    if getattr(own, "__func__", None) is not function:
        vars(module).setdefault(_LENT, {})[name] = own
        vars(module)[name] = types.MethodType(function, module)


def method_before(module: nn.Module, name: str) -> Callable[..., Any]:
    """The method that a lent one stands in for."""
    own: Callable[..., Any] | None = vars(module).get(_LENT, {}).get(name)
    return types.MethodType(getattr(type(module), name), module) if own is None else own


def take_back_methods(module: nn.Module) -> None:
    """Let a module have the methods that it had before."""
    for name, own in vars(module).pop(_LENT, {}).items():
        vars(module).pop(name, None)
        if own is not None:
            vars(module)[name] = own


def gate_hooks(module: nn.Module) -> list[tuple[int, GateHook]]:
    """(key, hook) of every inserted gate on this very module."""
    return [(key, hook) for key, hook in module._forward_hooks.items() if isinstance(hook, GateHook)]


def inserted_gates(model: nn.Module) -> Iterator[tuple[str, GateHook]]:
    """(parameter name, hook) of every inserted gate in a model, by all names that it has."""
    for name, module in model.named_modules(remove_duplicate=False):
        for _, hook in gate_hooks(module):
            yield f"{name}.{inserted_name(hook.leaf)}".lstrip("."), hook
