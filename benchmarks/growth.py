"""Variance of the stream by depth in 200 random blocks: open, divided by the root of the depth, and closed.

python -m benchmarks.growth --out docs/images/variance_by_depth.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn


def variances(blocks: int, width: int, factor: float, norm: bool) -> list[float]:
    """Var(stream) before the first block and after each, for ``x + factor * W relu(V x)`` with random V and W."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, width, generator=generator, dtype=torch.float64)
    found = [1.0]
    start = x.var(correction=0)
    for _ in range(blocks):
        v, w = (torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5 for _ in range(2))
        inner = nn.functional.layer_norm(x, (width,)) if norm else x
        x = x + factor * 2**0.5 * (inner @ v).relu() @ w
        found.append(float(x.var(correction=0) / start))
    return found


def curves(blocks: int, width: int = 128) -> dict[str, list[float]]:
    """The curves of the figure, by label."""
    return {
        "open, output as large as its input": variances(blocks, width, 1.0, norm=False),
        "open, a norm first": variances(blocks, width, 1.0, norm=True),
        "times 1/sqrt(L), a norm first": variances(blocks, width, blocks**-0.5, norm=True),
        "closed": variances(blocks, width, 0.0, norm=True),
    }


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Draw the figure, and return its curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("variance_by_depth.png"))
    options = parser.parse_args(argv)
    from matplotlib.figure import Figure

    found = curves(options.blocks)
    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for label, values in found.items():
        axes.plot(values, label=f"{label}: {values[-1]:.3g} at the end")
    title = f"Variance of the stream in {options.blocks} random blocks"
    axes.set(yscale="log", ylim=(0.5, 1e8), xlabel="blocks passed", ylabel="Var(stream) / Var(input)", title=title)
    axes.legend(loc="upper right")
    figure.savefig(options.out, dpi=150)
    return found


if __name__ == "__main__":
    for name, values in main().items():
        print(f"{name}: {values[-1]:.4g}")
