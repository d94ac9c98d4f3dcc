"""The plan of a Trainer's run: a trace with the first inputs that the forward takes."""

from __future__ import annotations

from typing import Any

from torch import nn

from lit_resinit.errors import TraceError
from lit_resinit.plan.make import check_arguments, plan_forward
from lit_resinit.plan.values import ResidualPlan, Scheme
from lit_resinit.trainer.inputs import apart, candidates
from lit_resinit.trainer.ranks import agreed_plan


def plan_run(
    trainer: Any, module: nn.Module, scheme: Scheme, include: Any, exclude: Any, example_inputs: Any
) -> ResidualPlan:
    """What would be done to a module that a Trainer is about to fit, the same on all ranks; nothing is changed.

    Raises:
        TraceError: If no inputs fit; it says which were tried.
        NoBranchError: If the forward has no residual branch.
    """
    check_arguments(module, scheme, include, exclude)

    def own() -> ResidualPlan:
        return _own_plan(trainer, module, scheme, include, exclude, example_inputs)

    return agreed_plan(trainer, module, own)


def _own_plan(
    trainer: Any, module: nn.Module, scheme: Scheme, include: Any, exclude: Any, example_inputs: Any
) -> ResidualPlan:
    tried: list[str] = []
    for what, inputs, run in candidates(trainer, module, example_inputs, tried):
        try:
            with apart(trainer, module):
                return plan_forward(module, inputs, {}, run, scheme, include, exclude)
        except TraceError as error:
            tried.append(f"{what}: {error}")
    raise TraceError(
        "tracing one forward: tried " + ("; ".join(tried) or "nothing, for there is no training data") + ". Pass "
        "`ResidualInit(example_inputs=...)`, or set `example_input_array` on the module. Nothing was changed."
    )
