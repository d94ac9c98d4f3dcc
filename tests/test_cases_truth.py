"""The answers that the cases state are right on this machine, shown without the package."""

import pytest

from benchmarks.cases.base import Case, load, run_truth

# slow: two processes or a compiler, whose plain-Lightning proof costs more than it protects from
PROVEN = [item for item in load().values() if not item.slow]


@pytest.mark.parametrize("item", PROVEN, ids=lambda item: item.name)
def test_stated_facts_hold_in_plain_torch(item: Case) -> None:
    run_truth(item)
