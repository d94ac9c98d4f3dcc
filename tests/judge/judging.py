"""The first step of a small network, judged."""

from collections.abc import Callable

import torch
from networks import WIDTH, Scaled, stack
from torch import Tensor, nn

from lit_resinit import GradientReport, apply_, check_gradients, make_plan, observe
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


class Masked(Scaled):
    """The branch is multiplied by the last feature."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.f(x) * x[..., -1:]


def gates_after_backward(model: nn.Module) -> tuple[ResidualPlan, GradientReport]:
    plan = make_plan(model, X, scheme="observe")
    square(model(X)).backward()
    return plan, check_gradients(model, plan)
