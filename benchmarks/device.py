"""What the package does on an accelerator: the same bits as without it, few transfers, cost, and peak memory.

Run as ``python -m benchmarks.device [--small] [--device cuda] [--out FILE]``; under four minutes on one accelerator.
Without one it runs on the CPU, where transfers and peak memory cannot be counted and stand as ``-``.

Rows on bits compare the weights after a few steps, of which the first is observed and every second recorded, with those
of the same steps without the package; a compiled network runs those steps uncompiled, which rounds elsewhere. Transfers
are what the profiler counts as copies to the host in one step beyond those of a plain step. Times are wall-clock times
of synchronised steps, in turn with plain ones, as quotients.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from benchmarks.networks import mlp
from benchmarks.report import RESULTS, Row, origin, publish, table
from benchmarks.timing import Ratio
from lit_resinit import History, ResidualPlan, apply_, check_identity, make_plan, observe, watch

PRECISIONS = ("float32", "bfloat16", "float16, scaled")
COPY_TO_HOST = "Memcpy DtoH"  # the profiler's name for it


class Loop:
    """A training loop whose steps can be plain, observed or recorded.

    Args:
        net: The network, with its gates closed.
        plan: The plan.
        x: One batch.
        precision: One of ``PRECISIONS``.
        compiled: Whether the network is compiled.
    """

    def __init__(self, net: nn.Module, plan: ResidualPlan, x: Tensor, precision: str, *, compiled: bool) -> None:
        self.net, self.plan, self.x, self.precision = net, plan, x, precision
        self.history = History([b.name for b in plan.branches])
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler(x.device.type, enabled=precision == PRECISIONS[2])
        self.y = torch.arange(len(x), device=x.device) % 10
        self.run: Callable[[Tensor], Tensor] = torch.compile(net) if compiled else net

    def step(self, around: contextlib.AbstractContextManager[object] | None = None) -> None:
        """One step with forward and backward inside a context."""
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(self.precision, torch.float16)
        self.optimizer.zero_grad()
        with around or contextlib.nullcontext():
            with torch.autocast(self.x.device.type, dtype, enabled=dtype is not torch.float32):
                loss = cross_entropy(self.run(self.x), self.y)
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def plain(self) -> None:
        """A step without the package."""
        self.step()

    def observed(self) -> None:
        """A step whose gradients are judged."""
        self.step(observe(self.net, self.plan, self.x))

    def recorded(self) -> None:
        """A step that is recorded."""
        self.step(watch(self.net, self.plan, self.history, step=len(self.history)))


def build(blocks: int, width: int, batch: int, device: str) -> tuple[nn.Module, ResidualPlan, Tensor]:
    """A residual network on the device, with its gates closed."""
    training = mlp(blocks, width, batch)
    net, x = training.net.to(device), training.x.to(device)
    plan = make_plan(net, x[:4])
    return apply_(net, plan), plan, x


def same_bits(net: nn.Module, plan: ResidualPlan, x: Tensor, precision: str, *, compiled: bool) -> Row:
    """Train twice from the same weights, with and without the package, and compare every bit."""
    found = []
    for watched in (False, True):
        torch.manual_seed(0)
        loop = Loop(copy.deepcopy(net), plan, x, precision, compiled=compiled)
        (loop.observed if watched else loop.plain)()
        for i in range(4):
            (loop.recorded if watched and i % 2 else loop.plain)()
        found.append(loop.net.state_dict())
    equal = all(torch.equal(a, b) for a, b in zip(*(f.values() for f in found), strict=True))
    return {"precision": precision, "compiled": "yes" if compiled else "no", "bits": "equal" if equal else "differ"}


def transfers(work: Callable[[], object], device: str) -> int | None:
    """Copies to the host in one piece of work; None where the profiler cannot count them."""
    if device != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    return sum(event.name.startswith(COPY_TO_HOST) for event in seen.events())


def seconds(work: Callable[[], object], device: str) -> float:
    """Wall-clock time of one synchronised run."""
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def peak(work: Callable[[], object], device: str) -> float | None:
    """Largest memory that tensors took during one piece of work, in MiB; None where nothing counts it."""
    if device != "cuda":
        work()
        return None
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() / 2**20


def costs(loop: Loop, device: str, repeats: int) -> list[Row]:
    """Transfers, time and peak memory of the kinds of steps, each beside a plain step."""
    works: dict[str, Callable[[], object]] = {
        "step without a record": loop.plain,
        "step that is recorded": loop.recorded,
        "first step, observed": loop.observed,
        "identity check": lambda: check_identity(loop.net, loop.plan, loop.x),
    }
    for work in (loop.plain, *works.values()):
        work()
    base_transfers, base_peak = transfers(loop.plain, device), peak(loop.plain, device)
    rows: list[Row] = []
    for name, work in works.items():
        counted, largest, quotients = transfers(work, device), peak(work, device), []
        for _ in range(repeats):
            before = seconds(loop.plain, device)
            middle = seconds(work, device)
            quotients.append(2 * middle / (before + seconds(loop.plain, device)))
        ratio = Ratio(quotients)
        rows.append(
            {
                "what": name,
                "compiled": "yes" if loop.run is not loop.net else "no",
                "transfers": _difference(counted, base_transfers),
                "plain steps": f"{ratio.median:.2f}",
                "quartiles": ratio.spread,
                "peak MiB": _difference(largest, base_peak),
            }
        )
    return rows


def _difference(value: float | None, base: float | None) -> str:
    return "-" if value is None or base is None else f"{value - base:+.3g}"


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> dict[str, list[Row]]:
    """Measure, print, write the file, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small network, one repetition, and no file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
    parser.add_argument("--compiled", action="store_true", help="also with a compiled network")
    parser.add_argument("--out", type=Path, default=RESULTS / "device.txt", help="where to write")
    options = parser.parse_args(argv)
    blocks, width, batch, repeats = (6, 16, 8, 1) if options.small else (100, 256, 256, 15)
    net, plan, x = build(blocks, width, batch, options.device)
    ways = [(p, False) for p in PRECISIONS] + ([(PRECISIONS[0], True)] if options.compiled else [])
    bits = [same_bits(net, plan, x, precision, compiled=compiled) for precision, compiled in ways]
    cost: list[Row] = []
    for compiled in (False, True) if options.compiled else (False,):
        loop = Loop(copy.deepcopy(net), plan, x, PRECISIONS[0], compiled=compiled)
        cost += costs(loop, options.device, repeats)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    text = [
        origin(),
        f"device: {name}; {blocks} blocks, width {width}, batch {batch}",
        "",
        table(bits),
        "",
        table(cost),
    ]
    publish("\n".join(text), None if options.small else options.out)
    return {"bits": bits, "cost": cost}


if __name__ == "__main__":
    main()
