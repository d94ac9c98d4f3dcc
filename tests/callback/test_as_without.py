"""Set-ups that once differed from a training without the callback: each is compared, bit for bit."""

from pathlib import Path

import pytest

from benchmarks.no_trace import Setup, compare, setups
from lit_resinit import ResidualInit


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "setup",
    [
        Setup(module="by hand, closure"),
        Setup(module="by hand, closure", ours="usefulness"),
        Setup(module="by hand, two optimizers"),
        Setup(module="steps in the backward"),
        Setup(module="steps in the backward", ours="usefulness"),
        Setup(loader="own generator", ours="usefulness"),
        Setup(loader="items that draw", ours="usefulness"),
    ],
    ids=str,
)
def test_a_training_is_what_it_is_without(setup: Setup, tmp_path: Path) -> None:
    assert compare(setup) == []


def test_there_are_more_than_a_hundred_set_ups() -> None:
    assert len(setups()) > 100
    assert ResidualInit().table
