"""Where code runs: the names of modules, and the module and source line of a running operation."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable

import torch
from torch import nn

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TRACER = os.path.join(_PACKAGE_FOLDER, "graph", "trace.py")
# Frames between an operation and the mode that records it.
_MACHINERY = (
    _PACKAGE_FOLDER,
    *(_TORCH_FOLDER + name for name in ("_dynamo", "_compile", "_ops.py", "utils/_python_dispatch")),
)
_COMPILED_PREFIX = "_orig_mod."


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """Where an operation runs, the same in every forward: module, line, operation, and its count there."""

    __module__ = "lit_resinit"  # a pickle names no room

    block: str
    line: str
    op: str
    count: int


class AddressBook:
    """Gives every operation of one forward its address, in the order of execution."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], int] = {}

    def next(self, block: str, line: str, op: str) -> Address:
        """The address of the operation that runs now."""
        return Address(block, line, op, self.count(block, line, op))

    def count(self, block: str, line: str, op: str) -> int:
        """How many of its kind ran there before the operation that runs now."""
        count = self._counts[block, line, op] = self._counts.get((block, line, op), -1) + 1
        return count


def module_names(model: nn.Module) -> dict[int, str]:
    """Dotted name of every module by identity, without the prefix that ``torch.compile`` adds."""
    return {id(module): clean_name(name) for name, module in model.named_modules()}


def aliases(model: nn.Module, names: dict[int, str]) -> dict[str, list[str]]:
    """The other names of modules that are registered in several places, by the first."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        first = names[id(module)]
        if clean_name(name) != first:
            found.setdefault(first, []).append(clean_name(name))
    return found


def clean_name(name: str) -> str:
    """A dotted name as the state dict of the uncompiled model has it."""
    return (name + ".").replace(_COMPILED_PREFIX, "")[:-1] if "_orig_mod" in name else name


def child_of(owner: str, block: str) -> str:
    """First name below ``block`` on the way to ``owner``; empty for the block itself and for a module outside it."""
    if block and not owner.startswith(block + "."):
        return ""
    return owner[len(block) + 1 if block else 0 :].split(".")[0]


def is_below(owner: str, block: str) -> bool:
    """Whether a module is the block or lies in it."""
    return not block or owner == block or owner.startswith(block + ".")


def common_parent(names: Iterable[str]) -> str:
    """The innermost module that holds all of these."""
    first, *others = names
    while first and not all(is_below(other, first) for other in others):
        first = first.rpartition(".")[0]
    return first


def locate(names: dict[int, str], depth: int) -> tuple[str, str]:
    """Module whose code is running, and the line of that code, found on the stack.

    Hooks are blind where a parent calls ``child.forward`` directly; the stack is not.
    """
    frame = sys._getframe(depth)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_MACHINERY):
        frame = frame.f_back
    line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _TRACER:  # whoever asked for the trace has nothing to do with it
            break
        if code.co_argcount:
            owner = names.get(id(frame.f_locals.get(code.co_varnames[0])))
            if owner is not None:
                return owner, f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "", line


def user_line(depth: int) -> str:
    """``file.py:line`` of the innermost frame outside torch and this package, else the innermost frame."""
    frame = sys._getframe(depth)
    first = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH_FOLDER, _PACKAGE_FOLDER)):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return f"{first.f_code.co_filename}:{first.f_lineno}"
