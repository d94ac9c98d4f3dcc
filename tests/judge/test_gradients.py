import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from networks import WIDTH, Plain, Scaled, encoder, mlp, stack
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

from lit_resinit import GradientError, GradientReport, apply_, check_gradients, make_plan, observe
from lit_resinit.judge.gradients import EXPLODING
from lit_resinit.judge.waking import Waking
from lit_resinit.plan.values import ResidualPlan

X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))


def square(out: Tensor) -> Tensor:
    return (out - 1.0).square().mean()


def judged(
    model: nn.Module, x: Tensor = X, loss_fn: Callable[[Tensor], Tensor] = square, scheme: str = "observe"
) -> GradientReport:
    """The first step of a model, as it is or with a scheme."""
    plan = make_plan(model, x, scheme=scheme)
    apply_(model, plan)
    with observe(model, plan, x) as seen:
        loss_fn(model(x)).backward()
    return seen.gradients


def zeros(build: type = Scaled, depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return stack(lambda: build(value=0.0), depth)


def line_of(mark: str) -> str:
    """``file:line`` of the marked line of this file."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return f"{Path(__file__).name}:{number}"


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


class Masked(Scaled):
    """The branch is multiplied by the last feature."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.f(x) * x[..., -1:]


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
    assert verdict.source.endswith(line_of(status))


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
    assert verdict.source.endswith(line_of("exploding"))
    assert report.ok, "an alarm is only what can never learn"


def test_table_shows_every_verdict_on_its_line() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(value=0.0), Normalised(), nn.Linear(WIDTH, 2))
    header, *rows = judged(model).table().splitlines()
    assert header.split()[:3] == ["parameter", "role", "status"]
    assert [row.split()[0] for row in rows] == ["0.scale", "1.f.2.weight", "1.f.2.bias"]
    assert [row.split()[2] for row in rows] == ["alive", "exploding", "alive"]
    assert line_of("exploding") in rows[1]


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
    assert line_of("slow") in verdict.attenuated_by


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
    assert report.alarms[0].source.endswith(line_of("root"))
    assert report.gates["0.scale"].cause.startswith("inherits")
    assert report.gates["2.scale"].status == "alive"


def test_loss_that_is_not_differentiable_is_the_origin() -> None:
    report = judged(
        nn.Sequential(Scaled(value=0.0), Scaled(value=0.0)), X, lambda out: (out - X).square().mean().sqrt()
    )
    assert {g.status for g in report.gates.values()} == {"nonfinite"}
    assert not report.alarms[0].cause.startswith("inherits")
    assert "not differentiable" in report.alarms[0].cause


# -------------------------------------------------------------------- activation checkpointing


class Shut(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.scale * self.f(x))


class Rooted(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return x + (self.scale * self.f(x)).square().sum(-1, keepdim=True).sqrt().expand_as(x)


class Dropped(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * nn.functional.dropout(self.f(x), 0.5) * torch.ones(len(x), 1)


class Checkpointed(nn.Module):
    """Runs blocks one after the other, each under activation checkpointing in one of its kinds, or plainly."""

    def __init__(self, blocks: list[nn.Module], reentrant: bool | None) -> None:
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(blocks), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def recomputed(build: Callable[[], list[nn.Module]], reentrant: bool | None, nested: bool) -> nn.Module:
    torch.manual_seed(0)
    body = Checkpointed(build(), reentrant)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Checkpointed([body], reentrant) if nested else body, nn.Linear(WIDTH, 2)
    )


BLOCKS: dict[str, Callable[[], list[nn.Module]]] = {
    "alive": lambda: [Scaled(value=0.0), Dropped(value=0.0)],
    "dead": lambda: [Scaled(value=0.0), Shut(value=0.0), Shut(value=0.0)],
    "nonfinite": lambda: [Scaled(value=0.0), Rooted(value=0.0), Scaled(value=0.0)],
    "shared": lambda: [Shut(value=0.0)] * 3,
}


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_checkpointing_changes_no_verdict(blocks: str, reentrant: bool, nested: bool) -> None:
    """Reentrant checkpointing computes the forward without gradients, and once more inside of the backward."""
    for zero_head in (False, True):
        reports, grads = [], []
        for kind in (None, reentrant):
            model = recomputed(BLOCKS[blocks], kind, nested)
            if zero_head:
                nn.init.zeros_(model[2].weight)
            torch.manual_seed(1)
            reports.append({n: repr(g) for n, g in judged(model).gates.items()})
            grads.append([p.grad for p in model.parameters()])
        assert reports[0] == reports[1]
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(("build", "status"), [(Scaled, "alive"), (Shut, "dead"), (Rooted, "nonfinite")])
def test_a_reversible_block_computes_its_input_anew(build: type[Scaled], status: str) -> None:
    """Nothing is saved but the output: the forward runs again on an input that no operation has seen."""

    class Inverted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, block: nn.Module, *parameters: Tensor) -> Tensor:
            ctx.block, out = block, block(2.0 * x)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
            (out,) = ctx.saved_tensors
            x = (out / 2.0).detach().requires_grad_()  # closed, the block is the identity
            with torch.enable_grad():
                again = ctx.block(2.0 * x)
            torch.autograd.backward(again, grad)
            return x.grad, None, *(None for _ in ctx.block.parameters())

    class Reversible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = build(value=0.0)

        def forward(self, x: Tensor) -> Tensor:
            return Inverted.apply(x, self.block, *self.block.parameters())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Reversible(), nn.Linear(WIDTH, 2))
    verdict = judged(model).gates["1.block.scale"]
    assert verdict.status == status, verdict
    if status != "alive":
        assert Path(__file__).name in verdict.source


def test_an_error_in_a_recomputed_forward_leaves_nothing_behind() -> None:
    class Fails(Scaled):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            if self.runs > 2:  # the trace, the forward, and then the recomputed one
                raise KeyError("user error")
            return super().forward(x)

    model = Checkpointed([Fails(value=0.0)], True)
    plan = make_plan(model, X, scheme="observe")
    model.blocks[0].runs = 1

    def step() -> None:
        with observe(model, plan, X):
            square(model(X.clone().requires_grad_())).backward()

    stance = torch._dynamo.eval_frame._stance
    with pytest.raises(KeyError, match="user error"):
        step()
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    assert torch._dynamo.eval_frame._stance == stance


# -------------------------------------------------------------------- hooks on parameters


def zero_gradient(grad: Tensor) -> Tensor:  # zeroing hook
    return grad * 0


def nan_gradient(grad: Tensor) -> Tensor:  # poisoning hook
    return grad * float("nan")


@pytest.mark.parametrize(
    ("hook", "status", "line"), [(zero_gradient, "dead", "zeroing hook"), (nan_gradient, "nonfinite", "poisoning hook")]
)
def test_hook_on_a_gate_is_blamed_for_what_it_does(hook: Callable[[Tensor], Tensor], status: str, line: str) -> None:
    model = zeros()
    model[0].scale.register_hook(lambda grad: None)
    model[1].scale.register_hook(hook)
    gates = judged(model).gates
    verdict = gates["1.scale"]
    assert (gates["0.scale"].status, verdict.status) == ("alive", status)
    assert "a hook on it" in verdict.cause
    assert verdict.source.endswith(line_of(line))


def test_hook_without_effect_is_not_blamed() -> None:
    """A hook that only looks, on a gate whose two uses cancel, or that is dead for a reason of its own."""

    class Cancels(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            u = self.f(x)
            return x + (self.scale * u - self.scale * u)

    class Shut(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.relu(self.scale * self.f(x))  # shut

    for build in (Cancels, Shut):
        model = zeros(build, 1)
        model[0].scale.register_hook(lambda grad: None)
        verdict = judged(model).gates["0.scale"]
        assert verdict.status == "dead"
        assert "hook" not in verdict.cause


@pytest.mark.parametrize(("hook", "status"), [(zero_gradient, "dead"), (nan_gradient, "nonfinite")])
def test_hook_on_the_output_of_a_block_is_blamed_for_what_it_does(
    hook: Callable[[Tensor], Tensor], status: str
) -> None:
    class Hooked(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            out = x + self.scale * self.f(x)  # hooked
            out.register_hook(hook)
            return out

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Hooked(value=0.0), Scaled(value=0.0), nn.Linear(WIDTH, 2))
    gates = judged(model).gates
    verdict = gates["1.scale"]
    assert (verdict.status, gates["2.scale"].status) == (status, "alive")
    assert "a hook on the output of `add`" in verdict.cause
    assert verdict.source.endswith(line_of("hooked"))


def test_nan_of_a_backward_hook_on_a_module_is_not_the_fault_of_an_operation() -> None:
    model = zeros()
    model[1].register_full_backward_hook(lambda module, grad_inputs, grad_outputs: (grad_inputs[0] * float("nan"),))
    gates = judged(model, X.clone().requires_grad_()).gates
    assert (gates["0.scale"].status, gates["1.scale"].status) == ("nonfinite", "alive")
    assert "a hook on it" in gates["0.scale"].cause


# -------------------------------------------------------------------- functions with a backward written in Python


class Product(torch.autograd.Function):
    """The product, with a choice of gradients for the second factor."""

    weight_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @classmethod
    def backward(cls, ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, ctx._forward_cls.weight_gradient(grad, x, weight)


WRITTEN: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "true": ("alive", lambda grad, x, weight: (grad * x).sum().reshape(1)),
    "zeros_like": ("dead", lambda grad, x, weight: torch.zeros_like(weight)),
    "zeros": ("dead", lambda grad, x, weight: torch.zeros(4)[:1]),
    "filled": ("dead", lambda grad, x, weight: (grad * x).sum().reshape(1).zero_()),
    "filled_in": ("alive", lambda grad, x, weight: torch.zeros_like(weight).add_((grad * x).sum())),
    "masked": ("asleep", lambda grad, x, weight: (grad * x * (x > 100.0)).sum().reshape(1)),
    "nan": ("nonfinite", lambda grad, x, weight: torch.full_like(weight, float("nan"))),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_backward_written_in_python_is_blamed_for_what_it_makes(name: str) -> None:
    status, gradient = WRITTEN[name]
    function = type("Chosen", (Product,), {"weight_gradient": staticmethod(gradient)})

    class Custom(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return x + function.apply(self.f(x), self.scale)  # applied

    verdict = judged(zeros(Custom, 1)).gates["0.scale"]
    assert verdict.status == status, verdict
    if status in ("dead", "nonfinite"):
        assert "the backward of `Chosen`" in verdict.cause
        assert verdict.source.endswith(line_of("applied"))


@pytest.mark.parametrize(("negative", "status"), [(False, "dead"), (True, "asleep")])
def test_operations_inside_of_a_function_explain_its_zero(negative: bool, status: str) -> None:
    """A ReLU inside, with its true gradient: no slope at a zero gate; at an open one the values of the batch decide."""

    class Rectified(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return torch.relu(x * weight)

        @staticmethod
        def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            grad = grad * (x * weight > 0)
            return grad * weight, (grad * x).sum().reshape(1)

    class Custom(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return x + Rectified.apply(self.f(x).abs(), self.scale)  # rectified

    model = nn.Sequential(Custom(value=-1.0 if negative else 0.0), nn.Linear(WIDTH, 2))
    verdict = judged(model).gates["0.scale"]
    assert verdict.status == status
    assert not verdict.source or verdict.source.endswith(line_of("rectified"))


# -------------------------------------------------------------------- optimizers that step in the backward


def step_in_backward(model: nn.Module, *, to_none: bool = True) -> None:
    """An optimizer that steps as soon as a gradient is there."""

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        if to_none:
            parameter.grad = None
        else:
            parameter.grad.zero_()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_an_optimizer_used_up_in_the_backward_are_judged(to_none: bool) -> None:
    model = zeros()
    step_in_backward(model, to_none=to_none)
    assert {g.status for g in judged(model).gates.values()} == {"alive"}
    model = zeros()
    nn.init.zeros_(model[2].weight)
    step_in_backward(model, to_none=to_none)
    report = judged(model)
    assert report.gates["0.scale"].waits_for == "2.weight"
    waking = Waking(report, patience=3)
    for _ in range(3):
        square(model(X)).backward()
        waking.step(model)
    assert waking.report.gates["0.scale"].status == "alive"


def test_gradients_that_hooks_move_elsewhere_over_several_backwards_are_judged() -> None:
    """Gradient accumulation by hand; the accumulation of a parameter is a new one in every backward."""
    model, kept = zeros(), {}

    def move(parameter: Tensor) -> None:
        kept[parameter] = kept.get(parameter, 0) + parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(move)
    plan = make_plan(model, X, scheme="observe")
    with observe(model, plan, X) as seen:
        for x in (0.0 * X, X):
            square(model(x)).backward()
    assert {g.status for g in seen.gradients.gates.values()} == {"alive"}


def test_dead_gate_is_dead_where_the_optimizer_steps_in_the_backward() -> None:
    class Shut(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.relu(self.scale * self.f(x))

    model = zeros(Shut)
    step_in_backward(model)
    assert judged(model).gates["0.scale"].status == "dead"


def test_gradients_alone_cannot_tell_what_was_used_up() -> None:
    model = zeros()
    step_in_backward(model)
    assert gates_after_backward(model)[1].ok


def test_hook_that_zeroes_the_accumulated_gradient_is_blamed() -> None:
    model = zeros()
    model[0].scale.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", torch.zeros(1)))
    verdict = judged(model).gates["0.scale"]
    assert (verdict.status, "a hook on it" in verdict.cause) == ("dead", True)


# -------------------------------------------------------------------- without observing, and later


def gates_after_backward(model: nn.Module) -> tuple[ResidualPlan, GradientReport]:
    plan = make_plan(model, X, scheme="observe")
    square(model(X)).backward()
    return plan, check_gradients(model, plan)


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


# -------------------------------------------------------------------- observing


def test_observing_changes_no_value() -> None:
    torch.manual_seed(0)
    plain, watched = zeros(), zeros()
    loss = square(plain(X))
    loss.backward()
    plan = make_plan(watched, X, scheme="observe")
    with observe(watched, plan, X) as seen:
        same = square(watched(X))
        same.backward()
    assert torch.equal(loss, same)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    assert seen.identity.ok


def test_observing_leaves_nothing_behind_after_an_error() -> None:
    model = zeros()
    plan = make_plan(model, X, scheme="observe")

    def step() -> None:
        with observe(model, plan, X):
            model(X)
            raise KeyError("user error")

    with pytest.raises(KeyError, match="user error"):
        step()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.nn.modules.module._global_forward_hooks


def test_reports_are_not_there_before_the_end() -> None:
    model = zeros()
    plan = make_plan(model, X, scheme="observe")
    with observe(model, plan, X) as seen:
        square(model(X)).backward()
        with pytest.raises(RuntimeError, match="observe"):
            _ = seen.gradients
    assert seen.gradients.ok


# -------------------------------------------------------------------- depth


LONG_CHAIN = """
import threading, torch
from torch import nn
from lit_resinit import make_plan, observe

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.gate = nn.Linear(1, 1), nn.Parameter(torch.zeros(1))
    def forward(self, x):
        return x + self.gate * self.f(x)

def main():
    net, x = Block(), torch.randn(2, 1)
    plan = make_plan(net, x)
    def step():
        y = net(x)
        for _ in range(3000):
            y = y * 1.0
        y.sum().backward()
    with observe(net, plan, x) as seen:
        step()
    print(seen.gradients.ok)

threading.stack_size(512 * 1024)
thread = threading.Thread(target=main)
thread.start()
thread.join()
"""


def test_a_long_chain_of_operations_is_let_go_without_recursion() -> None:
    """In a process with a small stack: what recurses over depth would end it."""
    done = subprocess.run([sys.executable, "-c", LONG_CHAIN], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["True"]), done.stderr


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
