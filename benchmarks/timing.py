"""Ratios of running times on a machine that others use too."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

Work = Callable[[], object]


class Ratio:
    """Quotients of two times, measured in turn: ``median``, and the quartiles as their spread."""

    def __init__(self, quotients: list[float]) -> None:
        self.median = statistics.median(quotients)
        low, _, high = statistics.quantiles(quotients, n=4, method="inclusive") if len(quotients) > 1 else quotients * 3
        self.spread = f"{low:.2f} to {high:.2f}"


def seconds(work: Work) -> float:
    """Processor time of one run: what other processes do in between does not count."""
    start = time.process_time()
    work()
    return time.process_time() - start


def ratios(base: Work, others: dict[str, Work], repeats: int) -> dict[str, Ratio]:
    """Every piece of work against ``base``, in turn in one process, each once before for warming up."""
    for work in (base, *others.values()):
        work()
    quotients: dict[str, list[float]] = {name: [] for name in others}
    for _ in range(repeats):
        for name, work in others.items():
            gc.collect()
            before = seconds(base)
            middle = seconds(work)
            quotients[name].append(2 * middle / (before + seconds(base)))
    return {name: Ratio(values) for name, values in quotients.items()}
