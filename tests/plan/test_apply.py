"""Closing, folding, and the parameter groups: what changes and what does not."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from networks import (
    WIDTH,
    ConvBlock,
    NormLast,
    Plain,
    PreActivation,
    Scaled,
    encoder,
    mlp,
    stack,
)
from torch import Tensor, nn

from lit_resinit import (
    FoldError,
    ResInitError,
    apply_,
    check_identity,
    fold_,
    make_plan,
    param_groups,
)
from lit_resinit.plan.values import ResidualPlan

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def closed(build: Callable[[], nn.Module], x: Tensor = X, scheme: str = "auto") -> tuple[nn.Module, ResidualPlan]:
    torch.manual_seed(0)
    model = build()
    plan = make_plan(model, x, scheme=scheme)
    apply_(model, plan)
    return model, plan


def opened(model: nn.Module, plan: ResidualPlan) -> nn.Module:
    """The same model after its gates have moved."""
    with torch.no_grad():
        for number, gate in enumerate(plan.gates):
            model.get_parameter(gate.parameter).fill_(0.3 + 0.2 * number)
    return model


# -------------------------------------------------------------------- applying


CLOSING = [
    (lambda: stack(Plain), "insert"),
    (lambda: stack(Plain), "last_layer"),
    (lambda: stack(Scaled), "zero"),
    (lambda: stack(NormLast), "zero"),
    (lambda: stack(NormLast), "insert"),
]


@pytest.mark.parametrize(("build", "scheme"), CLOSING)
def test_applying_changes_gates_only(build: Callable[[], nn.Module], scheme: str) -> None:
    torch.manual_seed(0)
    before = build().state_dict()
    model, plan = closed(build, scheme=scheme)
    touched = {n for g in plan.gates for n in (g.parameter, *g.biases)}
    after = model.state_dict()
    assert {n for n in before if n not in touched} == {n for n in after if n not in touched}
    assert all(torch.equal(before[n], after[n]) for n in before if n not in touched)
    assert all(not after[n].any() for n in touched)
    assert check_identity(model, plan, X).ok


def test_applying_keeps_the_parameter_objects() -> None:
    torch.manual_seed(0)
    model = stack(Scaled)
    before = list(model.parameters())
    apply_(model, make_plan(model, X))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_applying_twice_is_refused() -> None:
    model, plan = closed(lambda: stack(Plain), scheme="insert")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ResInitError, match="applied before"):
        apply_(model, plan)
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())


@pytest.mark.parametrize("scheme", ["insert", "last_layer"])
def test_plan_of_another_model_is_refused(scheme: str) -> None:
    plan = make_plan(stack(Plain, 3), X, scheme=scheme)
    other = stack(Scaled, 1)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ResInitError, match="another model"):
        apply_(other, plan)
    assert list(before) == list(other.state_dict())
    assert all(torch.equal(before[n], v) for n, v in other.state_dict().items())


def test_an_open_gate_makes_the_branch_speak_again() -> None:
    torch.manual_seed(0)
    plain = stack(Plain)
    model, plan = closed(lambda: stack(Plain), scheme="insert")
    with torch.no_grad():
        for gate in plan.gates:
            model.get_parameter(gate.parameter).fill_(1.0)
    torch.testing.assert_close(model(X), plain(X), rtol=0.0, atol=0.0)


def test_downscale_multiplies_the_last_layer_by_one_over_the_root_of_depth() -> None:
    torch.manual_seed(0)
    before = stack(Plain, 4).state_dict()
    model, _ = closed(lambda: stack(Plain, 4), scheme="downscale")
    for name, value in model.state_dict().items():
        factor = 0.5 if ".f.2." in name else 1.0
        assert torch.equal(value, before[name] * factor)


def test_sqrt_depth_multiplies_the_branch_by_a_constant() -> None:
    torch.manual_seed(0)
    plain = stack(Plain, 4)
    model, plan = closed(lambda: stack(Plain, 4), scheme="sqrt_depth")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert plan.gates == ()
    torch.testing.assert_close(model[0](X), X + 0.5 * plain[0].f(X))


# -------------------------------------------------------------------- folding


FOLDED: list[tuple[Callable[[], nn.Module], Tensor]] = [
    (lambda: stack(Plain), X),
    (encoder, torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))),
    (lambda: nn.Sequential(PreActivation(4), PreActivation(4)), torch.randn(4, 4, 5, 5)),
    (lambda: stack(NormLast), X),
    (lambda: nn.Sequential(ConvBlock(3, 3), ConvBlock(3, 4)), torch.randn(4, 3, 5, 5)),
]


@pytest.mark.parametrize(("build", "x"), FOLDED)
def test_folded_model_computes_the_same_and_loads_strictly(build: Callable[[], nn.Module], x: Tensor) -> None:
    model, plan = closed(build, x, scheme="insert")
    opened(model, plan)
    model.eval()
    before = model(x)
    names = fold_(model)
    assert sorted(names) == sorted(g.parameter for g in plan.gates)
    torch.testing.assert_close(model(x), before, rtol=1e-6, atol=1e-6)
    plain = build().eval()
    plain.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(plain(x), model(x))


def test_folding_twice_finds_nothing_more() -> None:
    model, _ = closed(lambda: stack(Plain), scheme="insert")
    assert len(fold_(model)) == 2
    assert fold_(model) == []


class Squashed(Plain):
    """A branch whose end is no linear function of any weight."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(mlp(), nn.Sigmoid())


class Tied(nn.Module):
    """Two branches that share their last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.Sequential(nn.ReLU(), self.last), nn.Sequential(nn.Tanh(), self.last)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.second(x)


@pytest.mark.parametrize("last", [Squashed, Tied])
def test_what_cannot_be_folded_exactly_changes_nothing(last: Callable[[], nn.Module]) -> None:
    model, plan = closed(lambda: nn.Sequential(Plain(), last()), scheme="insert")
    opened(model, plan)
    before, output = copy.deepcopy(model.state_dict()), model(X)
    with pytest.raises(FoldError):
        fold_(model)
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert torch.equal(model(X), output)


# -------------------------------------------------------------------- parameter groups


@pytest.mark.parametrize(("build", "scheme"), CLOSING)
def test_groups_hold_each_parameter_once_and_gates_without_decay(build: Callable[[], nn.Module], scheme: str) -> None:
    model, plan = closed(build, scheme=scheme)
    rest, gates = param_groups(model, plan, lr=0.1, weight_decay=0.2, gate_lr=0.3)
    assert {id(p) for p in gates["params"]} == {id(model.get_parameter(g.parameter)) for g in plan.gates}
    assert (rest["lr"], rest["weight_decay"], gates["lr"], gates["weight_decay"]) == (0.1, 0.2, 0.3, 0.0)
    held = [id(p) for p in itertools.chain(rest["params"], gates["params"])]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    torch.optim.AdamW([rest, gates])


def test_groups_before_applying_say_what_is_missing() -> None:
    model = stack(Plain)
    with pytest.raises(ResInitError, match="Apply the plan first"):
        param_groups(model, make_plan(model, X, scheme="insert"))


# -------------------------------------------------------------------- ScalarGate


def test_two_outputs_of_one_module_get_a_gate_each_and_fold() -> None:
    class Joint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            both = torch.cat([u, v], -1)
            return self.left(both), self.right(both)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.joint, self.head = Joint(), nn.Linear(2 * WIDTH, 2)

        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            a, b = self.joint(u, v)
            return self.head(torch.cat([u + a, v + b], -1))

    model, inputs = Net(), (torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    plan = make_plan(model, inputs, scheme="insert")
    names = {g.parameter for g in plan.gates}
    assert len(names) == 2
    assert check_identity(apply_(model, plan), plan, inputs).ok
    before = model(*inputs)
    assert set(fold_(model)) == names
    assert torch.allclose(model(*inputs), before)
