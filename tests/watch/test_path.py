"""The gate path: it adds up, to what it should, and leaves nothing behind."""

import copy
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import WIDTH, ConvBlock, NormLast, Plain, PreActivation, Scaled, encoder, stack
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lit_resinit
from lit_resinit import ResInitError, apply_, attribute, make_plan, measure_usefulness
from lit_resinit.plan.values import ResidualPlan

X = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))


def square(out: Tensor) -> Tensor:
    return out.square().mean()


def opened(model: nn.Module, x: Any = X, scheme: str = "auto", size: float = 0.3) -> ResidualPlan:
    """Apply a plan, and open its gates and closing biases to random values."""
    plan = make_plan(model, x, scheme=scheme)
    if scheme != "observe":
        apply_(model, plan)
        generator = torch.Generator().manual_seed(1)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name in dict.fromkeys(n for g in plan.gates for n in (g.parameter, *g.biases)):
                parameters[name].add_(size * torch.randn(parameters[name].shape, generator=generator))
    return plan


def loss_at(model: nn.Module, plan: ResidualPlan, part: float, x: Any, loss_fn: Any = square) -> float:
    """The loss of a copy with every gate at this part of its way, in evaluation mode."""
    model = copy.deepcopy(model).eval()
    parameters = dict(model.named_parameters())
    closed = {n: p.detach().clone() for n, p in parameters.items()}
    for gate in plan.gates:
        gate.close_(closed)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(closed[name] + part * (parameter - closed[name]))
        return float(loss_fn(model(x)))


class OnePlus(Scaled):
    """A gate that closes at -1."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (1 + self.scale) * self.f(x)


class Shared(nn.Module):
    """The scales of all blocks in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.alpha = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x + self.alpha[i] * layer(x)
        return x


class Modulated(nn.Module):
    """Gates that a layer computes from a condition, as in DiT."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.modulation(X[:1]).chunk(2, -1)
        x = x + one * self.first(x)
        return x + two * torch.tanh(self.second(x))


def images() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(ConvBlock(3, 8), ConvBlock(8, 8), PreActivation(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return net, torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "norms with biases": lambda: (stack(NormLast, 4), X),
    "inserted scalars": lambda: (stack(Plain, 4), X),
    "closed at minus one": lambda: (stack(OnePlus, 3), X),
    "scales in one parameter": lambda: (Shared(), X),
    "batch norm": images,
    "a transformer": lambda: (encoder(), torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0))),
    "gates that are computed": lambda: (Modulated(), X),
    "dropout": lambda: (nn.Sequential(Plain(), nn.Dropout(0.5), Plain()), X),
    "one block three times": lambda: (nn.Sequential(*[Scaled()] * 3), X),
}


@pytest.mark.parametrize(
    ("name", "scheme"),
    [(n, s) for n in NETWORKS for s in ("auto", "last_layer") if (n, s) != ("gates that are computed", "last_layer")],
)
def test_the_sum_is_the_joint_effect(name: str, scheme: str) -> None:
    torch.manual_seed(0)
    model, x = NETWORKS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lit_resinit.ResInitWarning)
        plan = opened(model, x, scheme)
    found = attribute(model, plan, [x], square)
    whole, closed = (loss_at(model, plan, part, x) for part in (1.0, 0.0))
    assert list(found) == [b.name for b in plan.branches]
    assert found.loss == pytest.approx(whole, rel=1e-5)
    assert found.joint == pytest.approx(closed - whole, rel=1e-4, abs=1e-6)
    assert found.points in (3, 5)
    assert found.total == pytest.approx(found.joint, rel=0.2)
    assert attribute(model, plan, [x], square, points=5).total == pytest.approx(found.joint, rel=0.05)
    assert any(found.values())


def test_each_branch_has_the_integral_of_its_own_gradient() -> None:
    torch.manual_seed(0)
    model = stack(NormLast, 3)
    plan = opened(model)
    found = attribute(model, plan, [X], square, points=5)
    whole = copy.deepcopy(model).eval()
    parameters = dict(whole.named_parameters())
    values = {n: p.detach().clone() for n, p in parameters.items()}
    names = [(f"{i}.norm.weight", f"{i}.norm.bias") for i in range(3)]
    total, many = torch.zeros(3, dtype=torch.float64), 200
    for k in range(many):
        part = (k + 0.5) / many
        for pair in names:
            for n in pair:
                parameters[n].data.copy_(part * values[n])
        grads = torch.autograd.grad(square(whole(X)), [parameters[n] for pair in names for n in pair])
        products = [(g * values[n]).sum() for g, n in zip(grads, [n for pair in names for n in pair], strict=True)]
        total -= torch.stack(products).view(3, 2).sum(1).double() / many
    assert list(found.values()) == pytest.approx(total.tolist(), rel=1e-3)


def test_of_a_quadratic_loss_three_points_are_exact_and_independent_branches_are_their_ablation() -> None:
    class Side(nn.Module):
        """Two branches that write to places of their own."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Mask(slice(0, 4)), Mask(slice(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    class Mask(nn.Module):
        def __init__(self, part: slice) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor([0.7]))
            mask = torch.zeros(WIDTH)
            mask[part] = 1.0
            self.register_buffer("mask", mask)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.scale * (self.mask * torch.tanh(self.layer(x * 0 + 1.0)))

    torch.manual_seed(0)
    model = Side()
    plan = make_plan(model, X, scheme="observe")
    found, closing = (f(model, plan, [X], square) for f in (attribute, measure_usefulness))
    assert found.points == 3
    assert list(found.values()) == pytest.approx(list(closing.values()), rel=1e-3)


def test_branches_that_share_a_gate_share_its_number_equally() -> None:
    model = nn.Sequential(*[Scaled()] * 3)
    found = attribute(model, make_plan(model, X, scheme="observe"), [X], square)
    assert len(set(found.values())) == 1
    assert found.total == pytest.approx(found.joint, rel=0.05)


def test_a_closed_network_has_nothing_to_share() -> None:
    model = stack(Scaled)
    plan = make_plan(model, X)
    apply_(model, plan)
    found = attribute(model, plan, [X], square)
    assert list(found.values()) == [0.0, 0.0]
    assert (found.joint, found.total, found.points) == (0.0, 0.0, 1)
    assert found.loss == pytest.approx(square(model(X)).item(), rel=1e-6)


# -------------------------------------------------------------------- how many points


def test_five_points_where_three_miss_the_joint_effect() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(value=4.0), nn.Linear(WIDTH, 2))
    plan = make_plan(model, X, scheme="observe")

    def steep(out: Tensor) -> Tensor:
        return torch.exp(10.0 * out.square().mean())

    few, many, free = (attribute(model, plan, [X], steep, points=p) for p in (3, 5, None))
    gaps = [abs(f.total - f.joint) / abs(f.joint) for f in (few, many)]
    assert gaps[1] < gaps[0]
    assert free.points == (5 if gaps[0] > 0.2 else 3)
    assert gaps[0] > 0.2


@pytest.mark.parametrize("power", [-1.0, 0.5], ids=["no finite loss", "no finite gradient"])
def test_midpoints_where_the_closed_network_has_none(power: float) -> None:
    model = nn.Sequential(Scaled(value=0.5), Scaled(value=0.5))
    plan = make_plan(model, X, scheme="observe")

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        out = model(x)
        return out.square().mean() + (model[0].scale ** power).sum()

    found = attribute(model, plan, [X], loss_fn)
    assert found.points == 3
    assert all(map(math.isfinite, found.values()))
    assert math.isfinite(found.joint) == (power > 0)


# -------------------------------------------------------------------- what stays behind


class Counting(nn.Module):
    """A buffer, an attribute and a list that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.block = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), NormLast()
        self.register_buffer("count", torch.zeros(1))
        self.calls, self.seen = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls += 1
        self.seen.append(torch.rand(()))
        return self.block(self.drop(self.norm(x)))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("graded", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_everything_is_put_back_bit_for_bit(fails: bool, graded: Any) -> None:
    torch.manual_seed(0)
    model = Counting()
    plan = opened(model)
    model.norm.eval()
    model.block.norm.weight.requires_grad_(False)
    model(X).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    values = {n: None if g is None else g.clone() for n, g in grads.items()}
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    calls, seen = model.calls, list(model.seen)
    hooked = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(hooked.append)
    asked = 0

    def loss_fn(out: Tensor) -> Tensor:
        nonlocal asked
        asked += 1
        if fails and asked == 3:
            raise KeyError("user error")
        return square(out)

    with graded():
        if fails:
            with pytest.raises(KeyError, match="user error"):
                attribute(model, plan, [X, X], loss_fn)
        else:
            assert attribute(model, plan, [X, X], loss_fn).by_batch.shape == (2, 1)
    assert hooked == []
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert (model.calls, model.seen) == (calls, seen)
    assert [m.training for m in (model.norm, model.drop, model)] == [False, True, True]
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["block.norm.weight"]
    for name, parameter in model.named_parameters():
        assert parameter.grad is grads[name]
        assert values[name] is None or torch.equal(parameter.grad, values[name])


def test_a_frozen_gate_is_measured_like_any_other() -> None:
    model = stack(Scaled)
    plan = make_plan(model, X, scheme="observe")
    wanted = attribute(model, plan, [X], square)
    model.requires_grad_(False)
    assert attribute(model, plan, [X], square) == wanted


def test_the_same_random_numbers_are_drawn_at_every_point() -> None:
    model = stack(Scaled)
    plan = make_plan(model, X, scheme="observe")

    def noisy(model: Any, x: Tensor) -> Tensor:
        return square(model(x + torch.randn_like(x)))

    first, second = (attribute(model, plan, [X], noisy) for _ in range(2))
    assert first == second
    assert first.total == pytest.approx(first.joint, rel=0.05)


# -------------------------------------------------------------------- ways to run a network


class Checkpointed(nn.Module):
    """Blocks whose activations are recomputed."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks, self.reentrant = nn.Linear(WIDTH, WIDTH), stack(NormLast, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_blocks_are_measured_as_others_are(reentrant: bool) -> None:
    plain, recomputed = Checkpointed(None), Checkpointed(reentrant)
    found = [attribute(model, opened(model), [X], square) for model in (plain, recomputed)]
    assert found[0] == found[1]
    if reentrant:  # and afterwards the library is as it was
        with pytest.raises(RuntimeError, match="use_reentrant=True"):
            torch.autograd.grad(square(recomputed(X)), [recomputed.stem.weight])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = stack(NormLast, 3)
    plan = opened(model)
    wanted = attribute(model, plan, [X], lambda out: square(out.float()))
    model.to(dtype)
    found = attribute(model, plan, [X.to(dtype)], lambda out: square(out.float()))
    rel = 0.1 if dtype is torch.bfloat16 else 1e-4
    assert list(found.values()) == pytest.approx(list(wanted.values()), rel=rel, abs=rel * abs(wanted.joint))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = stack(NormLast, 3)
    plan = opened(model)

    def mixed(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return square(model(x).float())

    wanted, found = attribute(model, plan, [X], square), attribute(model, plan, [X], mixed, scale=2.0**8)
    assert list(found.values()) == pytest.approx(list(wanted.values()), rel=0.1, abs=0.05 * abs(wanted.joint))


def test_a_small_loss_in_half_precision_needs_the_scale() -> None:
    torch.manual_seed(0)
    model = stack(NormLast, 3)
    plan = opened(model)

    def tiny(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(x).square().float().mean() * 1e-7

    without, scaled = (attribute(model, plan, [X], tiny, scale=s) for s in (1.0, 2.0**12))
    assert scaled.total == pytest.approx(scaled.joint, rel=0.1)
    assert abs(without.total - without.joint) > 0.3 * abs(without.joint)


@pytest.mark.slow
def test_a_compiled_network_runs_uncompiled_and_stays_compiled() -> None:
    torch.manual_seed(0)
    model = stack(NormLast, 3)
    plan = opened(model)
    wanted = attribute(model, plan, [X], square)
    compiled = torch.compile(model, backend="eager")
    compiled(X)
    assert attribute(compiled, plan, [X], square) == wanted


def test_both_signatures_of_the_loss_give_the_same() -> None:
    model = stack(NormLast)
    plan = opened(model)
    of_output = attribute(model, plan, [(X,)], square)
    assert of_output == attribute(model, plan, [X], lambda model, batch: square(model(batch)))


def test_batches_are_averaged_and_kept_apart() -> None:
    model = stack(NormLast)
    plan = opened(model)
    apart = [attribute(model, plan, [x], square) for x in X.split(8)]
    both = attribute(model, plan, list(X.split(8)), square)
    wanted = torch.tensor([list(a.values()) for a in apart], dtype=torch.float64)
    torch.testing.assert_close(both.by_batch, wanted, rtol=1e-5, atol=1e-8)
    assert both["0"] == pytest.approx((apart[0]["0"] + apart[1]["0"]) / 2, rel=1e-5)


def test_excluded_branches_stay_as_they_are() -> None:
    model = stack(Scaled, 3)
    plan = make_plan(model, X, exclude="1", scheme="observe")
    assert list(attribute(model, plan, [X], square)) == ["0", "2"]


@pytest.mark.parametrize("loss_fn", [lambda out: square(out.detach()), lambda out: torch.tensor(1.0)])
def test_a_loss_without_gradient_is_refused(loss_fn: Any) -> None:
    model = stack(Scaled)
    with pytest.raises(ResInitError, match="expected a loss with a gradient"):
        attribute(model, make_plan(model, X, scheme="observe"), [X], loss_fn)


@pytest.mark.parametrize("measure", [attribute, functools.partial(measure_usefulness, progress=False)])
def test_no_batch_is_refused(measure: Any) -> None:
    model = stack(Scaled)
    with pytest.raises(ResInitError, match="at least one batch"):
        measure(model, make_plan(model, X, scheme="observe"), [], square)


def test_a_plan_without_gates_has_a_loss_and_nothing_else() -> None:
    model = stack(Plain)
    plan = make_plan(model, X, scheme="sqrt_depth")
    apply_(model, plan)
    found = attribute(model, plan, [X], square)
    assert dict(found) == {}
    assert found.loss == pytest.approx(square(model(X)).item(), rel=1e-6)
