"""A program of somebody else, for a type checker: the public names have types when the package is installed."""

import torch
from torch import nn
from typing_extensions import assert_type

from lit_resinit import (
    Branch,
    Gate,
    GradientReport,
    History,
    IdentityReport,
    ResidualInit,
    ResidualPlan,
    check_gradients,
    check_identity,
    fold_,
    make_plan,
    param_groups,
)


def look(model: nn.Module, x: torch.Tensor) -> list[str]:
    plan = make_plan(model, x, scheme="auto")
    assert_type(plan, ResidualPlan)
    assert_type(plan.branches, tuple[Branch, ...])
    assert_type(plan.gates, tuple[Gate, ...])
    assert_type(check_identity(model, plan, x), IdentityReport)
    assert_type(check_gradients(model, plan), GradientReport)
    optimizer = torch.optim.AdamW(param_groups(model, plan, lr=1e-3))
    optimizer.step()
    callback = ResidualInit(scheme="last_layer", identity="warn")
    assert_type(callback.plan, ResidualPlan | None)
    assert_type(callback.history, History)
    assert_type(callback.history.order(), list[str])
    fold_(model)
    return [branch.name for branch in plan.branches]
