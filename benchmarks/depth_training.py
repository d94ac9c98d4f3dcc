"""Four ways to start a deep residual network, trained: does it learn, and how fast?

Run as ``python -m benchmarks.depth_training [--small] [--out FILE]``. Networks of narrow blocks learn scikit-learn's
digits, each way of starting with the learning rate that suits it best of a small grid (by final loss of one seed):

- ``default``: ``x + f(x)`` with PyTorch's own initialisation;
- ``1/sqrt(L)``: the same with every branch times a constant (``scheme="sqrt_depth"``);
- ``pre-norm``: a LayerNorm before every branch and one before the head;
- ``zeroed gates``: ``scheme="auto"``, a learned scalar at zero after every branch.

``diverged`` is the share of runs whose loss became NaN or infinite, or ended above its start. The second table is one
network of 10,000 blocks under the callback, with every check on.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.data import Batches, digits
from benchmarks.overhead import Classifier
from benchmarks.report import RESULTS, Row, origin, publish, table
from lit_resinit import ResidualInit, apply_, make_plan

WIDTH, BATCH = 16, 64
RATES = (1e-4, 1e-3, 1e-2)
STARTS = ("default", "1/sqrt(L)", "pre-norm", "zeroed gates")
SCHEMES = {"1/sqrt(L)": "sqrt_depth", "zeroed gates": "auto"}


class Block(nn.Module):
    """``x + W2 relu(W1 x)``, each layer with the gain that keeps a variance of one."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        up, down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.kaiming_normal_(up.weight, nonlinearity="relu")
        nn.init.kaiming_normal_(down.weight, nonlinearity="linear")
        self.branch = nn.Sequential(nn.LayerNorm(WIDTH) if norm else nn.Identity(), up, nn.ReLU(), down)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def network(start: str, blocks: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    norm = start == "pre-norm"
    body = [Block(norm) for _ in range(blocks)]
    end = nn.LayerNorm(WIDTH) if norm else nn.Identity()
    net = nn.Sequential(nn.Linear(64, WIDTH), *body, end, nn.Linear(WIDTH, 10))
    if start in SCHEMES:
        apply_(net, make_plan(net, torch.randn(4, 64), scheme=SCHEMES[start]))
    return net


@torch.no_grad()
def growth(net: nn.Sequential, x: Tensor) -> float:
    """Variance of the stream after the last block over that before the first."""
    before = net[0](x)
    after = net[1:-2](before)
    return float(after.var() / before.var())


@torch.no_grad()
def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((net(x).argmax(1) == y).float().mean())


def train(
    start: str, blocks: int, rate: float, seed: int, steps: int, data: tuple[Tensor, ...]
) -> dict[str, float | bool]:
    """One run with Adam: final loss and accuracy, steps to 90 %, and whether it diverged."""
    net = network(start, blocks, seed)
    x, y, val_x, val_y = data
    result: dict[str, float | bool] = {"growth": growth(net, x[:BATCH]), "to 90 %": math.inf}
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    losses: list[float] = []
    for step, batch in enumerate(Batches(x, y, BATCH).draw(steps, seed), 1):
        loss = cross_entropy(net(batch[0]), batch[1])
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 and math.isinf(result["to 90 %"]) and accuracy(net, val_x, val_y) >= 0.9:
            result["to 90 %"] = float(step)
    end = statistics.fmean(losses[-5:])
    diverged = not math.isfinite(end) or end > max(losses[0], math.log(10))
    accurate = 0.0 if diverged else accuracy(net, val_x, val_y)
    return result | {"loss": math.inf if diverged else end, "accuracy": accurate, "diverged": diverged}


def measure(depths: Sequence[int], seeds: Sequence[int], steps: dict[int, int], rates: Sequence[float]) -> list[Row]:
    data, rows = digits(), []
    for blocks in depths:
        for start in STARTS:
            tried = {r: train(start, blocks, r, seeds[0], steps[blocks], data) for r in rates}
            rate = min(tried, key=lambda r: (tried[r]["loss"], r))
            runs = [tried[rate]] + [train(start, blocks, rate, s, steps[blocks], data) for s in seeds[1:]]
            reached = statistics.median(float(r["to 90 %"]) for r in runs)
            rows.append(
                {
                    "blocks": str(blocks),
                    "start": start,
                    "rate": f"{rate:g}",
                    "Var(out)/Var(in) at start": statistics.median(float(r["growth"]) for r in runs),
                    "steps to 90 %": f"{reached:.0f}" if math.isfinite(reached) else f">{steps[blocks]}",
                    "accuracy": statistics.median(float(r["accuracy"]) for r in runs),
                    "diverged": f"{sum(bool(r['diverged']) for r in runs)} of {len(runs)}",
                }
            )
    return rows


def deepest(blocks: int, steps: int) -> Row:
    """A very deep network under the callback, everything on."""
    x, y, _, _ = digits()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, WIDTH), *(Block(False) for _ in range(blocks)), nn.Linear(WIDTH, 10))
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH)
    ours, start = ResidualInit(log_every_n_steps=10), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[ours],
        )
        trainer.fit(Classifier(net), loader)
    assert ours.identity_report is not None
    assert ours.gradient_report is not None
    statuses = [g.status for g in ours.gradient_report.gates.values()]
    with torch.no_grad():
        loss = float(cross_entropy(net(x[:BATCH]), y[:BATCH]))
    return {
        "blocks": str(blocks),
        "steps": str(trainer.global_step),
        "branches closed": str(sum(b.status == "closed" for b in ours.identity_report.branches)),
        "gates alive": str(statuses.count("alive")),
        "records": str(len(ours.history)),
        "loss after": loss,
        "seconds in all": time.process_time() - start,
    }


def main(argv: Sequence[str] | None = None) -> dict[str, list[Row]]:
    """Measure, print, write the file, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few blocks, one seed, few steps, and no file")
    parser.add_argument("--deepest", type=int, default=10_000, help="blocks of the last network (default: 10,000)")
    parser.add_argument("--out", type=Path, default=RESULTS / "depth_training.txt", help="where to write")
    options = parser.parse_args(argv)
    if options.small:
        steps = {6: 30}
        rows = measure((6,), (0,), steps, (1e-2,))
        last = [deepest(20, 2)]
    else:
        steps = {20: 300, 64: 200, 200: 100, 1000: 30}
        rows = measure(tuple(steps), (0, 1, 2), steps, RATES)
        last = [deepest(options.deepest, 20)]
    text = [
        origin("lightning", "scikit-learn"),
        "",
        f"Blocks of width {WIDTH} on digits, Adam, batch {BATCH}; medians of three seeds"
        f"; steps: {', '.join(f'{n} at {b} blocks' for b, n in steps.items())}",
        "",
        table(rows),
        "",
        table(last),
    ]
    publish("\n".join(text), None if options.small else options.out)
    return {"training": rows, "deepest": last}


if __name__ == "__main__":
    main()
