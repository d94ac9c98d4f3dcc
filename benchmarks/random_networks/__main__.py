"""Plan, close and judge many random networks.

Run as ``python -m benchmarks.random_networks [--count 10000] [--seed 0] [--jobs 2] [--everything] [--write FOLDER]``. A
network that fails is shrunk to the smallest one that still fails in the same way, and printed as source.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import multiprocessing
import random
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

from benchmarks.random_networks.checks import Failure, failure_of, shrunk
from benchmarks.random_networks.grammar import Grammar, Spec
from benchmarks.random_networks.source import Writer

_TRUTH = """

if __name__ == "__main__":
    from lit_resinit import apply_, check_identity, make_plan

    model, args = Network(), inputs()
    plan = make_plan(model, args)
    assert len(plan) == ADDITIONS, f"expected {ADDITIONS} branches, found {len(plan)}"
    apply_(model, plan)
    report = check_identity(model, plan, args)
    assert report.ok, report
"""


def draw(seed: int, number: int, *, everything: bool = False) -> Spec:
    """One network by its number."""
    return Grammar(random.Random(f"{seed}/{number}"), everything=everything).network()


def tried(number: int, seed: int, everything: bool) -> tuple[int, Failure | None]:
    """The verdict on one network; every eighth is also written in other words."""
    spec = draw(seed, number, everything=everything)
    return number, failure_of(spec, properties=number % 8 == 0)


def _quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def main() -> int:
    """Run from the command line; 1 if a network fails."""
    parser = argparse.ArgumentParser(description="Plan, close and judge random networks.")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--everything", action="store_true", help="also what the package is not right on yet")
    parser.add_argument("--show", type=int, default=3, help="shrunk sources shown of each kind of failure")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the shrunk sources there")
    options = parser.parse_args()
    _quiet()
    start = time.perf_counter()
    failures: list[tuple[int, Failure]] = []
    work = functools.partial(tried, seed=options.seed, everything=options.everything)
    with multiprocessing.get_context("fork").Pool(options.jobs, initializer=_quiet) as pool:
        for number, failure in pool.imap_unordered(work, range(options.count), chunksize=8):
            if failure is not None:
                failures.append((number, failure))
    kinds = Counter(failure.check for _, failure in failures)
    show(options, sorted(failures, key=lambda f: f[0]))
    seconds = time.perf_counter() - start
    print(f"seed {options.seed}: {options.count - len(failures)} of {options.count} networks right, {seconds:.0f} s")
    print(", ".join(f"{check}: {count}" for check, count in kinds.most_common()) or "no failure")
    return int(bool(failures))


def show(options: argparse.Namespace, failures: list[tuple[int, Failure]]) -> None:
    """The smallest networks that fail, each kind a few times, each source once."""
    seen: Counter[str] = Counter()
    sources: set[str] = set()
    for number, failure in failures:
        if seen[failure.check] >= options.show:
            continue
        spec = shrunk(draw(options.seed, number, everything=options.everything), failure)
        text = Writer(spec).text()
        if text in sources:
            continue
        sources.add(text)
        seen[failure.check] += 1
        found = failure_of(spec, properties=failure.check.startswith("same plan")) or failure
        print(f"# network {number}: {found.check}: {found.found}\n# {json.dumps(spec)}\n{text}", flush=True)
        if options.write is not None:
            options.write.mkdir(parents=True, exist_ok=True)
            name = "".join(c if c.isalnum() else "_" for c in failure.check)
            (options.write / f"{name}_{number}.py").write_text(f"# {found.check}: {found.found}\n{text}{_TRUTH}")


if __name__ == "__main__":
    raise SystemExit(main())
