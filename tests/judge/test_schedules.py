"""Numbers that code computes: one that is zero in the first steps may be the start of a schedule."""

from collections.abc import Callable

import pytest
import torch
from marks import line_of
from networks import WIDTH, Scaled
from test_trial import Loop
from torch import Tensor, nn

Number = Callable[[float], float | Tensor]
KINDS: dict[str, Number] = {
    "number": lambda w: w,
    "tensor": torch.tensor,
    "full": lambda w: torch.full((), w),  # made of the number
}


class TwoLosses(nn.Module):
    """Two networks, the second of which counts for nothing before the third step."""

    def __init__(self, number: Number, late: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(value=0.0), nn.Linear(WIDTH, 2))
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(value=0.0), nn.Linear(WIDTH, 2))
        self.number, self.late, self.step = number, late, 0

    def forward(self, x: Tensor) -> Tensor:
        weight = self.number(float(self.step >= self.late))
        self.step += torch.is_grad_enabled()
        return self.first(x) + self.second(x) * weight  # counts for nothing


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_that_starts_at_zero_is_waited_for(kind: str) -> None:
    loop = Loop(TwoLosses(KINDS[kind], late=2), scheme="observe")
    loop.net.step = 0
    assert [f.message for _ in range(6) for f in loop.step()] == []
    assert {g.status for g in loop.trial.gradients.gates.values()} == {"alive"}


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_stays_zero_is_dead_when_patience_ends_and_has_its_line(kind: str) -> None:
    loop = Loop(TwoLosses(KINDS[kind], late=10**6), scheme="observe")
    (message,) = [f.message for _ in range(6) for f in loop.step()]
    assert "dead" in message
    assert "a number that is zero" in message
    assert line_of(__file__, "made of the number" if kind == "full" else "counts for nothing") in message
