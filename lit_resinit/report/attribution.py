"""Who carries the loss: the attribution of a history as a heat map and a stacked area, for the picture and the page.

Example:
    >>> import torch
    >>> history = History(["a", "b"])
    >>> history.append(0, torch.zeros(4, 2), torch.ones(2), torch.tensor([0.0, 0.5]))
    >>> len(run_figure(history).axes), attribution_data(history, [0, 1], 600)
    (2, None)
    >>> history.attribute(1, {"a": 0.2, "b": 0.1}, loss=1.0, joint=0.31)
    >>> len(run_figure(history).axes)
    7
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_resinit.errors import ResInitError
from lit_resinit.report.figures import activation_figure, draw_activation, draw_switching_on, empty_figure, heat_map
from lit_resinit.report.numbers import digits, evenly, plain
from lit_resinit.watch.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BANDS = 40  # of the stacked area, beyond which none can be told from its neighbour
_LINEAR = 50  # part of the largest value below which the colour scale is linear


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Bands:
    """Branches in groups of neighbours, whose attributions add up.

    Args:
        labels: First and last branch of each group.
        depths: Mean depth of each group, from 0 to 1.
        values: Sum of each group, ``(groups, measurements)``; what was not measured is zero.
    """

    labels: list[str]
    depths: list[float]
    values: Tensor


def bands_of(branches: list[str], values: Tensor, most: int = _BANDS) -> Bands:
    """Add up neighbours until there are few enough.

    Args:
        branches: Branch names, in plan order.
        values: Attribution, ``(measurements, branches)``.
        most: Most groups.

    Example:
        >>> bands_of(["a", "b", "c"], torch.tensor([[1.0, 2.0, 3.0]]), most=2).labels
        ['a .. b', 'c']
    """
    size = max(1, math.ceil(len(branches) / most))
    groups = [range(i, min(i + size, len(branches))) for i in range(0, len(branches), size)]
    labels = [branches[g[0]] if len(g) == 1 else f"{branches[g[0]]} .. {branches[g[-1]]}" for g in groups]
    depths = [(g[0] + g[-1]) / 2 / max(1, len(branches) - 1) for g in groups]
    known = values.nan_to_num(0.0)
    sums = [known[:, g[0] : g[-1] + 1].sum(1) for g in groups]
    return Bands(labels, depths, torch.stack(sums) if sums else torch.zeros(0, len(values)))


# -------------------------------------------------------------------- the page


def attribution_data(history: History, rows: list[int], most: int) -> dict[str, Any] | None:
    """What the page draws of the attribution, in plain types; None where it was not measured.

    Args:
        history: The history.
        rows: Which branches the heat map shows.
        most: Most measurements.
    """
    found = history.attributions
    if not len(found):
        return None
    chosen = evenly(len(found), most)
    values = found.values[chosen]
    bands = bands_of(history.branches, values)
    return {
        "steps": found.steps[chosen].tolist(),
        "values": [plain(row) for row in values[:, rows].T],
        "largest": digits(_largest(values)),
        "bands": {
            "labels": bands.labels,
            "depths": [digits(d) for d in bands.depths],
            "values": [plain(row) for row in bands.values],
        },
        "sum": plain(values.nansum(1)),
        "loss": plain(found.loss[chosen]),
        "joint": plain(found.joint[chosen]),
        "closed": plain((found.loss + found.joint)[chosen]),
    }


def _largest(values: Tensor) -> float:
    known = values[values.isfinite()].abs()
    return float(known.max()) if known.numel() and bool(known.max() > 0) else 1.0


# -------------------------------------------------------------------- the picture


def run_figure(history: History, title: str = "Residual blocks switching on") -> Figure:
    """The picture of a run: blocks switching on, and, where it was measured, who carries the loss.

    Args:
        history: The history.
        title: Over the picture.

    Returns:
        The heat map of :func:`activation_figure` alone, or above heat map, stacked area and loss of the attribution.

    Raises:
        ResInitError: If matplotlib is missing, or the history is empty.
    """
    if not len(history.attributions):
        return activation_figure(history, title)
    figure, _ = empty_figure(history)
    figure.clear()
    figure.set_size_inches(8.0, 11.0)
    panels = figure.subplots(4, 1, sharex=True, height_ratios=[3, 3, 3, 1.6])
    draw_activation(figure, panels[0], history)
    panels[0].set_title(title)
    _draw(figure, panels[1:], history)
    return figure


def attribution_figure(history: History, title: str = "Who carries the loss") -> Figure:
    """Heat map, stacked area and loss of the attribution alone.

    Raises:
        ResInitError: If matplotlib is missing, or nothing was measured.
    """
    figure, _ = empty_figure(history)
    if not len(history.attributions):
        raise ResInitError(
            "drawing the attribution: expected at least one measurement, found none. Train with "
            "`ResidualInit(usefulness='path')`, or add what `attribute` returns: `history.attribute(...)`."
        )
    figure.clear()
    figure.set_size_inches(8.0, 8.5)
    panels = figure.subplots(3, 1, sharex=True, height_ratios=[3, 3, 1.6])
    panels[0].set_title(title)
    _draw(figure, panels, history)
    return figure


def _draw(figure: Figure, panels: Any, history: History) -> None:
    _draw_map(figure, panels[0], history)
    _draw_stack(figure, panels[1], history)
    _draw_loss(panels[2], history)


def _draw_map(figure: Figure, axes: Axes, history: History) -> None:
    from matplotlib.colors import AsinhNorm

    values = history.attributions.values
    largest = _largest(values)
    norm = AsinhNorm(linear_width=largest / _LINEAR, vmin=-largest, vmax=largest)
    steps = history.attributions.steps.tolist()
    mesh = heat_map(axes, steps, values.T.numpy(), norm=norm, cmap="RdBu")
    draw_switching_on(axes, history, "black")
    axes.set_ylabel("branch, first to last")
    bar = figure.colorbar(mesh, ax=axes, label="taken off the loss")
    marks = [part * largest for part in (-1.0, -0.1, 0.0, 0.1, 1.0)]
    bar.set_ticks(marks, labels=[f"{mark:.2g}" for mark in marks])
    bar.minorticks_off()


def _draw_stack(figure: Figure, axes: Axes, history: History) -> None:
    """Helpers upwards, the others downwards."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    found, colour = history.attributions, colormaps["viridis"]
    bands, steps = bands_of(history.branches, found.values), found.steps.tolist()
    colours = [colour(depth) for depth in bands.depths]
    for part in (bands.values.clamp(min=0.0), bands.values.clamp(max=0.0)):
        axes.stackplot(steps, part.numpy(), colors=colours, linewidth=0.2, edgecolor="white")
    axes.plot(steps, found.values.nansum(1).tolist(), color="black", linewidth=1.2, label="sum")
    axes.plot(steps, found.joint.tolist(), color="black", linewidth=1.0, linestyle=":", label="closing all")
    axes.axhline(0.0, color="0.5", linewidth=0.5)
    on = [(step, depth) for depth, step in enumerate(history.switched_on().values()) if step is not None]
    last = max(1, len(history.branches) - 1)
    for step, depth in on:  # where each branch switched on
        axes.axvline(step, 0.0, 0.04, color=colour(depth / last), linewidth=1.0)
    axes.set_ylabel("taken off the loss")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize="small")
    scale = ScalarMappable(Normalize(0, last), colour)
    figure.colorbar(scale, ax=axes, label="branch, first to last")


def _draw_loss(axes: Axes, history: History) -> None:
    found = history.attributions
    steps, marker = found.steps.tolist(), "o" if len(found) == 1 else ""
    axes.plot(steps, found.loss.tolist(), color="C0", marker=marker, label="as it is")
    axes.plot(steps, (found.loss + found.joint).tolist(), color="0.5", marker=marker, label="all gates closed")
    axes.set(xlabel="optimizer step", ylabel="loss held out")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize="small")
