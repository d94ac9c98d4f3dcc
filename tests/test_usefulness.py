import copy

import pytest
import torch
from networks import WIDTH, NormLast, Plain, Scaled, stack
from torch import Tensor, nn

from lit_resinit import apply_, make_plan, measure_usefulness

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
