"""Figures of a history, with matplotlib (extra ``report``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_resinit.errors import ResInitError
from lit_resinit.watch import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def need_matplotlib() -> None:
    """Make sure that matplotlib is there.

    Raises:
        ResInitError: If it is missing, naming the extra.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ResInitError(
            "drawing the history: expected matplotlib, found none. Run `pip install lit-resinit[report]`."
        ) from error


def _empty(history: History) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, for a history with something in it."""
    need_matplotlib()
    if not len(history):
        raise ResInitError(
            "drawing the history: expected at least one record, found none. Train with the callback first."
        )
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    return figure, figure.add_subplot()


def activation_figure(history: History, title: str = "Residual blocks switching on") -> Figure:
    """Heat map of the variance ratio: optimizer steps across, depth upwards, colour on a log scale.

    Args:
        history: A history with at least one record.
        title: Title of the figure.

    Returns:
        A matplotlib figure; the dots mark the step at which each branch switched on.

    Raises:
        ResInitError: If matplotlib is missing, or the history is empty.

    Example:
        >>> import torch
        >>> history = History(["a", "b"])
        >>> history.append(0, torch.zeros(4, 2), torch.ones(2), torch.tensor([0.1, 0.5]))
        >>> len(activation_figure(history).axes)
        2
    """
    figure, axes = _empty(history)
    from matplotlib.colors import LogNorm

    steps, ratio = history.steps.tolist(), history.variance_ratio.T.numpy()
    lowest = max(history.on_ratio / 100, 1e-8)
    colours = ratio.clip(min=lowest)
    edges = [*steps, steps[-1] + max(1, (steps[-1] - steps[0]) // max(1, len(steps) - 1))]
    mesh = axes.pcolormesh(
        edges,
        range(len(history.branches) + 1),
        colours,
        norm=LogNorm(lowest, max(1.0, colours[colours == colours].max())),
        cmap="viridis",
    )
    on = [(step, depth + 0.5) for depth, step in enumerate(history.switched_on().values()) if step is not None]
    if on:
        axes.scatter(
            [s for s, _ in on], [d for _, d in on], s=4, color="white", label=f"ratio reached {history.on_ratio:g}"
        )
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize="small", facecolor="0.6")
    axes.set(xlabel="optimizer step", ylabel="branch, first to last", title=title)
    figure.colorbar(mesh, label="Var(branch) / Var(stream)")
    return figure
