"""How slow is a slow start? Training time against the slope between a gate and the end of its branch.

Run as ``python -m benchmarks.slow_start [--small] [--out FILE]``. A function behind a zero layer that has a small but
nonzero derivative does not freeze the layer, it slows it down (the open question in A. Pradeep (2026), "A
zero-initialised layer learns only through a nonzero path"). Here the branch of every block ends in a factor ``s``,
which is that slope exactly:

- ``constant``: ``x + s * (g * u(x))`` with a scalar gate ``g = 0`` and a number ``s`` that nothing trains;
- ``LayerScale``: ``x + gamma * W h(x)`` with ``W = 0`` and a learned ``gamma = s``;
- ``LayerScale closed``: the same with ``gamma = 0`` and ``W`` random, which is what the warning advises.

The data are scikit-learn's digits. Either everything trains, or only the branches do while stem and head keep their
random values, so that nothing but the branches can lower the loss. Steps are counted until half of the decrease is
reached that the same kind of run with ``s = 1`` and the same seed ends with; ``>`` is a run that did not get there.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.data import Batches, digits
from benchmarks.report import RESULTS, Row, origin, publish, table
from lit_resinit import make_plan, observe
from lit_resinit.judge.steep import SLOW

WIDTH, BLOCKS, BATCH = 32, 4, 128
SLOPES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
OPTIMIZERS = {"SGD": (torch.optim.SGD, 0.1), "AdamW": (torch.optim.AdamW, 3e-3)}


class Block(nn.Module):
    """``x + s * (g * u(x))``, or with a learned scale ``x + gamma * W h(x)``."""

    def __init__(self, kind: str, slope: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU())
        self.last = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.factor: Tensor | float = slope
        self.gate: Tensor | float = 1.0
        if kind == "constant":
            self.gate = nn.Parameter(torch.zeros(1))
        else:
            self.factor = nn.Parameter(torch.full((WIDTH,), 0.0 if kind == "LayerScale closed" else slope))
        if kind == "LayerScale":
            nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * (self.gate * self.last(self.inner(x)))


def network(kind: str, slope: float, seed: int, branches_only: bool) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [Block(kind, slope) for _ in range(BLOCKS)]
    net = nn.Sequential(nn.Linear(64, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))
    for part in (net[0], net[-1]):
        part.requires_grad_(not branches_only)
    return net


@functools.cache
def measured_slope(kind: str, slope: float) -> float:
    """The slope of the first block's gate, as the package reports it."""
    net, x = network(kind, slope, 0, False), torch.randn(16, 64)
    plan = make_plan(net, x, scheme="observe")
    with observe(net, plan, x) as seen:
        net(x).square().mean().backward()
    gate = plan.branches[0].gates[0].parameter
    return seen.gradients.gates[gate].slope


def losses_of(
    kind: str, slope: float, optimizer: str, seed: int, branches_only: bool, data: Batches, steps: int
) -> list[float]:
    """Training loss before every step."""
    net = network(kind, slope, seed, branches_only)
    build, rate = OPTIMIZERS[optimizer]
    trainer = build([p for p in net.parameters() if p.requires_grad], lr=rate)
    losses = []
    for x, y in data.draw(steps, seed):
        loss = cross_entropy(net(x), y)
        trainer.zero_grad()
        loss.backward()
        trainer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def smooth(losses: list[float], window: int = 10) -> list[float]:
    """Mean of the last losses, so that one lucky batch does not count."""
    return [statistics.fmean(losses[max(0, i - window + 1) : i + 1]) for i in range(len(losses))]


def steps_to(losses: list[float], goal: float) -> float:
    """First step at which the smoothed loss is at the goal; infinite when there is none."""
    return next((float(i) for i, loss in enumerate(smooth(losses)) if loss <= goal), float("inf"))


def measure(slopes: Sequence[float], seeds: Sequence[int], steps: int) -> list[Row]:
    """One row for every kind of branch, optimizer, slope and set of trained parameters."""
    data, rows = Batches(*digits()[:2], BATCH), []
    for branches_only, optimizer in itertools.product((True, False), OPTIMIZERS):
        goals: dict[int, float] = {}
        for kind, slope in _settings(slopes):
            runs = {s: losses_of(kind, slope, optimizer, s, branches_only, data, steps) for s in seeds}
            if slope == 1.0 and kind != "LayerScale closed":
                goals = {s: (smooth(run)[0] + smooth(run)[-1]) / 2 for s, run in runs.items()}
            counts = [steps_to(runs[s], goals[s]) for s in seeds]
            rows.append(
                {
                    "trained": "branches" if branches_only else "all",
                    "optimizer": optimizer,
                    "after the gate": kind,
                    "slope": "1" if kind == "LayerScale closed" else f"{slope:g}",
                    "measured": measured_slope(kind, slope),
                    "warns": "yes" if measured_slope(kind, slope) < SLOW else "no",
                    "steps to half": _steps(statistics.median(counts), steps),
                    "of the seeds": ", ".join(_steps(c, steps) for c in counts),
                    "final loss": statistics.median(smooth(run)[-1] for run in runs.values()),
                }
            )
    return rows


def _settings(slopes: Sequence[float]) -> list[tuple[str, float]]:
    return [(k, s) for k in ("constant", "LayerScale") for s in slopes] + [("LayerScale closed", 1.0)]


def _steps(count: float, steps: int) -> str:
    return f"{count:.0f}" if count < steps else f">{steps}"


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Measure, print, write the file, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="two slopes, one seed, few steps, and no file")
    parser.add_argument("--out", type=Path, default=RESULTS / "slow_start.txt", help="where to write")
    options = parser.parse_args(argv)
    slopes, seeds, steps = ((1.0, 1e-4), (0,), 25) if options.small else (SLOPES, (0, 1, 2), 300)
    rows = measure(slopes, seeds, steps)
    rates = ", ".join(f"{name} at {rate:g}" for name, (_, rate) in OPTIMIZERS.items())
    text = "\n".join(
        [
            origin("scikit-learn"),
            "",
            f"{BLOCKS} blocks of width {WIDTH} on digits, batch {BATCH}, {steps} steps, {len(seeds)} seeds, {rates}",
            "Steps to half: median of the steps to half of the decrease that the same with slope 1 ends with.",
            "",
            table(rows),
        ]
    )
    publish(text, None if options.small else options.out)
    return rows


if __name__ == "__main__":
    main()
