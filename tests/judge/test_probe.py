"""How the error is recorded: activation checkpointing, hooks, backwards in Python, optimizers in the backward."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from judging import X, judged, square, zeros
from marks import line_of
from networks import WIDTH, Scaled
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_resinit import GradientReport, check_gradients, make_plan, observe
from lit_resinit.judge.waking import Waking
from lit_resinit.plan.values import ResidualPlan

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
    assert verdict.source.endswith(line_of(__file__, line))


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
    assert verdict.source.endswith(line_of(__file__, "hooked"))


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
        assert verdict.source.endswith(line_of(__file__, "applied"))


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
    assert not verdict.source or verdict.source.endswith(line_of(__file__, "rectified"))


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


def test_hook_that_zeroes_the_accumulated_gradient_is_blamed() -> None:
    model = zeros()
    model[0].scale.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", torch.zeros(1)))
    verdict = judged(model).gates["0.scale"]
    assert (verdict.status, "a hook on it" in verdict.cause) == ("dead", True)


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


@pytest.mark.slow
def test_a_long_chain_of_operations_is_let_go_without_recursion() -> None:
    """In a process with a small stack: what recurses over depth would end it."""
    done = subprocess.run([sys.executable, "-c", LONG_CHAIN], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["True"]), done.stderr


def test_gradients_alone_cannot_tell_what_was_used_up() -> None:
    model = zeros()
    step_in_backward(model)
    assert gates_after_backward(model)[1].ok


def gates_after_backward(model: nn.Module) -> tuple[ResidualPlan, GradientReport]:
    plan = make_plan(model, X, scheme="observe")
    square(model(X)).backward()
    return plan, check_gradients(model, plan)
