"""Copies of the parameters that a module keeps itself (a moving average, a target), and that know no new scalar."""

from __future__ import annotations

import collections
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit.errors import GateError, ResInitError
from lit_resinit.graph.where import clean_name, is_below
from lit_resinit.plan.values import ResidualPlan, Scheme
from lit_resinit.words import together

_Group = list[tuple[str, Tensor]]
_NO_HOLDERS = (type, types.ModuleType, types.FunctionType, types.MethodType, torch.optim.Optimizer)
_HEAD = 8  # values by which tensors are looked up before they are compared


def fitting_plan(module: nn.Module, plan: ResidualPlan, again: Callable[[Scheme], ResidualPlan]) -> ResidualPlan:
    """A plan that adds no parameter of which a copy in the module would not know.

    Where scalars were to be inserted, ``auto`` closes the last layers instead, which need none.

    Args:
        module: The module, before anything is inserted.
        plan: What was decided.
        again: Plans with another scheme.

    Raises:
        ResInitError: Where scalars are asked for, or nothing but a scalar closes a branch.
    """
    copies = copies_without_scalars(module, plan)
    if not copies:
        return plan
    why = ""
    if plan.scheme == "auto":
        try:
            return again("last_layer")
        except GateError as error:
            why = f" Closing the last layers instead, which needs no scalar, is not possible: {error}"
    raise ResInitError(
        f"inserting gates: expected no copy of the parameters in {type(module).__name__}, found {together(copies)}, "
        "made before the scalars that would be inserted now: whatever goes through both would meet names it does not "
        "know, or pair the wrong tensors. Make the copy in `on_fit_start`; or close the gates before it is made, with "
        "`apply_(self.net, make_plan(self.net, ...))` in `__init__`, which this callback recognises; or use "
        f"scheme='last_layer'.{why} Nothing was changed."
    )


def copies_without_scalars(module: nn.Module, plan: ResidualPlan) -> list[str]:
    """Where the module holds copies of parameters of blocks into which scalars are to be inserted.

    A tensor is a copy when it has the values of such a parameter, and they are not constant; or when it lies, with
    others, under the names of such parameters and has their shapes. Copies in blocks that the plan knows are none.
    """
    blocks = {b.block for b in plan.branches if b.action == "insert"}
    if not blocks:
        return []
    known = {b.block for b in plan.branches if b.block}
    own = {clean_name(n): p for n, p in module.named_parameters()}
    originals = {n: p for n, p in own.items() if any(is_below(n, block) for block in blocks)}
    match = _Match(originals)
    found = []
    for place, group in _groups(module):
        rest = [(n, t) for n, t in group if not any(is_below(f"{place}.{n}".lstrip("."), b) for b in known)]
        if match.is_copy(rest):
            found.append(f"`{place}`" if place else "the module's own buffers")
    return found


class _Match:
    """Recognises copies of some parameters."""

    def __init__(self, originals: dict[str, nn.Parameter]) -> None:
        self._shapes = {p.shape for p in originals.values()}
        self._ids = {id(p) for p in originals.values()}
        self._by_name: dict[str, set[torch.Size]] = collections.defaultdict(set)
        self._by_value: dict[Any, list[Tensor]] = collections.defaultdict(list)
        for name, parameter in originals.items():
            parts = name.split(".")
            for first in range(len(parts) - 1):
                self._by_name[_letters(".".join(parts[first:]))].add(parameter.shape)
            key = _head(parameter)
            if key is not None:
                self._by_value[key].append(parameter)

    def is_copy(self, group: _Group) -> bool:
        """Whether a group of tensors, by name, holds a copy."""
        likely = [(n, t) for n, t in group if t.shape in self._shapes and id(t) not in self._ids]
        if sum(t.shape in self._by_name.get(_letters(n), ()) for n, t in likely) > 1:
            return True
        return any(_equals(t, other) for _, t in likely for other in self._by_value.get(_head(t), ()))


def _letters(name: str) -> str:
    """A name without what stands between its parts, which averages have to replace in names of buffers."""
    return re.sub(r"[\W_]", "", name)


def _head(tensor: Tensor) -> tuple[Any, ...] | None:
    """The first values of a tensor; None where they are all the same, or where there are none."""
    if tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided or not tensor.is_floating_point():
        return None
    values = tuple(tensor.detach().reshape(-1)[:_HEAD].float().tolist())
    return (tensor.shape, values) if len(set(values)) > 1 else None


def _equals(left: Tensor, right: Tensor) -> bool:
    same = left.dtype == right.dtype and left.device == right.device and left.data_ptr() != right.data_ptr()
    return same and torch.equal(left.detach(), right.detach())


def _groups(module: nn.Module) -> Iterator[tuple[str, _Group]]:
    """(dotted name of the holder, its named tensors): parts of the module, and containers in their attributes."""
    for prefix, part in module.named_modules():
        yield clean_name(prefix), [(n, t) for n, t in part._parameters.items() if t is not None]
        yield clean_name(prefix), [(n, t) for n, t in part._buffers.items() if t is not None]
        held = [(n, v) for n, v in vars(part).items() if not _is_structure(n)]
        yield from _held(clean_name(prefix), held)


def _is_structure(name: str) -> bool:
    return name in ("_parameters", "_buffers", "_modules", "_trainer", "_fabric") or name.endswith("_hooks")


def _held(prefix: str, items: list[tuple[str, Any]]) -> Iterator[tuple[str, _Group]]:
    """Groups of tensors below attributes: in containers, and in objects that are no modules."""
    seen: set[int] = set()
    stack = [(f"{prefix}.{name}".lstrip("."), value) for name, value in items]
    while stack:
        place, value = stack.pop()
        if id(value) in seen or isinstance(value, nn.Module | Tensor):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            inner = [(str(n), v) for n, v in value.items()]
        elif isinstance(value, list | tuple | collections.deque):
            inner = [(str(i), v) for i, v in enumerate(value)]
        elif hasattr(value, "__dict__") and not isinstance(value, _NO_HOLDERS):
            inner = list(vars(value).items())
        else:
            continue
        tensors = [(n, v) for n, v in inner if isinstance(v, Tensor)]
        if tensors:
            yield place, tensors
        stack += [(f"{place}.{n}", v) for n, v in inner if not isinstance(v, Tensor | str | int | float)]
