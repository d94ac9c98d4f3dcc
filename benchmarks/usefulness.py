"""Which number says how useful a branch is? Rankings of the branches of small networks against two truths.

Run as ``python -m benchmarks.usefulness [--small] [--seeds N] [--out FILE]`` (minutes on one core). Every training
starts with closed gates. Early (a tenth of the steps), in the middle (four tenths) and at the end each quantity ranks
the branches, and Spearman's correlation compares that with the truth on 240 samples that no quantity saw:

- LOO: the loss with this branch closed, minus the loss;
- Shapley: the mean fall of the loss when the branch is opened, over random orders of opening all of them.

The cost is in forward and backward passes on the same 240 samples. ``chance`` is the interval in which the median over
as many random rankings falls in 95 of 100 cases.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from benchmarks.report import RESULTS, Row, origin, publish, table
from benchmarks.usefulness_runs import SETTINGS, STAGES, Setting, Stage, train
from lit_resinit.watch.agreement import rank_agreement

Trainings = dict[tuple[Setting, int], dict[str, Stage]]
TRUTHS: dict[str, Callable[[Stage], torch.Tensor]] = {"LOO": lambda s: s.by_closing, "Shapley": lambda s: s.by_order}


def spearman(x: torch.Tensor, y: torch.Tensor) -> float:
    return rank_agreement("", x, y, permutations=2).correlation


def median(values: Iterable[float]) -> float:
    """Of those that are defined."""
    known = [v for v in values if not math.isnan(v)]
    return statistics.median(known) if known else math.nan


def chance(trainings: Trainings, draws: int = 500) -> str:
    """Where the median correlation of random rankings lies."""
    generator = torch.Generator().manual_seed(0)
    sizes = [len(stages["end"].by_closing) for stages in trainings.values()]
    medians = []
    for _ in range(draws):
        found = []
        for size in sizes:
            x, y = (torch.randperm(size, generator=generator).double() for _ in range(2))
            found.append(1 - 6 * float((x - y).square().sum()) / (size * (size**2 - 1)))
        medians.append(statistics.median(found))
    low, high = torch.quantile(torch.tensor(medians), torch.tensor([0.025, 0.975])).tolist()
    return f"{low:+.2f} to {high:+.2f}"


def correlations(trainings: Trainings, quantity: str, truth: str, stage: str) -> float:
    """Median over the trainings."""
    rows = (stages[stage] for stages in trainings.values() if stage in stages)
    return median(spearman(s.rankings[quantity], TRUTHS[truth](s)) for s in rows)


def by_quantity(trainings: Trainings) -> list[Row]:
    """One row for every quantity: its cost, its correlations, and what it adds up to."""
    rows = []
    every = [s for stages in trainings.values() for s in stages.values()]
    for quantity in every[0].rankings:
        found = [
            " / ".join(f"{correlations(trainings, quantity, truth, stage):+.2f}" for stage in STAGES)
            for truth in TRUTHS
        ]
        costs = [s.costs[quantity] for s in every if quantity in s.costs]
        shares = [s.shares[quantity] for s in every if quantity in s.shares]
        rows.append(
            {
                "quantity": quantity,
                "cost in passes": f"{statistics.median(costs):.1f}" if costs else "0",
                "LOO early / mid / end": found[0],
                "Shapley early / mid / end": found[1],
                "sum / joint effect": f"{median(shares):.2f}" if shares else "-",
            }
        )
    return rows


def by_setting(trainings: Trainings) -> list[Row]:
    """When the order of switching on is the order of usefulness: each network and optimizer alone."""
    rows = []
    for setting in dict.fromkeys(setting for setting, _ in trainings):
        own = {key: stages for key, stages in trainings.items() if key[0] == setting}
        row: Row = {"network, optimizer": setting.name, "end loss": median(s["end"].loss for s in own.values())}
        for quantity, short in (("order of switching on at 1e-3", "order"), ("gate path, 3 points", "path")):
            for truth in TRUTHS:
                values = [correlations(own, quantity, truth, stage) for stage in STAGES]
                row[f"{short}, {truth}"] = " / ".join("-" if math.isnan(v) else f"{v:+.2f}" for v in values)
        row["chance"] = chance(own)
        rows.append(row)
    return rows


def by_closing(trainings: Trainings) -> list[Row]:
    """What closing the lower half of each ranking costs at the end, as a part of the joint effect."""
    ends = {key: stages["end"] for key, stages in trainings.items()}
    networks = list(dict.fromkeys(setting.network for setting, _ in ends))
    rows = []
    for quantity in next(iter(ends.values())).closing_half:
        row: Row = {"closing the lower half by": quantity}
        row["all"] = f"{median(s.closing_half[quantity] for s in ends.values()):+.3f}"
        for network in networks:
            own = [s.closing_half[quantity] for key, s in ends.items() if key[0].network == network]
            row[network] = f"{median(own):+.3f}"
        best = sum(s.closing_half[quantity] <= min(s.closing_half.values()) + 1e-9 for s in ends.values())
        row["best or as good"] = f"{best} of {len(ends)}"
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> dict[str, list[Row]]:
    """Train, rank, print, write the file, and return the rows of the three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="two trainings of a few steps, and no file")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each setting (default: 3)")
    parser.add_argument("--permutations", type=int, default=12, help="orders of opening for a Shapley value")
    parser.add_argument("--out", type=Path, default=RESULTS / "usefulness.txt", help="where to write")
    options = parser.parse_args(argv)
    started = time.process_time()
    chosen = (SETTINGS[0], SETTINGS[8]) if options.small else SETTINGS
    seeds, orders = (range(1), 2) if options.small else (range(options.seeds), options.permutations)
    trainings: Trainings = {}
    for setting in chosen:
        for seed in seeds:
            stages, _ = train(setting, seed, orders, steps=30 if options.small else None)
            trainings[setting, seed] = {s.name: s for s in stages}
    tables = {"quantities": by_quantity(trainings), "settings": by_setting(trainings), "closing": by_closing(trainings)}
    publish(_text(trainings, tables, orders, time.process_time() - started), None if options.small else options.out)
    return tables


def _text(trainings: Trainings, tables: dict[str, list[Row]], orders: int, seconds: float) -> str:
    settings = "; ".join(f"{s.name}: rate {s.rate:g}, {s.steps} steps" for s in dict.fromkeys(s for s, _ in trainings))
    return "\n".join(
        [
            origin("scikit-learn"),
            "",
            f"{len(trainings)} trainings from closed gates, {seconds / 60:.0f} minutes of one core; the number is "
            "that of the branches.",
            f"Digits for MLP and ResNet, Python's language reference for the language model. {settings}.",
            f"Shapley values over {orders} orders. Medians over the trainings; random rankings give a median of "
            f"{chance(trainings)} (95 %).",
            "",
            table(tables["quantities"]),
            "",
            "Each network and optimizer alone (early / mid / end; - where the ranking has no order)",
            "",
            table(tables["settings"], 3),
            "",
            "Rise of the loss with the lower half closed at the end, as a part of the rise with everything closed",
            "",
            table(tables["closing"]),
        ]
    )


if __name__ == "__main__":
    main()
