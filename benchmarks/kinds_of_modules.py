"""What kinds of modules a network is made of, so that a larger network of the same kinds need not be run.

Two modules are of one kind when they are of one class, their flags and names are equal, their numbers are equal up to
"zero, one or more", and their children are of the same kinds, however many there are. Widths, depths and kernel sizes
do not matter, strides and groups of one do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from benchmarks.public import Made


def kinds_of(model: nn.Module) -> tuple[str, list[str]]:
    """The class of a network and the kinds of the modules in it.

    Example:
        >>> small, large = nn.Linear(2, 2), nn.Linear(8, 8)
        >>> kinds_of(nn.Sequential(small)) == kinds_of(nn.Sequential(large, large))
        True
        >>> kinds_of(nn.Sequential(small)) == kinds_of(nn.Sequential(nn.Linear(2, 2, bias=False)))
        False
    """
    found: dict[int, str] = {}
    for module in reversed(list(model.modules())):  # children before their parents
        children = {f"{_name(n)}:{found[id(m)]}" for n, m in module.named_children() if id(m) in found}
        text = "|".join((_class(module), *_values(module), *sorted(children)))
        found[id(module)] = hashlib.sha1(text.encode()).hexdigest()[:10]
    own = found.pop(id(model))
    return f"{_class(model)}", sorted(set(found.values())) or [own]


def meta(build: Callable[[], Made]) -> nn.Module:
    """A network without memory."""
    with torch.device("meta"):
        return build()[0]


def _class(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _name(name: str) -> str:
    return "#" if name.isdigit() else "".join("#" if c.isdigit() else c for c in name)


def _values(module: nn.Module) -> Iterable[str]:
    for name, value in sorted(vars(module).items()):
        if not name.startswith("_") and name != "training":
            yield f"{name}={_word(value)}"
    for name, parameter in sorted({**module._parameters, **module._buffers}.items()):
        yield f"{name}={parameter is not None}"


def _word(value: Any) -> str:
    """A value as far as it counts."""
    if value is None or isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int | float):
        return str(value) if value in (0, 1) else "more" if value > 0 else "less"
    if isinstance(value, tuple | list):
        return ",".join(sorted({_word(v) for v in value}))
    return getattr(value, "__qualname__", type(value).__qualname__)
