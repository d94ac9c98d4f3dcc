"""Is this trained? What starts constant and is constant no longer is the evidence; else the last layers' values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lit_resinit.errors import TrainedWeightsError, warn
from lit_resinit.graph.tensors import as_wide
from lit_resinit.plan.fresh import Look, last_layers, look_of
from lit_resinit.plan.values import Branch
from lit_resinit.words import without_numbers

_DIGITS = 1  # of a number that somebody wrote: trained values have as many as their dtype holds
_CONSTANT = 1e-6  # spread, relative to size, up to which a weight counts as constant
_BY_DEPTH = 4  # scalars that are no longer in order by chance
_BIAS_SPREAD = 1e-2  # spread of a norm's bias that an initialisation does not give
_WHAT_TO_DO = (
    "Closing the branch would destroy what it learned, whichever way. Pass `include` to pick the new branches of a "
    "pretrained network, scheme='observe' to only watch, or `overwrite_trained=True`. Nothing was changed."
)


def check_untrained(branches: Sequence[Branch], parameters: Mapping[str, Tensor]) -> None:
    """Raise where a norm or scale of a branch to be closed is constant no longer.

    Raises:
        TrainedWeightsError: With the names of these parameters, and of their branches.
    """
    _check_last_layers([b for b in branches if not _has_constants(b)], parameters)
    evidence = _uneven_scalars(branches, parameters)
    for branch in branches:
        for name in (*branch.norms, *(g.parameter for g in branch.gates if g.kind in ("norm", "scale"))):
            if name in parameters and name not in evidence and _looks_trained(name, parameters):
                evidence[name] = branch.name
    if not evidence:
        return
    name, block = next(iter(evidence.items()))
    values = as_wide(parameters[name])
    if values.numel() > 1:
        size = f"mean {values.mean():.3g} and spread {values.std():.3g}"
    else:
        size = f"value {values.item():.3g}, another in every block"
    more = f" and {len(evidence) - 1} more" if len(evidence) > 1 else ""
    raise TrainedWeightsError(
        f"closing {block}: expected weights at their initialisation, where norms and scales are constant; found {name} "
        f"with {size}{more}, which looks trained. {_WHAT_TO_DO}",
        evidence,
    )


def _has_constants(branch: Branch) -> bool:
    """Whether there is anything that starts constant, and so would show training."""
    return bool(branch.norms) or any(g.kind in ("norm", "scale") for g in branch.gates)


def _check_last_layers(branches: Sequence[Branch], parameters: Mapping[str, Tensor]) -> None:
    read = {(g.parameter, *g.biases) if g.kind == "layer" else g.folds_into: b for b in branches for g in b.gates}
    layers = last_layers(read, parameters)
    look, measured = look_of(layers)
    if look is Look.TRAINED:
        branch_of = {name: branch.name for names, branch in read.items() for name in names}
        raise TrainedWeightsError(
            f"closing {len(branches)} branches without norms and scales, {branches[0].name} first: expected last "
            f"layers as an initialisation leaves them; found of {layers[0].name} "
            f"and others like it that {measured}, which looks trained. {_WHAT_TO_DO}",
            {layer.name: branch_of[layer.name] for layer in layers},
        )
    if look is Look.UNKNOWN:
        warn(
            f"closing {len(branches)} branches without norms and scales, {branches[0].name} first: nothing in them "
            f"tells a new network from a trained one (layers such as {layers[0].name} come from a normal distribution, "
            "or were trained). If it is new, all is well; if it is trained, this destroys what it learned: pass "
            "`include` to pick new branches, or scheme='observe'. `overwrite_trained=True` ends this warning."
        )


def _uneven_scalars(branches: Iterable[Branch], parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Scales of one element with another value in every block, and their branches.

    Each alone is constant, trained or not. Values that only fall or only rise over the blocks are an initialisation,
    and so are those that stand in several blocks each, or are numbers that somebody wrote: 1 in one kind of block and
    0.7 in another.
    """
    alike: dict[str, dict[str, str]] = {}
    for branch in branches:
        for gate in branch.gates:
            scalar = parameters[gate.parameter] if gate.kind == "scale" and gate.index is None else None
            if scalar is not None and scalar.numel() == 1 and scalar.is_floating_point() and not scalar.is_meta:
                alike.setdefault(without_numbers(gate.parameter), {})[gate.parameter] = branch.name
    found: dict[str, str] = {}
    for names in alike.values():
        values = torch.stack([parameters[n].detach().float().reshape(()).cpu() for n in names])
        steps = values.diff()
        by_depth = len(values) >= _BY_DEPTH and bool((steps >= 0).all() or (steps <= 0).all())
        if _spread(values) > _CONSTANT and not by_depth and not _is_written([parameters[n] for n in names]):
            found |= names
    return found


def _is_written(scalars: Sequence[Tensor]) -> bool:
    """Whether every value stands in several blocks, or has the few digits of a number that somebody wrote."""
    values = [s.detach().reshape(()).cpu() for s in scalars]
    counts = Counter(v.item() for v in values)
    short = (torch.tensor(float(f"{v.item():.{_DIGITS - 1}e}"), dtype=v.dtype) for v in values)
    return min(counts.values()) > 1 or all(map(torch.equal, values, short))


def _looks_trained(name: str, parameters: Mapping[str, Tensor]) -> bool:
    bias = parameters.get(name.removesuffix("weight") + "bias") if name.endswith("weight") else None
    return _spread(parameters[name]) > _CONSTANT or (bias is not None and _spread(bias) > _BIAS_SPREAD)


def _spread(tensor: Tensor) -> float:
    if tensor.numel() < 2 or tensor.is_meta:
        return 0.0
    values = as_wide(tensor)
    return float(values.max() - values.min())
