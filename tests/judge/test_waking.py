"""Sleeping gates in the steps after the first: they wake, or run out of patience."""

import pytest
import torch
from judging import Masked, X, gates_after_backward, judged, square, zeros
from networks import WIDTH, Scaled
from torch import Tensor, nn

from lit_resinit import make_plan, observe
from lit_resinit.judge.waking import UNSEEN, Waking


def test_sleepers_wake_or_run_out_of_patience() -> None:
    model = zeros()
    nn.init.zeros_(model[2].weight)
    _, report = gates_after_backward(model)
    waking = Waking(report, patience=2)
    model.zero_grad()
    square(model(X)).backward()
    assert waking.step(model).gates["0.scale"].status == "asleep"
    late = waking.step(model)
    assert late.gates["0.scale"].status == "dead"
    assert "slept through 2 optimizer steps" in late.gates["0.scale"].cause
    nn.init.ones_(model[2].weight)
    waking = Waking(report, patience=2)
    square(model(X)).backward()
    assert waking.step(model).gates["0.scale"].status == "alive"
    assert waking.woke["0.scale"] == 1
    assert not waking.waiting


class Expert(Masked):
    """A branch for some rows only: those whose first feature is positive, if any is."""

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero()[:, 0]
        return x.index_add(0, rows, super().forward(x[rows]) - x[rows])


@pytest.mark.parametrize(("rows", "status"), [(0, "asleep"), (2, "dead")])
def test_a_branch_that_ran_on_nothing_does_not_use_up_its_patience(rows: int, status: str) -> None:
    """An expert without tokens has a gradient of exact zeros, and so has one whose tokens are masked."""
    torch.manual_seed(0)
    x = X.abs()
    x[:, -1] = 0.0
    model = nn.Sequential(Expert(value=0.0), nn.Linear(WIDTH, 2))
    waking = Waking(judged(model, x), patience=2)
    assert waking.waiting
    x[rows:, 0] = -1.0
    for _ in range(3):
        model.zero_grad()
        loss = square(model(x))
        waking.before_backward(model, loss)
        loss.backward()
        assert model[0].scale.grad is not None
        waking.step(model)
    assert waking.report.gates["0.scale"].status == status
    model.zero_grad()
    square(model(X)).backward()
    if rows == 0:
        assert waking.step(model).gates["0.scale"].status == "alive"


def test_nan_on_waking_is_an_alarm() -> None:
    model = zeros()
    nn.init.zeros_(model[2].weight)
    _, report = gates_after_backward(model)
    model[0].scale.grad.fill_(float("nan"))
    assert Waking(report, patience=3).step(model).gates["0.scale"].status == "nonfinite"


def test_steps_that_do_not_run_a_branch_do_not_use_up_its_patience() -> None:
    class Rare(Scaled):
        run = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.run else x

    torch.manual_seed(0)
    model = nn.Sequential(Scaled(value=0.0), Rare(value=0.0), nn.Linear(WIDTH, 2))
    model[1].run = True
    plan = make_plan(model, X, scheme="observe")
    model[1].run = False

    def backward() -> None:
        model.zero_grad(set_to_none=True)
        model(X).square().mean().backward()

    with observe(model, plan, X) as seen:
        backward()
    waking = Waking(seen.gradients, patience=3)
    for _ in range(10):
        backward()
        assert waking.step(model).gates["1.scale"].status == "asleep"
    model[1].run = True
    backward()
    assert waking.step(model).gates["1.scale"].status == "alive"

    model[1].run = False
    waking = Waking(seen.gradients, patience=3)
    for _ in range(UNSEEN):
        backward()
        waking.step(model)
    assert waking.report.gates["1.scale"].status == "missing"
