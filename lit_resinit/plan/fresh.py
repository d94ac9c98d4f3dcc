"""Do the last layers of branches look as their initialisation left them? For branches that have no norm and no scale.

A layer starts with independent values of one distribution. Training leaves two marks on it: values beyond the bound
that a uniform initialisation has, while most of them still lie evenly below it; and a few directions far longer than
independent values have. A layer from a normal initialisation that was trained a little shows neither.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lit_resinit.graph.tensors import as_wide, is_sharded

_LAYERS = 32  # looked at, evenly over the depth: training moves all of them
_VALUES = 4096  # of each layer, for the shape of its distribution
_ENOUGH = 1000  # values in all, from which a distribution has a shape
_EVEN = 0.04  # largest distance from an even distribution, beside that of chance; a normal one is 0.08 or more away
_NORMAL = 0.015  # largest distance from a normal distribution, beside that of chance
_BEYOND = 1.1  # largest value over the bound that the others suggest; 1.0 for any uniform initialisation
_LONG = 1.5  # longest direction over that of independent values, where it is 0.5 to 1.1
_SMALLEST = 16  # rows and columns of a layer whose directions are measured


class Look(enum.Enum):
    """What layers look like; few values look as any initialisation may leave them."""

    FRESH = "as initialised"
    TRAINED = "trained"
    UNKNOWN = "as initialised, or trained"


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """A layer's weight, ``(out, ...)`` with all that is summed over behind it, and its bias."""

    name: str
    weight: Tensor
    bias: Tensor | None


def look_of(layers: Sequence[Layer]) -> tuple[Look, str]:
    """What the layers look like, and the measurement in words where they look trained."""
    shown = [_as_read(layer) for layer in layers[:: max(1, len(layers) // _LAYERS)]]
    shown = [layer for layer in shown if layer.weight.numel() and bool(layer.weight.any())]
    if not shown or not all(bool(layer.weight.isfinite().all()) for layer in shown):
        return Look.FRESH, ""
    long = max((_length(layer.weight) for layer in shown if min(layer.weight.shape) >= _SMALLEST), default=0.0)
    if long > _LONG:
        return Look.TRAINED, f"their longest direction is {long:.2g} times that of independent values"
    beyond = _beyond_bound(shown)
    if beyond > _BEYOND:
        return Look.TRAINED, f"their values lie evenly below a bound, but for some up to {beyond:.2g} times beyond it"
    few = sum(layer.weight.numel() for layer in shown) < _ENOUGH
    if few or _has_fresh_weights(shown) or _has_fresh_biases(shown):
        return Look.FRESH, ""
    if any(layer.bias is not None for layer in shown) and not _is_normal(shown):
        return Look.TRAINED, "neither their values nor their biases are distributed as an initialisation leaves them"
    return Look.UNKNOWN, ""


def _as_read(layer: Layer) -> Layer:
    weight = as_wide(layer.weight)
    return dataclasses.replace(layer, weight=weight.reshape(weight.shape[0], -1))


def _beyond_bound(layers: Iterable[Layer]) -> float:
    """How far the largest value lies beyond the bound below which the others are even; 0 where they are not.

    The bound is one over the root of the inputs. Of a uniform distribution with a wider one a share ``f`` lies beyond,
    and the largest at ``1 / (1 - f)``.
    """
    scaled = [layer.weight.abs().flatten() * math.sqrt(layer.weight.shape[1]) for layer in layers]
    values = _sample(scaled)
    if values.numel() < _ENOUGH or _distance(values) > _EVEN:
        return 0.0
    share = float((values > 1.0).float().mean())
    return max(float(s.max()) for s in scaled) * (1.0 - share)


def _has_fresh_weights(layers: Iterable[Layer]) -> bool:
    """Whether the values of every layer lie evenly up to its largest, as a uniform initialisation leaves them."""
    return _is_even([layer.weight.abs().flatten() / layer.weight.abs().max() for layer in layers])


def _has_fresh_biases(layers: Iterable[Layer]) -> bool:
    """Whether all biases are constant, or lie evenly below the bound of their layers' own initialisation."""
    known = [(as_wide(layer.bias).flatten(), layer.weight.shape[1]) for layer in layers if layer.bias is not None]
    if not known or all(bool((bias == bias[0]).all()) for bias, _ in known):
        return bool(known)
    scaled = [bias.abs() * math.sqrt(inputs) for bias, inputs in known]
    return max(float(s.max()) for s in scaled) <= 1.0 + 1e-3 and _is_even(scaled)


def _is_normal(layers: Iterable[Layer]) -> bool:
    """Whether the values of every layer are distributed normally, or are too few to tell."""
    values = _sample([layer.weight.flatten() / layer.weight.square().mean().sqrt() for layer in layers])
    expected = torch.special.ndtr(values)
    distance = float((expected - torch.linspace(0.0, 1.0, values.numel())).abs().max())
    return values.numel() < _ENOUGH or distance <= _NORMAL + 1.6 / math.sqrt(values.numel())


def _is_even(parts: list[Tensor]) -> bool:
    values = _sample(parts)
    return _distance(values) <= _EVEN + 1.6 / math.sqrt(values.numel())


def _sample(parts: list[Tensor]) -> Tensor:
    """Values of all parts, sorted, of the large ones some."""
    return torch.cat([p[:: max(1, p.numel() // _VALUES)] for p in parts]).cpu().sort().values


def _distance(values: Tensor) -> float:
    """Largest distance of sorted values, cut at one, from an even distribution up to one (Kolmogorov, Smirnov)."""
    return float((values.clamp(max=1.0) - torch.linspace(0.0, 1.0, values.numel())).abs().max())


def _length(weight: Tensor) -> float:
    """Largest singular value over that of independent values of the same size; about one when they are."""
    centred = weight - weight.mean()
    vector = torch.ones(centred.shape[1], dtype=centred.dtype, device=centred.device)
    vector[::2] = -1.0  # any start will do
    for _ in range(8):
        vector = centred.T @ (centred @ vector)
        vector = vector / vector.norm().clamp(min=1e-30)
    edge = centred.square().mean().sqrt() * (math.sqrt(centred.shape[0]) + math.sqrt(centred.shape[1]))
    return float((centred @ vector).norm() / edge.clamp(min=1e-30))


def last_layers(names: Iterable[tuple[str, ...]], parameters: Mapping[str, Tensor]) -> list[Layer]:
    """The layers among groups of parameter names, of which each may hold a weight and its bias."""
    found: dict[str, Layer] = {}
    for group in names:
        known = [(n, parameters[n]) for n in group if n in parameters]
        known = [(n, p) for n, p in known if not p.is_meta and not is_sharded(p)]
        weight = next(((n, p) for n, p in known if p.ndim >= 2 and p.numel() > len(p) and _is_inexact(p)), None)
        bias = next((p for _, p in known if p.ndim == 1), None)
        if weight is not None:
            found.setdefault(weight[0], Layer(*weight, bias))
    return list(found.values())


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
