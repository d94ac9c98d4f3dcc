import copy
import math

import numpy
import pytest
import torch
from networks import WIDTH, NormLast, Plain, Scaled, stack
from torch import Tensor, nn

from lit_resinit import History, apply_, make_plan, measure_usefulness
from lit_resinit.watch.agreement import Agreement, agreements, rank_agreement

X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))


def test_usefulness_is_the_loss_without_the_branch_minus_the_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), Scaled())
    target = model(X).detach()

    def loss_fn(out: Tensor) -> Tensor:
        return (out - target).square().mean()

    plan = make_plan(model, X, scheme="observe")
    found = measure_usefulness(model, plan, [X], loss_fn)
    with torch.no_grad():
        without = [float(loss_fn(model[1](X))), float(loss_fn(model[0](X)))]
    assert list(found) == ["0", "1"]
    assert list(found.values()) == pytest.approx(without, rel=1e-5)


def test_a_closed_branch_is_useless() -> None:
    model = nn.Sequential(Scaled(value=0.0), Scaled())
    found = measure_usefulness(model, make_plan(model, X, scheme="observe"), [X], lambda out: out.square().mean())
    assert found["0"] == 0.0
    assert found["1"] != 0.0


def test_both_signatures_of_the_loss_give_the_same() -> None:
    model = stack(NormLast)
    plan = make_plan(model, X, scheme="observe")
    of_output = measure_usefulness(model, plan, [(X,)], lambda out: out.square().mean())
    of_batch = measure_usefulness(model, plan, [X], lambda model, batch: model(batch).square().mean())
    assert of_output == of_batch


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back_bit_for_bit(fails: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), Plain(), nn.Dropout(0.5), NormLast())
    plan = make_plan(model, X)
    apply_(model, plan)
    with torch.no_grad():
        for gate in plan.gates:
            model.get_parameter(gate.parameter).fill_(0.1234567)
    model[2].eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    calls = 0

    def loss_fn(out: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if fails and calls == 2:
            raise KeyError("user error")
        return out.square().mean()

    if fails:
        with pytest.raises(KeyError, match="user error"):
            measure_usefulness(model, plan, [X], loss_fn)
    else:
        measure_usefulness(model, plan, [X, X], loss_fn)
        assert calls == 2 * (1 + len(plan))
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert [m.training for m in model] == [True, True, False, True]
    assert all(p.grad is None for p in model.parameters())


def test_excluded_branches_are_left_out() -> None:
    model = stack(Scaled, 3)
    plan = make_plan(model, X, exclude="1")
    apply_(model, plan)
    assert list(measure_usefulness(model, plan, [X], lambda out: out.square().mean())) == ["0", "2"]


# -------------------------------------------------------------------- the progress bar


def test_a_terminal_sees_a_bar_and_a_file_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stack(Scaled)
    plan = make_plan(model, X, scheme="observe")
    measure_usefulness(model, plan, [X], lambda out: out.square().mean())
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    measure_usefulness(model, plan, [X], lambda out: out.square().mean())
    assert "usefulness of the branches" in capsys.readouterr().err
    measure_usefulness(model, plan, [X], lambda out: out.square().mean(), progress=False)
    assert capsys.readouterr() == ("", "")


# -------------------------------------------------------------------- what agrees with it


@pytest.mark.parametrize("ties", [False, True])
def test_correlation_is_that_of_scipy(ties: bool) -> None:
    stats = pytest.importorskip("scipy.stats")
    generator = numpy.random.default_rng(0)
    x, y = generator.normal(size=(2, 20))
    if ties:
        x, y = numpy.round(x), numpy.round(y)
    found = rank_agreement("x", torch.tensor(x), torch.tensor(y))
    assert found.correlation == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-4)
    drawn = [stats.spearmanr(generator.permutation(x), y).statistic for _ in range(1000)]
    assert [found.low, found.high] == pytest.approx(numpy.quantile(drawn, [0.025, 0.975]), abs=0.08)


@pytest.mark.slow
def test_about_one_in_twenty_random_orders_lies_beyond_chance() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(200, 2, 15, generator=generator)
    beyond = sum(rank_agreement("x", x, y, permutations=200).beyond_chance for x, y in rows)
    assert 2 <= beyond <= 22


def test_random_state_is_left_alone() -> None:
    state = torch.get_rng_state()
    rank_agreement("x", torch.arange(9.0), torch.randn(9, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("values", [[1.0, 2.0], [1.0, 1.0, 1.0, 1.0], [1.0, math.nan, 2.0, math.nan]])
def test_too_few_or_equal_values_have_no_correlation(values: list[float]) -> None:
    found = rank_agreement("x", torch.tensor(values), torch.arange(float(len(values))))
    assert math.isnan(found.correlation)
    assert not found.beyond_chance
    assert "no rank correlation" in str(found)


def test_the_sentence_has_the_numbers_the_verdict_and_the_reliability() -> None:
    assert str(Agreement("early switching on", 0.8, -0.5, 0.5, 12, 0.81)) == (
        "usefulness and early switching on: Spearman correlation +0.80 over 12 branches; random orders give -0.50 to "
        "+0.50 (95 %): beyond chance. Usefulness has a split-half reliability of 0.81, so that about 0.90 is the most."
    )
    assert "not told from chance" in str(Agreement("x", 0.3, -0.5, 0.5, 12, 0.5))


def test_no_correlation_is_told_without_the_reliability_that_bounds_it() -> None:
    text = str(Agreement("x", 0.8, -0.5, 0.5, 12))
    assert "0.8" not in text
    assert "reliability of usefulness is not known" in text


def test_earlier_and_more_useful_is_a_positive_correlation() -> None:
    names = [f"b{i}" for i in range(8)]
    history = History(names, on_ratio=0.5)
    for step in range(6):  # b0 first, b6 and b7 never
        ratio = (torch.arange(8) <= step).float()
        history.append(step, torch.arange(8.0).expand(4, -1), torch.ones(8), ratio)
    useful = {name: 8.0 - i for i, name in enumerate(names)}
    early, estimate = agreements(history, useful)
    assert early.correlation > 0.95
    assert early.beyond_chance
    assert early.branches == 8
    assert estimate.correlation == -1.0
    assert agreements(history, {n: -v for n, v in useful.items()})[0].correlation < -0.95


def test_branches_that_were_not_measured_are_left_out() -> None:
    history = History(list("abcd"))
    history.append(0, torch.arange(4.0).expand(4, -1), torch.ones(4), torch.tensor([4.0, 3.0, 2.0, 1.0]))
    early, estimate = agreements(history, {"a": 1.0, "b": 2.0, "d": 3.0})
    assert (early.branches, estimate.branches) == (3, 3)


def test_the_first_order_estimate_is_right_for_small_gates() -> None:
    torch.manual_seed(0)
    model = stack(Scaled, 12)
    with torch.no_grad():
        for i in range(12):
            model[i].scale.fill_(1e-3 * (i + 1))
    plan = make_plan(model, X, scheme="observe")
    loss = model(X).square().mean()
    loss.backward()
    useful = measure_usefulness(model, plan, [X], lambda out: out.square().mean())
    from lit_resinit.watch.gates import gate_statistics

    history = History([b.name for b in plan.branches])
    history.append(0, gate_statistics(model, plan), torch.ones(12), torch.ones(12))
    assert agreements(history, useful)[1].correlation > 0.9
