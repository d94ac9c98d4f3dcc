"""Makes the decision per branch: what is closed, how, and what cannot be."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from torch import nn

from lit_resinit.errors import GateError, NoBranchError
from lit_resinit.graph.keep import no_collection
from lit_resinit.graph.trace import Run, call_model, trace
from lit_resinit.graph.values import Graph
from lit_resinit.plan.decide import decide
from lit_resinit.plan.describe import describe, idle_modules, streams, zero_layers
from lit_resinit.plan.survey import Survey, survey
from lit_resinit.plan.values import Branch, ResidualPlan, Scheme
from lit_resinit.words import in_common, without_numbers


def make_plan(
    model: nn.Module,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    scheme: Scheme = "auto",
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
) -> ResidualPlan:
    """Find every residual branch of a model and decide what closes it; nothing is written.

    For a block ``y = x + g * u(x)`` the gate ``g`` is the first learned factor read backwards from the addition. With
    ``auto`` it is zeroed where it is a trailing norm or scale; else a scalar is inserted where a module's output is the
    end of the branch; else the last layer is zeroed.

    Args:
        model: Any module.
        args: Inputs of one forward: a tuple, or one tensor.
        kwargs: Keyword inputs.
        scheme: ``auto``, ``zero``, ``insert``, ``last_layer``, ``sqrt_depth``, ``downscale`` or ``observe``.
        include: Globs on branch names; only these are touched.
        exclude: Globs on branch names that are left alone.

    Returns:
        The plan, one :class:`Branch` for each executed residual addition.

    Raises:
        ValueError: For an unknown scheme or a pattern that matches nothing.
        TypeError: For arguments of a wrong type.
        TraceError: If the forward cannot run with these inputs.
        NoBranchError: If the model has no residual branch.
        GateError: If the scheme has nothing to close in some branch.

    Note:
        One training-mode forward is traced, on fake tensors where possible; the model, its buffers and the random
        state stay as they are. Cost: about one plain forward.

    Example:
        >>> import torch
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        ...         self.gain = nn.Parameter(torch.ones(1))
        ...     def forward(self, x):
        ...         return x + self.gain * self.down(self.up(x).relu())
        >>> plan = make_plan(nn.Sequential(Block(), Block()), torch.randn(2, 4))
        >>> [(b.name, b.action, b.gates[0].parameter) for b in plan.branches]
        [('0', 'zero', '0.gain'), ('1', 'zero', '1.gain')]

    Reference:
        Bachlechner et al. (2020), ReZero is All You Need, arXiv:2003.04887; Goyal et al. (2017), arXiv:1706.02677, 5.1.
    """
    check_arguments(model, scheme, include, exclude)
    return plan_forward(model, as_arguments(args), kwargs or {}, call_model, scheme, include, exclude)


def plan_forward(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: Run,
    scheme: Scheme,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
) -> ResidualPlan:
    """:func:`make_plan` for a forward that is something else than ``model(*args, **kwargs)``, arguments unchecked."""
    with no_collection():
        return plan_graph(model, trace(model, args, kwargs, run=run), scheme, include, exclude)


def as_arguments(args: Any) -> tuple[Any, ...]:
    """Positional inputs as a tuple; a single input may be given bare."""
    return tuple(args) if isinstance(args, tuple | list) else (args,)


def check_arguments(
    model: object, scheme: object, include: str | Sequence[str] | None, exclude: str | Sequence[str] | None
) -> None:
    """Raise for arguments that no plan can be made of."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected argument `model` to be a torch.nn.Module but got {type(model).__name__}")
    if scheme not in get_args(Scheme):
        raise ValueError(f"Expected argument `scheme` to be one of {', '.join(get_args(Scheme))} but got {scheme!r}")
    check_patterns(include, exclude)
    if next(iter(model.parameters()), None) is None:
        raise NoBranchError(
            f"looked for residual branches in {type(model).__name__}; expected a model with parameters, found none, so "
            "there is nothing to close. Pass the network itself, built, not a container that builds it later."
        )


def check_patterns(include: object, exclude: object) -> None:
    """Raise for patterns that are no globs."""
    for name, patterns in (("include", include), ("exclude", exclude)):
        listed = isinstance(patterns, Sequence) and all(isinstance(p, str) for p in patterns)
        if patterns is not None and not listed:
            raise TypeError(f"Expected argument `{name}` to be a glob or a list of globs but got {patterns!r}")


def plan_graph(
    model: nn.Module,
    graph: Graph,
    scheme: Scheme,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    known: Survey | None = None,
) -> ResidualPlan:
    """The plan, given a traced forward of the model, and the survey of it where that was made already."""
    known = known or survey(model, graph)
    chosen = select([known.names[a.node] for a in known.additions], include, exclude)
    if not known.additions and scheme != "observe":
        raise NoBranchError(_nothing_found(model, known))
    branches = _decided(known, scheme, chosen)
    stuck = _stuck(branches) if scheme != "observe" else []
    if stuck:
        raise GateError(f"{_cannot_close(model, scheme, stuck)} {_way_out(known, scheme, chosen)}")
    layers = zero_layers(known, {g.parameter for b in branches for g in b.gates})
    if not branches and not layers:
        raise NoBranchError(_nothing_found(model, known))
    unread = tuple(known.names[a.node] for a in known.unread)
    return ResidualPlan(scheme, branches, layers, streams(known), unread, idle_modules(known))


# -------------------------------------------------------------------- what is refused


def _nothing_found(model: nn.Module, known: Survey) -> str:
    names = ", ".join(known.names[a.node] for a in known.unread)
    unread = f" (but {names}, from which no output of the network is computed)" if names else ""
    return (
        f"looked for residual additions `x + f(x)` in one forward of {type(model).__name__} "
        f"({len(known.graph.calls)} operations); expected at least one, found none{unread}. Zeroing a layer of a "
        "network without a skip would cut its signal for good, so nothing was changed. If the network does have "
        "residual blocks, the inputs did not reach them: pass other `example_inputs`."
    )


def _decided(known: Survey, scheme: Scheme, chosen: set[str]) -> tuple[Branch, ...]:
    return describe(known, decide(known, scheme, {node for node, name in known.names.items() if name in chosen}))


def _stuck(branches: Sequence[Branch]) -> list[Branch]:
    return [b for b in branches if b.action not in ("excluded", "already_closed") and not b.gates]


def _cannot_close(model: nn.Module, scheme: Scheme, stuck: Sequence[Branch]) -> str:
    first = stuck[0]
    why = (
        f"{first.reason}, in {first.culprit.split('.parametrizations')[0] or 'the top module'}" if first.reason else ""
    )
    because = f": {why}" if why else ""
    names = ", ".join(b.name for b in stuck[:3]) + (f" and {len(stuck) - 3} more" if len(stuck) > 3 else "")
    edit = (
        ""
        if is_installed(model, first.block)
        else f". Edit the block at {first.source}: `self.gate = lit_resinit.ScalarGate()` in `__init__`, and "
        "`x + self.gate(branch)` in `forward`"
    )
    what = {
        "zero": f"a trailing norm or scale to zero; found none{because}. Use scheme='auto', which may insert a scalar",
        "last_layer": f"a last layer to zero; found none: {why}. Use scheme='insert' or scheme='auto'",
        "downscale": f"a last layer to scale; found none: {why}. Use scheme='sqrt_depth'",
    }.get(
        scheme,
        f"a module whose output is the end of the branch; found none: {why or 'the end is computed inline'}{edit}",
    )
    return f"scheme {scheme!r} on {names}: expected {what}. The addition is at {first.source}. Nothing was changed."


def is_installed(model: nn.Module, block: str) -> bool:
    """Whether a module's code is of a package that was installed, so that its user does not edit it."""
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        path = inspect.getfile(type(model.get_submodule(block)))
        return not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)
    return False


def _way_out(known: Survey, scheme: Scheme, chosen: set[str]) -> str:
    """The argument that leaves out what cannot be closed, to be pasted; what is closed without it is tried here."""
    left, stuck = set(chosen), set[str]()
    while left:
        new = {b.name for b in _stuck(_decided(known, scheme, left))}
        if not new:
            break
        stuck |= new
        left -= new
    if not left:
        return "No other branch could be closed without them; scheme='observe' changes nothing and only watches."
    names = [known.names[a.node] for a in known.additions]
    exclude = patterns_for([n for n in names if n not in left], names)
    include = patterns_for([n for n in names if n in left], names)
    return f"To close the other {len(left)} branches, pass exclude={exclude!r}, or include={include!r}."


# -------------------------------------------------------------------- include and exclude


def select(names: list[str], include: str | Sequence[str] | None, exclude: str | Sequence[str] | None) -> set[str]:
    """The names that the patterns leave.

    Raises:
        ValueError: If a pattern matches nothing; the message lists the nearest names.
    """
    kept = set(names) if include is None else set(_matches("include", names, include))
    return kept - set(_matches("exclude", names, exclude or ()))


def patterns_for(wanted: Sequence[str], names: Sequence[str]) -> list[str]:
    """Few patterns that match the wanted ones among some names, and no other."""
    groups: dict[str, list[str]] = {}
    for name in wanted:
        groups.setdefault(without_numbers(name), []).append(name)
    others = set(names) - set(wanted)
    patterns: list[str] = []
    for group in groups.values():
        pattern = in_common(group).replace("#", "*")
        clashes = any(fnmatch.fnmatchcase(n, pattern) for n in others)
        patterns += group if clashes else [pattern]
    covered = [p for p in patterns if any(q != p and fnmatch.fnmatchcase(p.replace("*", "0"), q) for q in patterns)]
    return [p for p in patterns if p not in covered]


def _matches(argument: str, names: list[str], patterns: str | Sequence[str]) -> list[str]:
    found: list[str] = []
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        hits = [n for n in names if fnmatch.fnmatchcase(n, pattern)]
        if not hits:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise ValueError(
                f"Expected argument `{argument}` to match branch names but got {pattern!r}, which matches none of the "
                f"{len(names)} branches; the nearest are {', '.join(near) or 'none'}"
            )
        found += hits
    return found
