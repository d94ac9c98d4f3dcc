"""Alive, asleep, dead, missing, nonfinite or exploding: the verdict on every gate after one step."""

from collections.abc import Callable

import pytest
import torch
from judging import Masked, X, gates_after_backward, judged, square, zeros
from marks import line_of
from networks import WIDTH, Plain, Scaled, encoder, mlp, stack
from torch import Tensor, nn
from torch.nn.functional import normalize

from lit_resinit import GradientError, apply_, check_gradients, make_plan, observe
from lit_resinit.judge.steep import EXPLODING

# -------------------------------------------------------------------- alive and asleep


@pytest.mark.parametrize("scheme", ["auto", "insert", "last_layer"])
def test_closed_gates_are_alive(scheme: str) -> None:
    torch.manual_seed(0)
    report = judged(stack(Plain), scheme=scheme)
    report.raise_if_dead()
    assert {g.status for g in report.gates.values()} == {"alive"}
    assert all(g.size > 0 for g in report.gates.values())


def test_gates_and_biases_and_zero_layers_are_judged() -> None:
    model = stack(Plain)
    nn.init.zeros_(model[2].weight)
    roles = {n: g.role for n, g in judged(model, scheme="last_layer").gates.items()}
    assert roles == {
        **{f"{i}.f.2.weight": "gate" for i in range(2)},
        **{f"{i}.f.2.bias": "bias" for i in range(2)},
        "2.weight": "zero layer",
    }


def test_zero_head_lets_gates_sleep_and_names_itself() -> None:
    model = zeros()
    nn.init.zeros_(model[2].weight)
    gates = judged(model).gates
    assert [(gates[f"{i}.scale"].status, gates[f"{i}.scale"].waits_for) for i in range(2)] == [
        ("asleep", "2.weight")
    ] * 2
    assert gates["2.weight"].status == "alive"


def test_frozen_zero_head_kills_gates() -> None:
    model = zeros()
    nn.init.zeros_(model[2].weight)
    model[2].weight.requires_grad_(False)
    report = judged(model)
    assert {g.status for g in report.alarms} >= {"dead"}
    assert report.gates["0.scale"].status == "dead"
    assert "2.weight is zero and frozen" in report.gates["0.scale"].cause


def test_masked_batch_says_nothing_yet() -> None:
    x = X.clone()
    x[:, -1] = 0.0
    verdict = judged(nn.Sequential(Masked(value=0.0), nn.Linear(WIDTH, 2)), x).gates["0.scale"]
    assert (verdict.status, verdict.waits_for) == ("asleep", None)


def test_balanced_labels_that_cancel_say_nothing_yet() -> None:
    """A closed network that sees only a class token sends the head errors that cancel in a balanced batch."""

    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
            self.body, self.head = encoder(), nn.Linear(WIDTH, 2)
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(torch.cat([self.token.expand(len(x), -1, -1), x], dim=1))[:, 0])

    labels = torch.tensor([0, 1, 0, 1])
    report = judged(Token(), torch.randn(4, 3, WIDTH), lambda out: nn.functional.cross_entropy(out, labels), "auto")
    assert report.ok, str(report)
    assert report.gates["head.weight"].status == "asleep"


def test_branch_that_the_batch_skips_is_asleep() -> None:
    class Sometimes(Scaled):
        run = True

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.run else x

    model = nn.Sequential(Sometimes(value=0.0), Sometimes(value=0.0), nn.Linear(WIDTH, 2))
    plan = make_plan(model, X, scheme="observe")
    model[0].run = False
    with observe(model, plan, X) as seen:
        square(model(X)).backward()
    assert [seen.gradients.gates[f"{i}.scale"].status for i in range(2)] == ["asleep", "alive"]


# -------------------------------------------------------------------- dead and missing


DEAD: dict[str, Callable[[Scaled, Tensor], Tensor]] = {
    "relu": lambda block, x: torch.relu(block.scale * block.f(x)),
    "relu6": lambda block, x: nn.functional.relu6(block.scale * block.f(x)),
    "absolute": lambda block, x: (block.scale * block.f(x)).abs(),
    "squared": lambda block, x: block.f(x) * block.scale.square(),
    "two_zeros": lambda block, x: block.scale * (block.f(x) * torch.zeros_like(block.scale)),
}


@pytest.mark.parametrize("name", DEAD)
def test_gates_that_can_never_learn_are_dead(name: str) -> None:
    class Shut(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return x + DEAD[name](self, x)

    report = judged(zeros(Shut, 1))
    verdict = report.gates["0.scale"]
    assert verdict.status == "dead", verdict
    assert verdict.source.startswith(__file__)
    with pytest.raises(GradientError, match=r"0\.scale"):
        report.raise_if_dead()


def test_two_zero_parameters_in_series_name_each_other() -> None:
    model = nn.Sequential(Plain(), nn.Linear(WIDTH, 2))
    for layer in (model[0].f[0], model[0].f[2]):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    report = judged(model)
    assert report.gates["0.f.2.weight"].status == "dead"
    assert "0.f.0." in report.gates["0.f.2.weight"].cause


def test_frozen_gate_is_missing() -> None:
    model = zeros()
    model[0].scale.requires_grad_(False)
    verdict = judged(model).gates["0.scale"]
    assert verdict.status == "missing"
    assert "frozen" in verdict.cause


def test_detached_gate_is_missing() -> None:
    class Detached(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return x + (self.scale * self.f(x)).detach()

    verdict = judged(nn.Sequential(Detached(value=0.0), nn.Linear(WIDTH, 2))).gates["0.scale"]
    assert verdict.status == "missing"
    assert "detached" in verdict.cause


# -------------------------------------------------------------------- soft bounds, with the line


def guarded_to_zero(v: Tensor, bound: float = 2.0) -> Tensor:
    length = v.norm(dim=-1, keepdim=True)
    factor = torch.where(length > 0, bound * torch.tanh(length / bound) / length.clamp(min=1e-12), 0.0 * length)
    return factor * v  # dead


def guarded_to_one(v: Tensor, bound: float = 2.0) -> Tensor:
    length = v.norm(dim=-1, keepdim=True)
    quotient = bound * torch.tanh(length / bound) / length  # nonfinite
    return torch.where(length > 0, quotient, torch.ones_like(length)) * v


def safe(v: Tensor, bound: float = 2.0) -> Tensor:
    length = v.norm(dim=-1, keepdim=True)
    divisor = torch.where(length > 0, length, torch.ones_like(length))
    return torch.where(length > 0, bound * torch.tanh(divisor / bound) / divisor, torch.ones_like(length)) * v


class Bounded(nn.Module):
    def __init__(self, bound: Callable[[Tensor], Tensor], residual: bool) -> None:
        super().__init__()
        self.bound, self.residual, self.f = bound, residual, mlp()
        nn.init.zeros_(self.f[2].weight)
        nn.init.zeros_(self.f[2].bias)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bound(self.f(x))
        return x + out if self.residual else out


@pytest.mark.parametrize("residual", [False, True], ids=["no_skip", "in_a_block"])
@pytest.mark.parametrize(("bound", "status"), [(guarded_to_zero, "dead"), (guarded_to_one, "nonfinite")])
def test_broken_bound_is_named_with_its_line(bound: Callable[[Tensor], Tensor], status: str, residual: bool) -> None:
    verdict = judged(Bounded(bound, residual)).gates["f.2.weight"]
    assert verdict.status == status
    assert verdict.source.endswith(line_of(__file__, status))


@pytest.mark.parametrize("residual", [False, True], ids=["no_skip", "in_a_block"])
def test_safe_bound_is_alive(residual: bool) -> None:
    report = judged(Bounded(safe, residual))
    assert {g.status for g in report.gates.values()} == {"alive"}
    assert report.ok


# -------------------------------------------------------------------- sizes


class Normalised(Scaled):
    """Normalises a vector that is zero at the start."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.f[2].weight)
        nn.init.zeros_(self.f[2].bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.normalize(self.f(x), dim=-1)  # exploding


def test_normalisation_of_a_zero_vector_explodes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled(value=0.0) for _ in range(3)), Normalised(), nn.Linear(WIDTH, 2))
    report = judged(model)
    verdict = report.gates["3.f.2.weight"]
    assert verdict.status == "exploding"
    assert verdict.size > EXPLODING * report.gates["0.scale"].size
    assert verdict.source.endswith(line_of(__file__, "exploding"))
    assert report.ok, "an alarm is only what can never learn"


def test_table_shows_every_verdict_on_its_line() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(value=0.0), Normalised(), nn.Linear(WIDTH, 2))
    header, *rows = judged(model).table().splitlines()
    assert header.split()[:3] == ["parameter", "role", "status"]
    assert [row.split()[0] for row in rows] == ["0.scale", "1.f.2.weight", "1.f.2.bias"]
    assert [row.split()[2] for row in rows] == ["alive", "exploding", "alive"]
    assert line_of(__file__, "exploding") in rows[1]


def test_gradients_without_digits_do_not_make_the_others_explode() -> None:
    """Gradients below the smallest normal number say nothing of size."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled(value=0.0) for _ in range(4)))
    plan = make_plan(model, X)
    model(X).square().mean().backward()
    for block in model[:3]:
        block.scale.grad.fill_(1e-42)
    assert {g.status for g in check_gradients(model, plan).gates.values()} == {"alive"}


def test_rounding_noise_is_not_alive() -> None:
    class Cancels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.norm = Scaled(value=0.0), nn.LayerNorm(WIDTH, elementwise_affine=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.block(x))

    verdict = judged(Cancels(), loss_fn=lambda out: out.sum()).gates["block.scale"]
    assert verdict.size > 0
    assert verdict.status == "dead"
    assert "rounding" in verdict.cause


class LayerScaled(Plain):
    """A small LayerScale after the zeroed layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((WIDTH,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.f(x)  # slow


def test_slope_of_a_small_layer_scale_after_a_zeroed_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LayerScaled(), nn.Linear(WIDTH, 2))
    nn.init.zeros_(model[0].f[2].weight)
    nn.init.zeros_(model[0].f[2].bias)
    verdict = judged(model).gates["0.f.2.weight"]
    assert verdict.status == "alive"
    assert verdict.slope == pytest.approx(1e-6, rel=0.01)
    assert line_of(__file__, "slow") in verdict.attenuated_by


def test_slope_of_a_trailing_gate_is_one() -> None:
    assert judged(zeros()).gates["0.scale"].slope == pytest.approx(1.0, rel=1e-6)


def test_silent_channels_are_counted() -> None:
    model = nn.Sequential(Scaled(value=0.0, size=WIDTH), nn.Linear(WIDTH, 2))
    with torch.no_grad():
        model[1].weight[:, :3] = 0.0
    verdict = judged(model).gates["0.scale"]
    assert (verdict.status, verdict.cause) == ("alive", f"3 of {WIDTH} elements have no gradient")


# -------------------------------------------------------------------- NaN, and who is to blame


def test_nan_is_blamed_on_the_block_nearest_the_output() -> None:
    class Rooted(Normalised):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.f(x).square().sum(-1, keepdim=True).sqrt().expand_as(x)  # root

    torch.manual_seed(0)
    model = nn.Sequential(Scaled(value=0.0), Rooted(), Scaled(value=0.0), nn.Linear(WIDTH, 2))
    report = judged(model)
    assert report.alarms[0].parameter == "1.f.2.weight"
    assert report.alarms[0].source.endswith(line_of(__file__, "root"))
    assert report.gates["0.scale"].cause.startswith("inherits")
    assert report.gates["2.scale"].status == "alive"


def test_loss_that_is_not_differentiable_is_the_origin() -> None:
    report = judged(
        nn.Sequential(Scaled(value=0.0), Scaled(value=0.0)), X, lambda out: (out - X).square().mean().sqrt()
    )
    assert {g.status for g in report.gates.values()} == {"nonfinite"}
    assert not report.alarms[0].cause.startswith("inherits")
    assert "not differentiable" in report.alarms[0].cause


# -------------------------------------------------------------------- without observing


class Shut(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.scale * self.f(x))


class Rooted(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return x + (self.scale * self.f(x)).square().sum(-1, keepdim=True).sqrt().expand_as(x)


def test_gradients_alone_tell_alive_asleep_and_missing() -> None:
    assert gates_after_backward(zeros())[1].gates["0.scale"].status == "alive"
    model = zeros()
    nn.init.zeros_(model[2].weight)
    report = gates_after_backward(model)[1]
    assert report.gates["0.scale"].waits_for == "2.weight"
    model = zeros()
    model[1].scale.requires_grad_(False)
    assert gates_after_backward(model)[1].gates["1.scale"].status == "missing"


def test_gradients_alone_point_to_observe_for_a_nan() -> None:
    model = zeros()
    plan = make_plan(model, X, scheme="observe")
    (square(model(X)) * float("nan")).backward()
    verdict = check_gradients(model, plan).gates["0.scale"]
    assert verdict.status == "nonfinite"
    assert "observe" in verdict.cause


# -------------------------------------------------------------------- beside each other


def test_a_healthy_gate_beside_a_quiet_one_does_not_explode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(value=0.0), Scaled(value=0.0), nn.Linear(WIDTH, 2))
    with torch.no_grad():
        for parameter in model[1].f.parameters():
            parameter.mul_(1e-8)
    plan = make_plan(model, X, scheme="observe")
    with observe(model, plan, X) as seen:
        model(X).square().mean().backward()
    assert {g.status for g in seen.gradients.gates.values()} == {"alive"}


def test_two_exploding_gates_are_named_without_a_healthy_one_beside_them() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.g = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return x + normalize(self.g * self.f(x), dim=-1)

    model, x = nn.Sequential(Normalised(), Normalised()), torch.randn(8, WIDTH)
    plan = make_plan(model, x, scheme="observe")
    with observe(model, plan, x) as seen:
        model(x).square().mean().backward()
    assert {g.status for g in seen.gradients.gates.values()} == {"exploding"}


class PoisonedInside(Scaled):
    """An operation before the gate spoils the errors of the layers there, and the gate has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        v = self.f(x)
        w = v / v.detach()
        v = torch.where(v != 0, v, (w - 1.0).abs().sqrt())  # it has no slope
        return x + self.scale * v


@pytest.mark.parametrize("depth", [1, 2])
def test_nan_in_a_layer_that_is_no_gate_is_an_alarm_with_its_line(depth: int) -> None:
    """One optimizer step later it is in every value, and no line is known any more."""
    model = zeros(PoisonedInside, depth)
    report = judged(model)
    assert model[-2].scale.grad.isfinite().all()
    (first, *_) = report.alarms
    assert (first.status, first.role) == ("nonfinite", "layer" if depth == 1 else "gate")
    assert line_of(__file__, "it has no slope") in first.source


class HardMixture(nn.Module):
    """Three branches, of which a draw takes one for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("taken", torch.tensor([0, 2, 0, 2, 0, 2]))

    def forward(self, x: Tensor) -> Tensor:
        chosen = nn.functional.one_hot(self.taken[torch.randperm(len(x))], 3).to(x)
        return x + (torch.stack([expert(x) for expert in self.experts], -1) * chosen[:, None]).sum(-1)


def test_a_branch_that_no_row_takes_sleeps_and_no_stacking_is_to_blame() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(HardMixture(), nn.Linear(WIDTH, 2)), torch.randn(6, WIDTH)
    plan = make_plan(model, x)
    apply_(model, plan)
    with observe(model, plan, x) as seen:
        model(x).square().mean().backward()
    found = {name: gate.status for name, gate in seen.gradients.gates.items()}
    assert found == {f"0.experts.{i}.residual_gate": "asleep" if i == 1 else "alive" for i in range(3)}
