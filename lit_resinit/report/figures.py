"""Figures of a history, with matplotlib (extra ``report``).

All take a history and a title, and raise a :class:`ResInitError` where matplotlib is missing or the history is empty.

Example:
    >>> import torch
    >>> history = History(["a", "b"])
    >>> history.append(0, torch.zeros(4, 2), torch.ones(2), torch.tensor([0.0, 0.5]))
    >>> len(activation_figure(history).axes), len(gate_figure(history).axes[0].lines)
    (2, 2)
    >>> order_figure(history).axes[0].get_title()
    'Order of switching on (1 of 2)'
    >>> [line.get_label() for line in stream_figure(history).axes[0].lines]
    ['step 0']
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lit_resinit.errors import ResInitError
from lit_resinit.watch.history import DRAWN, History

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


def takes_figures(logger: Any) -> Callable[[str, Any, int], None] | None:
    """How a logger takes a figure: as W&B's (`log_image`), as TensorBoard's (`add_figure`), or not at all."""
    if callable(log_image := getattr(logger, "log_image", None)):
        return lambda name, figure, step: log_image(name, [figure], step=step)
    add_figure = getattr(getattr(logger, "experiment", None), "add_figure", None)
    if callable(add_figure):
        return lambda name, figure, step: add_figure(name, figure, step, close=False)
    return None


def empty_figure(history: History) -> tuple[Figure, Axes]:
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

    The dots mark the step at which each branch switched on.
    """
    figure, axes = empty_figure(history)
    draw_activation(figure, axes, history)
    axes.set(xlabel="optimizer step", title=title)
    return figure


def draw_activation(figure: Figure, axes: Axes, history: History) -> None:
    """Draw the heat map of the variance ratio, with its colour bar."""
    from matplotlib.colors import LogNorm

    lowest = max(history.on_ratio / 100, 1e-8)
    colours = history.variance_ratio.T.numpy().clip(min=lowest)
    norm = LogNorm(lowest, max(1.0, colours[colours == colours].max()))
    mesh = heat_map(axes, history.steps.tolist(), colours, norm=norm, cmap="viridis")
    draw_switching_on(axes, history)
    axes.set_ylabel("branch, first to last")
    figure.colorbar(mesh, ax=axes, label="Var(branch) / Var(stream)")


def heat_map(axes: Axes, steps: list[int], values: Any, **options: Any) -> Any:
    """Draw ``(branches, steps)`` as cells, each as wide as the time to the next step."""
    edges = [*steps, steps[-1] + max(1, (steps[-1] - steps[0]) // max(1, len(steps) - 1))]
    return axes.pcolormesh(edges, range(len(values) + 1), values, **options)


def draw_switching_on(axes: Axes, history: History, colour: str = "white") -> None:
    """A dot for each branch that switched on; white ones are explained."""
    on = [(step, depth + 0.5) for depth, step in enumerate(history.switched_on().values()) if step is not None]
    if on:
        steps, depths = zip(*on, strict=True)
        label = f"ratio reached {history.on_ratio:g}"
        axes.scatter(steps, depths, s=4, color=colour, label=label)
        if colour == "white":
            # below the axes: a long title needs all of its line
            axes.legend(loc="upper right", bbox_to_anchor=(1.0, -0.07), fontsize="small", facecolor="0.6")


def gate_figure(history: History, title: str = "How far the gates opened", most: int = 60) -> Figure:
    """Largest ``|g|`` of each branch against optimizer steps; the colour is the depth.

    Of more than ``most`` branches, evenly spaced ones are drawn, and the title says so.
    """
    figure, axes = empty_figure(history)
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    total = len(history.branches)
    drawn = range(0, total, max(1, -(-total // most)))
    colour = colormaps["viridis"]
    steps, gates = history.steps.tolist(), history.gate_max
    marker = "o" if len(steps) == 1 else ""
    for position in drawn:
        axes.plot(
            steps, gates[:, position].tolist(), color=colour(position / max(1, total - 1)), linewidth=1.0, marker=marker
        )
    some = "" if len(drawn) == total else f" ({len(drawn)} of {total:,} branches)"
    axes.set(xlabel="optimizer step", ylabel="largest |g|", title=title + some)
    figure.colorbar(ScalarMappable(Normalize(0, max(1, total - 1)), colour), ax=axes, label="branch, first to last")
    return figure


def order_figure(history: History, title: str = "Order of switching on") -> Figure:
    """Depth of each branch against the step at which it switched on; the colour is its place in the order.

    Branches that never switched on are crosses at the right edge; the title says how many did.
    """
    figure, axes = empty_figure(history)
    depth = {name: i for i, name in enumerate(history.branches)}
    order = history.order()
    on = {name: step for name, step in history.switched_on().items() if step is not None}
    never = [position for name, position in depth.items() if name not in on]
    dots = axes.scatter([on[n] for n in order], [depth[n] for n in order], c=range(1, len(order) + 1), s=16)
    if never:
        end = 1.03 * max(1, int(history.steps[-1]))
        axes.scatter([end] * len(never), never, marker="x", color="0.5", s=16, label=f"{len(never)} never")
        axes.legend(loc="upper right", bbox_to_anchor=(1.0, -0.07), fontsize="small")
    axes.set(
        xlabel="optimizer step",
        ylabel="branch, first to last",
        ylim=(-0.5, len(depth) - 0.5),
        title=f"{title} ({len(order)} of {len(depth)})",
    )
    if order:
        figure.colorbar(dots, label="order of switching on")
    return figure


def stream_figure(history: History, title: str = "Variance of the residual stream by depth") -> Figure:
    """Variance of the stream as it enters each addition, at the first and at the last record."""
    figure, axes = empty_figure(history)
    steps, variance = history.steps.tolist(), history.var_stream
    lines = {steps[0]: (variance[0], ":", "0.45"), steps[-1]: (variance[-1], "-", "C0")}
    for step, (values, style, colour) in lines.items():
        few = "o" if len(history.branches) <= 80 else ""
        axes.plot(values.tolist(), linestyle=style, color=colour, marker=few, markersize=3, label=f"step {step}")
    positive = variance[variance > 0]
    if positive.numel() and positive.max() > 10 * positive.min():
        axes.set_yscale("log")
    axes.set(xlabel="branch, first to last", ylabel="Var(stream)", title=title)
    axes.legend()
    return figure


DRAWN.update(ratio=activation_figure, gates=gate_figure, order=order_figure, stream=stream_figure)
