"""What else watches or starts up a network, on the same work: cost, memory, and what it delivers.

Run as ``python -m benchmarks.peers [--small] [--blocks N ...] [--out FILE]``. The network is a residual MLP with a zero
gate in every block. Each tool runs in a process of its own: processor time over that of a plain step of the same
network, alternating, and how far it raises the process's peak memory above that of plain steps. What takes longer than
the limit is stopped and says so. Then the closing itself, on a model that timm can close: its ResNet-50. The last part
is the least that watching can cost: the bytes of every gate, stream and branch, read once at the bandwidth of a large
copy.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.depth import peak
from benchmarks.networks import Training, mlp
from benchmarks.overhead import logging_step, observed_step, set_up
from benchmarks.report import RESULTS, Row, origin, publish, table
from benchmarks.timing import Work, ratios, seconds
from lit_resinit import History, check_identity

LIMIT = 120  # seconds for one tool


# -------------------------------------------------------------------- watching: a whole step with it


def watch_ours(training: Training) -> Work:
    plan = set_up(training)
    return functools.partial(logging_step, training, plan, History([b.name for b in plan.branches]))


def watch_norms(training: Training) -> Work:
    """Norms of every parameter and gradient, as one writes it."""

    def step() -> None:
        training.step()
        for p in training.net.parameters():
            p.detach().norm().item()
            p.grad.norm().item()

    return step


def watch_histograms(training: Training) -> Work:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tempfile.mkdtemp())

    def step() -> None:
        training.step()
        for name, p in training.net.named_parameters():
            writer.add_histogram(name, p.detach())

    return step


def watch_monitor(training: Training) -> Work:
    from torch_module_monitor import ModuleMonitor

    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.add_activation_metric("variance", lambda a: a.var())
    monitor.add_parameter_metric("norm", lambda p: p.norm())
    monitor.add_gradient_metric("norm", lambda g: g.norm())
    monitor.set_module(training.net)
    steps = iter(range(10**6))

    def step() -> None:
        monitor.begin_step(next(steps))
        training.optimizer.zero_grad()
        training.loss().backward()
        monitor.monitor_gradients()
        monitor.monitor_parameters()
        training.optimizer.step()
        monitor.end_step()

    return step


def watch_torchlens(training: Training) -> Work:
    import torchlens
    from torchlens.debug import gradient_flow_audit_rows
    from torchlens.options import CaptureOptions

    def step() -> None:
        trace = torchlens.trace(training.net, (training.x,), capture=CaptureOptions(backward_ready=True))
        out = trace[trace.output_layers[0]].out
        trace.log_backward(torch.nn.functional.cross_entropy(out, training.y), save_grads=True)
        gradient_flow_audit_rows(trace)

    return step


# -------------------------------------------------------------------- start-up and first checks


def start_ours(training: Training) -> Work:
    return lambda: set_up(training)


def check_ours(training: Training) -> Work:
    plan = set_up(training)

    def check() -> None:
        check_identity(training.net, plan, training.x)
        observed_step(training, plan)

    return check


def start_lsuv(training: Training) -> Work:
    from lsuv import lsuv_with_singlebatch

    return lambda: lsuv_with_singlebatch(training.net, training.x, needed_std=1.0, verbose=False)


def check_torchtest2(training: Training) -> Work:
    import torchtest2

    return lambda: torchtest2.check_model(
        training.net,
        training.x,
        training.y,
        loss_fn=torch.nn.functional.cross_entropy,
        optimizer=training.optimizer,
        overfit_steps=0,
    )


TOOLS: dict[str, tuple[str, Callable[[Training], Work], str]] = {
    "watch: lit_resinit": ("", watch_ours, "per branch: gate, its gradient, stream, branch, ratio, usefulness"),
    "watch: norms by hand": ("", watch_norms, "norm of every parameter and gradient"),
    "watch: TensorBoard histograms": ("tensorboard", watch_histograms, "histogram of every parameter"),
    "watch: torch-module-monitor": ("torch-module-monitor", watch_monitor, "variance of every module's output, norms"),
    "watch: torchlens trace and audit": ("torchlens", watch_torchlens, "every operation and its gradient"),
    "check: lit_resinit": ("", check_ours, "identity of every branch, verdict and line for every gate"),
    "check: torchtest2": ("torchtest2", check_torchtest2, "18 checks of the whole, none of the identity"),
    "start: lit_resinit": ("", start_ours, "branches found, gates closed"),
    "start: LSUV": ("lsuv", start_lsuv, "every layer scaled to variance one; no identity"),
}


def measure_one(name: str, blocks: int, width: int, batch: int, repeats: int) -> dict[str, str]:
    """Ratio to a plain step, and growth of the peak memory."""
    training = mlp(blocks, width, batch)
    for _ in range(3):
        training.step()
    before = peak()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        found = ratios(training.step, {name: TOOLS[name][1](training)}, repeats)[name]
    return {"ratio": f"{found.median:.2f}", "quartiles": found.spread, "memory": f"{peak() / before:.2f}"}


def in_own_process(name: str, blocks: int) -> dict[str, str]:
    """The same in a fresh process, which is stopped at the limit."""
    command = [sys.executable, "-m", "benchmarks.peers", "--one", name, "--blocks", str(blocks)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return dict.fromkeys(("ratio", "quartiles", "memory"), f"over {LIMIT} s")
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1].split(":")[0] if done.stderr.strip() else "stopped"
        return {"ratio": reason, "quartiles": "", "memory": ""}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(depths: Sequence[int], small: bool) -> list[Row]:
    rows: list[Row] = []
    for name, (_, _, delivers) in TOOLS.items():
        row: Row = {"tool": name}
        for blocks in depths:
            if small and "lit_resinit" not in name and "hand" not in name:
                continue
            found = measure_one(name, blocks, 16, 8, 1) if small else in_own_process(name, blocks)
            row |= {
                f"{blocks} blocks": found["ratio"],
                f"{blocks}: quartiles": found["quartiles"],
                f"{blocks}: memory": found["memory"],
            }
        if len(row) > 1:
            rows.append(row | {"delivers": delivers})
    return rows


# -------------------------------------------------------------------- closing a model that can be closed without us


def closing_rows(repeats: int, size: int = 64) -> list[Row]:
    """Closing timm's ResNet-50 by timm's own switch, and by ours, in plain steps of it."""
    import timm

    torch.manual_seed(0)
    net = timm.create_model("resnet50", num_classes=10, zero_init_last=False)
    training = Training("timm resnet50", net, torch.randn(16, 3, size, size))
    works: dict[str, Work] = {
        "lit_resinit": lambda: set_up(training),
        "timm zero_init_last": lambda: net.init_weights(zero_init_last=True),
    }
    delivers = {
        "lit_resinit": "any network, as it is; other weights untouched",
        "timm zero_init_last": "timm's own models that have the switch; draws all weights anew",
    }
    found = ratios(training.step, works, repeats)
    return [
        {"closing": name, "steps": f"{r.median:.3f}", "quartiles": r.spread, "delivers": delivers[name]}
        for name, r in found.items()
    ]


# -------------------------------------------------------------------- the least that it can cost


def floor_row(blocks: int, width: int, batch: int, repeats: int) -> Row:
    """Bytes of one logging step, the time to read them, and what ours adds to a plain step."""
    training = mlp(blocks, width, batch)
    work = watch_ours(training)
    work()
    training.step()
    plain, logged = [], []
    for _ in range(repeats):
        plain.append(seconds(training.step))
        logged.append(seconds(work))
    buffer, target = torch.randn(2**24), torch.empty(2**24)
    copied = min(seconds(lambda: target.copy_(buffer)) for _ in range(9))
    bandwidth = 2 * buffer.numel() * 4 / copied
    read = 4 * blocks * (2 * batch * width + 2)
    added = max(0.0, min(logged) - min(plain))
    return {
        "network": training.name,
        "MiB to read": read / 2**20,
        "copy bandwidth, GB/s": bandwidth / 1e9,
        "floor, ms": 1e3 * read / bandwidth,
        "added, ms": 1e3 * added,
        "added / floor": added * bandwidth / read,
        "floor / plain step": read / bandwidth / min(plain),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, list[Row]]:
    """Measure, print, write the file, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="ours and norms by hand, few blocks, and no file")
    parser.add_argument("--blocks", type=int, nargs="+", default=[200, 1000], help="numbers of blocks")
    parser.add_argument("--one", choices=list(TOOLS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "peers.txt", help="where to write")
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(measure_one(options.one, options.blocks[0], 64, 64, 3)))
        return {}
    tools = measure([4] if options.small else options.blocks, options.small)
    floor = [floor_row(4, 16, 8, 1)] if options.small else [floor_row(200, 256, 256, 7)]
    closing = [] if options.small else closing_rows(5)
    packages = sorted({package for package, _, _ in TOOLS.values() if package} | {"timm"})
    text = [origin(*packages)]
    for rows in (tools, closing, floor):
        text += ["", table(rows)] if rows else []
    publish("\n".join(text), None if options.small else options.out)
    return {"tools": tools, "closing": closing, "floor": floor}


if __name__ == "__main__":
    main()
