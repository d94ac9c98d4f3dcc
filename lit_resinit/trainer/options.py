"""The callback's options, checked before anything runs."""

from __future__ import annotations

from typing import Any, Literal, get_args

from lit_resinit.plan.make import check_patterns
from lit_resinit.plan.values import Scheme

Policy = Literal["raise", "warn", "ignore"]
Usefulness = bool | Literal["path"]


def check_options(
    scheme: str, include: Any, exclude: Any, identity: str, gradient: str, patience: Any, on_ratio: Any, every: Any
) -> None:
    """Refuse values that mean nothing.

    Raises:
        ValueError: Naming the argument, what was expected, and the value.
        TypeError: For patterns that are no strings.
    """
    _check_one_of("scheme", scheme, get_args(Scheme))
    _check_one_of("identity", identity, get_args(Policy))
    _check_one_of("gradient", gradient, get_args(Policy))
    check_patterns(include, exclude)
    if not isinstance(patience, int) or patience < 1:
        raise ValueError(f"Expected argument `patience` to be a number of steps of at least 1 but got {patience!r}")
    if not isinstance(on_ratio, int | float) or not on_ratio > 0:
        raise ValueError(f"Expected argument `on_ratio` to be a positive number but got {on_ratio!r}")
    if every is not None and (not isinstance(every, int) or every < 0):
        raise ValueError(f"Expected argument `log_every_n_steps` to be None or a number of steps but got {every!r}")


def check_usefulness(usefulness: Any) -> None:
    """Refuse what is none of the ways to measure usefulness.

    Raises:
        ValueError: Naming what was expected, and the value.
    """
    if not isinstance(usefulness, bool) and usefulness != "path":
        raise ValueError(f"Expected argument `usefulness` to be True, False or 'path' but got {usefulness!r}")


def _check_one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"Expected argument `{name}` to be one of {', '.join(allowed)} but got {value!r}")
