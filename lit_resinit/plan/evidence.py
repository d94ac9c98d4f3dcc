"""Is this trained? What starts constant and is constant no longer is the evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lit_resinit.errors import TrainedWeightsError
from lit_resinit.plan.values import Branch
from lit_resinit.words import without_numbers

_CONSTANT = 1e-6  # spread, relative to size, up to which a weight counts as constant
_BY_DEPTH = 4  # scalars that are no longer in order by chance
_BIAS_SPREAD = 1e-2  # spread of a norm's bias that an initialisation does not give


def check_untrained(branches: Sequence[Branch], parameters: Mapping[str, Tensor]) -> None:
    """Raise where a norm or scale of a branch to be closed is constant no longer.

    Raises:
        TrainedWeightsError: With the names of these parameters, and of their branches.
    """
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


def _uneven_scalars(branches: Iterable[Branch], parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Scales of one element with another value in every block of one kind, and their branches.

    Each alone is constant, trained or not. Blocks are of one kind where one line adds their branches. Values that only
    fall or only rise over the blocks are an initialisation, and so are values each of which several blocks share.
    """
    alike: dict[tuple[str, str], dict[str, str]] = {}
    for branch in branches:
        for gate in branch.gates:
            scalar = parameters[gate.parameter] if gate.kind == "scale" and gate.index is None else None
            if scalar is not None and scalar.numel() == 1 and not scalar.is_meta:
                kind = branch.address.line, without_numbers(gate.parameter)
                alike.setdefault(kind, {})[gate.parameter] = branch.name
    found: dict[str, str] = {}
    for names in alike.values():
        values = torch.stack([parameters[n].detach().float().reshape(()).cpu() for n in names])
        steps = values.diff()
        by_depth = len(values) >= _BY_DEPTH and bool((steps >= 0).all() or (steps <= 0).all())
        shared = min(Counter(values.tolist()).values()) > 1
        if _spread(values) > _CONSTANT and not by_depth and not shared:
            found |= names
    return found


def _looks_trained(name: str, parameters: Mapping[str, Tensor]) -> bool:
    bias = parameters.get(name.removesuffix("weight") + "bias") if name.endswith("weight") else None
    return _spread(parameters[name]) > _CONSTANT or (bias is not None and _spread(bias) > _BIAS_SPREAD)


def _spread(tensor: Tensor) -> float:
    if tensor.numel() < 2 or tensor.is_meta:
        return 0.0
    values = tensor.detach()
    return float(values.max() - values.min())
