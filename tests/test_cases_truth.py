"""The answers that the cases state are right on this machine, shown without the package."""

import pytest

from benchmarks.cases.base import Case, load, run_truth

# slow: two processes or a compiler, whose plain-Lightning proof costs more than it protects from
PROVEN = [item for item in load().values() if not item.slow]


LONG = {"no_activation_kept_alive_over_steps", "forty_eight_blocks_without_host_reads"}  # a training, or a profiler


@pytest.mark.parametrize(
    "item", [pytest.param(i, id=i.name, marks=[pytest.mark.slow] * (i.name in LONG)) for i in PROVEN]
)
def test_stated_facts_hold_in_plain_torch(item: Case) -> None:
    run_truth(item)
