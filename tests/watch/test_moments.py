"""Moments of stream and branch, merged over parts and ranks, and the numbers of every gate."""

import functools
import math
from collections.abc import Callable

import numpy
import pytest
import torch
from networks import WIDTH, InPlace, Plain, Scaled, stack
from torch import Tensor, nn

from lit_resinit import History, apply_, make_plan
from lit_resinit.watch.gates import gate_statistics
from lit_resinit.watch.measure import Watcher
from lit_resinit.watch.moments import Moments
from lit_resinit.watch.watching import record

X = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))


# -------------------------------------------------------------------- moments


def parts_of(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    variance, mean = torch.var_mean(values, correction=0)
    return torch.tensor([float(values.numel())]), mean[None], variance[None]


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_merged_parts_are_the_variance_of_the_whole(offset: float) -> None:
    generator = numpy.random.default_rng(0)
    arrays = [generator.normal(offset + i, 1.0 + i, size) for i, size in enumerate((3, 1000, 17, 1))]
    moments = Moments(1)
    for array in arrays:
        moments.update(*parts_of(torch.tensor(array, dtype=torch.float32)))
    assert float(moments.compute()) == pytest.approx(numpy.concatenate(arrays).var(), rel=1e-4)


def test_streams_without_any_part_are_not_a_number() -> None:
    moments = Moments(2)
    moments.update(torch.tensor([4.0, 0.0]), torch.tensor([1.0, 9.0]), torch.tensor([2.0, 9.0]))
    assert moments.compute()[0] == 2.0
    assert math.isnan(float(moments.compute()[1]))


def test_order_of_the_parts_does_not_matter() -> None:
    parts = [parts_of(torch.randn(n) + n) for n in (5, 50, 2)]
    forward, backward = Moments(1), Moments(1)
    for part in parts:
        forward.update(*part)
    for part in reversed(parts):
        backward.update(*part)
    assert float(forward.compute()) == pytest.approx(float(backward.compute()), rel=1e-5)


def test_ranks_are_merged_along_the_first_axis() -> None:
    left, right = torch.randn(40), torch.randn(10) + 3.0
    both = Moments(1)
    for name, pair in zip(("count", "mean", "squares"), zip(*map(parts_of, (left, right)), strict=True), strict=True):
        setattr(both, name, torch.stack(pair))
    both.squares = both.squares * both.count
    both._update_count = 1
    assert float(both.compute()) == pytest.approx(float(torch.cat([left, right]).var(correction=0)), rel=1e-5)


# -------------------------------------------------------------------- measuring one forward


def variances(model: nn.Module, x: Tensor) -> Tensor:
    """(branches, 2): Var(stream) and Var(branch)."""
    plan = make_plan(model, x, scheme="observe")
    with Watcher(model, plan) as watcher:
        model(x)
    moments = Moments(2 * len(plan))
    moments.update(*watcher.moments())
    return moments.compute().view(-1, 2)


def test_variances_are_those_of_stream_and_branch() -> None:
    torch.manual_seed(0)
    model = stack(Plain)
    first = model[0](X).detach()
    streams = [X, first]
    branches = [model[i].f(streams[i]).detach() for i in range(2)]
    wanted = [[float(s.var(correction=0)), float(b.var(correction=0))] for s, b in zip(streams, branches, strict=True)]
    torch.testing.assert_close(variances(model, X), torch.tensor(wanted), rtol=1e-5, atol=0.0)


def test_in_place_additions_are_measured_before_they_write() -> None:
    torch.manual_seed(0)
    model = stack(InPlace, 1)
    torch.testing.assert_close(variances(model, X)[0, 0], X.var(correction=0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_of_three_hundred_does_not_overflow(dtype: torch.dtype) -> None:
    loud = (300.0 * torch.sign(X)).to(dtype)
    found = variances(nn.Sequential(Scaled(value=0.0)).to(dtype), loud)
    assert float(found[0, 0]) == pytest.approx(9e4, rel=0.05)
    assert float(found[0, 1]) == 0.0


def test_nothing_seen_is_none() -> None:
    model = stack(Plain)
    with Watcher(model, make_plan(model, X)) as watcher:
        pass
    assert watcher.moments() is None


def test_a_second_forward_in_another_context_is_found_again() -> None:
    model = stack(Plain)
    plan = make_plan(model, X)
    for _ in range(3):
        with Watcher(model, plan) as watcher:
            model(X)
        found = watcher.moments()
        assert found is not None
        assert found[0].tolist() == [float(X.numel())] * 4


def test_a_default_device_around_the_plan_does_not_hide_the_additions() -> None:
    model = stack(Plain)
    with torch.device("cpu"):
        plan = make_plan(model, X)
    with Watcher(model, plan) as watcher:
        model(X)
    assert watcher.moments() is not None


# -------------------------------------------------------------------- gates


def test_gate_statistics_are_signed_for_scalars_and_root_mean_squares_else() -> None:
    model = nn.Sequential(Scaled(), Scaled(size=WIDTH))
    plan = make_plan(model, X, scheme="observe")
    with torch.no_grad():
        model[0].scale.fill_(-0.5)
        model[1].scale.copy_(torch.linspace(-1.0, 0.0, WIDTH))
    model(X).square().mean().backward()
    gate, largest, slope, saliency = gate_statistics(model, plan)
    wide, grads = model[1].scale.detach(), [model[i].scale.grad for i in range(2)]
    torch.testing.assert_close(gate, torch.stack([torch.tensor(-0.5), wide.square().mean().sqrt()]))
    torch.testing.assert_close(largest, torch.tensor([0.5, 1.0]))
    torch.testing.assert_close(slope, torch.stack([g.square().mean().sqrt() for g in grads]))
    torch.testing.assert_close(saliency, torch.stack([(-0.5 * grads[0]).sum(), (wide * grads[1]).sum()]))


def test_gates_without_gradient_have_no_slope() -> None:
    model = nn.Sequential(Scaled())
    gate, _, slope, saliency = gate_statistics(model, make_plan(model, X, scheme="observe"))
    assert float(gate) == 1.0
    assert math.isnan(float(slope))
    assert math.isnan(float(saliency))


def test_gate_that_closes_at_minus_one_is_measured_from_there() -> None:
    class OnePlus(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return x + (1 + self.scale) * self.f(x)

    model = nn.Sequential(OnePlus(value=0.25))
    plan = make_plan(model, X)
    assert float(gate_statistics(model, plan)[0]) == 1.25
    apply_(model, plan)
    assert float(gate_statistics(model, plan)[0]) == 0.0


def arithmetic(work: Callable[[], object]) -> dict[str, int]:
    """How often each operation ran, those left out that only show or move memory."""
    shown = {"detach", "select", "as_strided", "unsqueeze", "to"}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    counts = {e.key.removeprefix("aten::"): e.count for e in profile.key_averages() if e.key.startswith("aten::")}
    return {name: count for name, count in counts.items() if name not in shown}


def test_scalar_gates_are_measured_together_however_many() -> None:
    counts = []
    for blocks in (10, 40):
        model = stack(Scaled, blocks)
        plan = make_plan(model, X)
        model(X).square().mean().backward()
        counts.append(arithmetic(functools.partial(gate_statistics, model, plan)))
    assert counts[0]["sqrt"] == 1
    assert counts[0] == counts[1]


def test_gates_of_several_kinds_keep_their_order() -> None:
    model = nn.Sequential(Scaled(value=0.5), Scaled(size=WIDTH, value=2.0), Scaled(value=-1.0))
    plan = make_plan(model, X, scheme="observe")
    assert gate_statistics(model, plan)[0].tolist() == [0.5, 2.0, -1.0]


def test_record_is_one_row_of_gates_and_variances() -> None:
    moments = Moments(4)
    moments.update(torch.ones(4), torch.zeros(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    history = History(["a", "b"])
    assert record(history, 7, torch.zeros(4, 2), moments)
    assert history.steps.tolist() == [7]
    assert history.var_stream.tolist() == [[1.0, 3.0]]
    assert history.var_branch.tolist() == [[2.0, 4.0]]
