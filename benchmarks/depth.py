"""Cost by depth: residual MLPs of 100 to 10,000 blocks, time per block and peak memory.

Run as ``python -m benchmarks.depth [--small] [--depths N ...] [--out FILE]``. Every depth is measured in a process of
its own. Times are processor times per block; a network of width 16 keeps the arithmetic small, so that what is measured
is the package. Memory is the growth of the process's peak while the plan is made, and the size of a full history.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.networks import mlp
from benchmarks.overhead import logging_step, observed_step
from benchmarks.report import RESULTS, Row, origin, publish, table
from benchmarks.timing import seconds
from lit_resinit import History, apply_, check_identity, make_plan

DEPTHS = (100, 1000, 10_000)
WIDTH, BATCH = 16, 8


def peak() -> float:
    """Largest resident size of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_one(blocks: int) -> dict[str, float]:
    """Processor seconds of every part at one depth, and memory in MiB."""
    training = mlp(blocks, WIDTH, BATCH)
    training.step()
    small = mlp(4, WIDTH, BATCH)
    make_plan(small.net, small.x)  # warms up what is imported on first use
    before, times, plans = peak(), {}, []
    times["plan"] = seconds(lambda: plans.append(make_plan(training.net, training.x)))
    memory, plan = peak() - before, plans[0]
    times["apply"] = seconds(lambda: apply_(training.net, plan, overwrite_trained=True))
    history = History([b.name for b in plan.branches])
    parts: dict[str, Callable[[], object]] = {
        "identity": lambda: check_identity(training.net, plan, training.x),
        "observe": lambda: observed_step(training, plan),
        "logging step": lambda: logging_step(training, plan, history),
        "plain step": training.step,
    }
    for name, work in parts.items():
        times[name] = min(seconds(work) for _ in range(1 if blocks > 1000 else 3))
    row = history._records.rows[0][1]
    return times | {"plan MiB": memory, "history MiB": row.numel() * row.element_size() * history.limit / 2**20}


def in_own_process(blocks: int) -> dict[str, float]:
    """The same in a fresh process, whose peak memory nothing else has raised."""
    command = [sys.executable, "-m", "benchmarks.depth", "--one", str(blocks)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def rows_of(found: dict[int, dict[str, float]]) -> list[Row]:
    """Milliseconds per block by depth, and how the deepest two compare."""
    depths = sorted(found)
    rows: list[Row] = []
    for name in next(iter(found.values())):
        memory = name.endswith("MiB")
        per_block = {d: found[d][name] / d * (1024 if memory else 1000) for d in depths}
        before = per_block[depths[-2]]
        rows.append(
            {
                "part": name.removesuffix(" MiB") + (", KiB per block" if memory else ", ms per block"),
                **{f"{d}": per_block[d] for d in depths},
                # A peak that earlier work of the same process has set already does not grow.
                "deepest / one before": f"{per_block[depths[-1]] / before:.2f}" if before else "-",
                "in all, deepest": f"{found[depths[-1]][name]:.3g} {'MiB' if memory else 's'}",
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Measure, print, write the file, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="10 and 40 blocks in this process, and no file")
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS, help="numbers of blocks")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "depth.txt", help="where to write")
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(measure_one(options.one)))
        return []
    torch.manual_seed(0)
    measure = measure_one if options.small else in_own_process
    rows = rows_of({d: measure(d) for d in ((10, 40) if options.small else options.depths)})
    text = [origin(), "", f"Residual MLPs of width {WIDTH}, batch {BATCH}, processor time", "", table(rows)]
    publish("\n".join(text), None if options.small else options.out)
    return rows


if __name__ == "__main__":
    main()
