import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from networks import WIDTH, InPlace, Plain, Scaled, stack
from torch import Tensor, nn

from lit_resinit import History, ResInitError, apply_, make_plan
from lit_resinit.watch.history import QUANTITIES, to_record
from lit_resinit.watch.logs import log_name, log_names, metrics
from lit_resinit.watch.moments import Moments, Watcher, gate_statistics

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
    torch.testing.assert_close(saliency, torch.stack([(-0.5 * grads[0]).sum().abs(), (wide * grads[1]).sum().abs()]))


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
    record = to_record(7, torch.zeros(4, 2), moments)
    assert record.step == 7
    assert record.var_stream.tolist() == [1.0, 3.0]
    assert record.var_branch.tolist() == [2.0, 4.0]


# -------------------------------------------------------------------- history


def filled(records: int, branches: int = 2, limit: int = 2000) -> History:
    history = History([f"b{i}" for i in range(branches)], limit=limit)
    for step in range(records):
        gates = torch.full((4, branches), float(step))
        history.append(10 * step, gates, torch.ones(branches), torch.full((branches,), 1e-6 * step))
    return history


def test_columns_have_one_row_for_each_record() -> None:
    history = filled(5, 3)
    assert len(history) == 5
    assert history.steps.tolist() == [0, 10, 20, 30, 40]
    for quantity in QUANTITIES:
        value = getattr(history, quantity)
        assert value.shape == (5, 3)
        assert value.dtype == torch.float32
    assert history.gate[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert torch.equal(history.variance_ratio, history.var_branch / history.var_stream)


@pytest.mark.parametrize("records", [1999, 2000, 2001, 3999, 4001, 10_007])
def test_long_history_is_bounded_and_exact_at_both_ends(records: int) -> None:
    history = filled(records, 1)
    steps = history.steps.tolist()
    assert 1000 <= len(history) <= 2000
    assert (steps[0], steps[-1]) == (0, 10 * (records - 1))
    assert steps == sorted(set(steps))
    assert [float(g) * 10 for g in history.gate[:, 0]] == steps


def test_step_of_switching_on_is_exact_though_rows_are_dropped() -> None:
    history = filled(10_007, 1)
    assert history.switched_on() == {"b0": 10_000}
    assert history.order() == ["b0"]


def test_order_is_by_step_then_by_size() -> None:
    history = History(["late", "never", "small", "large"], on_ratio=0.1)
    for step, ratios in enumerate(([0.0, 0.0, 0.2, 0.3], [0.5, 0.05, 0.2, 0.3])):
        history.append(step, torch.zeros(4, 4), torch.ones(4), torch.tensor(ratios))
    assert history.switched_on() == {"late": 1, "never": None, "small": 0, "large": 0}
    assert history.order() == ["large", "small", "late"]


def test_stream_without_variance_has_no_ratio() -> None:
    history = History(["b"])
    history.append(0, torch.zeros(4, 1), torch.zeros(1), torch.ones(1))
    assert math.isnan(float(history.variance_ratio))
    assert history.switched_on() == {"b": None}


@pytest.mark.parametrize("records", [0, 3, 4500])
def test_saving_and_loading_keeps_everything(records: int, tmp_path: Path) -> None:
    history = filled(records)
    history.save(tmp_path / "history.npz")
    again = History.load(tmp_path / "history.npz")
    assert again.branches == history.branches
    assert torch.equal(again.steps, history.steps)
    assert all(torch.equal(getattr(again, q), getattr(history, q)) for q in QUANTITIES)
    assert (again.switched_on(), again.order()) == (history.switched_on(), history.order())
    for one in (history, again):
        one.append(10 * records, torch.zeros(4, 2), torch.ones(2), torch.ones(2))
    assert torch.equal(again.steps, history.steps)


def test_plain_types_go_through_a_checkpoint_and_back(tmp_path: Path) -> None:
    history = filled(4500)
    torch.save(history.to_dict(), tmp_path / "state.pt")
    again = History.from_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(again.gate, history.gate)
    assert (again.limit, again.on_ratio, again.switched_on()) == (2000, history.on_ratio, history.switched_on())


def test_a_continued_history_is_the_same_as_one_in_one_piece() -> None:
    whole, first = filled(4500), filled(2500)
    again = History.from_dict(first.to_dict())
    for step in range(2500, 4500):
        again.append(10 * step, torch.full((4, 2), float(step)), torch.ones(2), torch.full((2,), 1e-6 * step))
    assert torch.equal(again.steps, whole.steps)
    assert all(torch.equal(getattr(again, q), getattr(whole, q)) for q in QUANTITIES)
    assert again.switched_on() == whole.switched_on()


def test_pandas_has_a_row_for_each_record_and_branch() -> None:
    pandas = pytest.importorskip("pandas")
    history = filled(3)
    table = history.to_pandas()
    assert list(table.columns) == ["step", "branch", *QUANTITIES]
    assert len(table) == 6
    wide = table.pivot(index="step", columns="branch", values="var_branch")
    assert isinstance(wide, pandas.DataFrame)
    numpy.testing.assert_array_equal(wide.to_numpy(), history.var_branch.numpy())
    assert wide.index.tolist() == history.steps.tolist()


def test_missing_pandas_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ResInitError, match=r"lit-resinit\[pandas\]"):
        filled(3).to_pandas()


def test_a_limit_without_room_for_both_ends_is_refused() -> None:
    with pytest.raises(ValueError, match="`limit` to be at least 2 but got 1"):
        History(["a"], limit=1)


@pytest.mark.parametrize("limit", [2, 3, 7])
@pytest.mark.parametrize("records", [1, 2, 3, 20])
def test_small_limits_keep_both_ends(limit: int, records: int) -> None:
    history = filled(records, limit=limit)
    assert len(history) <= limit
    assert (history.steps[0], history.steps[-1]) == (0, 10 * (records - 1))


def test_movement_is_the_farthest_from_the_first_record() -> None:
    history = History(["a", "b", "c"])
    for gate in ([0.5, 0.0, 0.0], [0.5, 0.0, 0.7]):  # c goes away and comes back
        row = torch.tensor(gate)
        history.append(len(history), torch.stack([row, row, row, row]), torch.ones(3), torch.ones(3))
    found = history.movement(torch.tensor([-0.5, 0.1, 0.0]), torch.tensor([0.5, 0.3, 0.0]))
    assert found.tolist() == pytest.approx([1.0, 0.3, 0.7])
    assert History(["a"]).movement(torch.ones(1), torch.ones(1)).isnan().all()


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x93NUMPY"])
def test_a_file_of_another_kind_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "history.npz").write_bytes(content)
    with pytest.raises(ResInitError, match="another kind of file"):
        History.load(tmp_path / "history.npz")


def test_a_file_of_someone_else_is_refused(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "other.npz", weights=numpy.zeros(3))
    with pytest.raises(ResInitError, match="weights"):
        History.load(tmp_path / "other.npz")


def test_unknown_column_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="loss"):
        _ = History(["a"]).loss


# -------------------------------------------------------------------- logged keys


def test_few_branches_have_their_own_keys_and_many_are_quantiles() -> None:
    few, many = metrics(filled(2, 3)), metrics(filled(2, 100))
    assert set(few) >= {f"resinit/{q}/b{i}" for q in QUANTITIES for i in range(3)}
    assert set(many) >= {f"resinit/{q}/q{p}" for q in QUANTITIES for p in (10, 50, 90)}
    assert len(many) == len(QUANTITIES) * 3 + 4


def test_keys_are_the_same_at_every_record() -> None:
    assert set(metrics(filled(1))) == set(metrics(filled(5)))


def test_log_names_have_plain_characters() -> None:
    assert log_name("(root):2") == "root.2"
    assert log_name("layer1.0/attn-b_c") == "layer1.0/attn-b_c"
    assert log_name("β.0") == "_.0"


def test_log_names_of_different_branches_differ() -> None:
    named = {"a:2": "a.2-2", "a.2": "a.2", "β": "_", "δ": "_-2", "(root)": "root-3", "root-2": "root-2", "root": "root"}
    assert log_names(list(named)) == list(named.values())
    history = History(["a:2", "a.2"])
    history.append(0, torch.zeros(4, 2), torch.ones(2), torch.tensor([0.25, 0.5]))
    found = metrics(history)
    assert found["resinit/variance_ratio/a.2"] == 0.5
    assert found["resinit/variance_ratio/a.2-2"] == 0.25
