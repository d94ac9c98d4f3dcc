"""The plan of a Trainer's run: a trace with the first inputs that the forward takes."""

from __future__ import annotations

from typing import Any

from torch import nn

from lit_resinit.errors import TraceError
from lit_resinit.graph.trace import Run, call_model
from lit_resinit.plan.make import check_arguments, plan_forward
from lit_resinit.plan.values import ResidualPlan, Scheme
from lit_resinit.trainer.inputs import candidates, training_step


def plan_run(
    trainer: Any, module: nn.Module, scheme: Scheme, include: Any, exclude: Any, example_inputs: Any
) -> ResidualPlan:
    """What would be done to a module that a Trainer is about to fit; nothing is changed.

    Raises:
        TraceError: If no inputs fit; it says which were tried.
        NoBranchError: If the forward has no residual branch.
    """
    check_arguments(module, scheme, include, exclude)
    tried: list[str] = []
    for what, inputs in candidates(trainer, module, example_inputs, tried):
        run: Run = call_model if what != "a batch of the training data" else training_step(trainer)
        try:
            return plan_forward(module, inputs, {}, run, scheme, include, exclude)
        except TraceError as error:
            tried.append(f"{what}: {error}")
    raise TraceError(
        "tracing one forward: tried " + ("; ".join(tried) or "nothing, for there is no training data") + ". Pass "
        "`ResidualInit(example_inputs=...)`, or set `example_input_array` on the module. Nothing was changed."
    )
