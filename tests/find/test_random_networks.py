"""Networks drawn anew in every run: their plans, closed networks and gates are what their construction says."""

import random

import pytest

from benchmarks.random_networks.__main__ import draw, tried
from benchmarks.random_networks.checks import shrunk
from benchmarks.random_networks.source import Writer

SEED = random.SystemRandom().randrange(10**6)
COUNT, CHUNKS = 80, 4


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_networks(chunk: int) -> None:
    print(f"seed {SEED}")  # shown where the test fails; `python -m benchmarks.random_networks --seed` draws them again
    for number in range(chunk, COUNT, CHUNKS):
        _, failure = tried(number, SEED, False)
        if failure is not None:
            text = Writer(shrunk(draw(SEED, number), failure)).text()
            pytest.fail(f"network {number} of seed {SEED}: {failure.check}: {failure.found}\n{text}")
