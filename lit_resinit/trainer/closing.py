"""Closing the gates of a Trainer's module, once, at the start of a fresh training."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from lit_resinit.errors import NoBranchError, ResInitError, TraceError
from lit_resinit.plan.apply import apply_
from lit_resinit.plan.mark import Applied, applied_plan, mark_applied, mark_of, was_closed
from lit_resinit.plan.values import ResidualPlan, Scheme
from lit_resinit.trainer.copies import fitting_plan
from lit_resinit.trainer.plans import plan_run
from lit_resinit.trainer.setups import may_come_later, refuse_copies, refuse_packed, refuse_sharded

_TOO_LATE = (
    "closing the gates: expected the network and a batch when the callback is set up, found them only after `setup` "
    "and `configure_model`, where the optimizer is built already and no scalar can be inserted. Where only the data "
    "come late, pass `example_inputs`; where the network does, call `apply_(self.net, make_plan(self.net, ...))` at "
    "the end of that `configure_model` (or `setup`), or use scheme='last_layer'."
)


@dataclasses.dataclass(slots=True)
class Closing:
    """The closing of one fit: in ``setup``, or when the fit starts for a network that is built after that.

    Args:
        scheme: How gates are closed; this and the following as in :class:`lit_resinit.ResidualInit`.
        include: Globs on branch names.
        exclude: Globs on branch names.
        example_inputs: Positional inputs of the forward.
        overwrite_trained: Whether branches of trained blocks are closed too.

    Attributes:
        resumed: Whether the fit goes on from a checkpoint: then nothing is closed.
        mark: What an applied plan left on the module; None as long as there is none.
        closed: Whether this fit has closed the gates, so that all that was recorded before is of another start.
        late: Why there was nothing to close in ``setup``, where more may come.
    """

    scheme: Scheme
    include: Any = None
    exclude: Any = None
    example_inputs: Any = None
    overwrite_trained: bool = False
    resumed: bool = False
    mark: Applied | None = None
    closed: bool = False
    late: ResInitError | None = None

    @property
    def moved(self) -> bool:
        """Whether training or a checkpoint has opened the gates, so that there is no identity to prove."""
        return self.mark is not None and self.mark.moved

    def close(self, trainer: Any, module: nn.Module) -> ResidualPlan | None:
        """Close the gates, or recognise those that were; None where the network may come later."""
        found = self._recognised(trainer, module)
        if found is not None:
            return found
        try:
            return self._close(trainer, module, self._fitting_plan(trainer, module))
        except (NoBranchError, TraceError) as error:
            if not may_come_later(module):
                raise
            self.late = error
            return None

    def close_late(self, trainer: Any, module: nn.Module) -> ResidualPlan | None:
        """The second chance of a network built in ``setup`` or ``configure_model``: closing only, no inserting."""
        late, self.late = self.late, None
        if late is None:
            return None
        found = self._recognised(trainer, module)
        if found is not None:
            return found
        self.resumed = self.resumed or trainer.ckpt_path is not None
        refuse_packed(trainer.strategy)
        refuse_sharded(module)
        plan = self._fitting_plan(trainer, module)
        if any(b.action in ("insert", "sqrt_depth") for b in plan.branches):
            raise ResInitError(_TOO_LATE)
        if not self.resumed:
            return self._close(trainer, module, plan)
        refuse_copies(trainer, plan)
        self.mark = mark_applied(module, plan, moved=True)
        return plan

    def _recognised(self, trainer: Any, module: nn.Module) -> ResidualPlan | None:
        """The plan of a module whose gates, or a part's, were closed before: they are only watched."""
        found = applied_plan(module)
        if found is not None:
            name, self.mark = found
            return self.mark.plan.below(name)
        if not was_closed(module):
            return None
        plan = self._plan(trainer, module, "observe")
        self.mark = mark_applied(module, plan, moved=True)
        return plan

    def _close(self, trainer: Any, module: nn.Module, plan: ResidualPlan) -> ResidualPlan:
        refuse_copies(trainer, plan)
        apply_(module, plan, overwrite_trained=self.overwrite_trained)
        self.mark, self.closed = mark_of(module), True
        return plan

    def _fitting_plan(self, trainer: Any, module: nn.Module) -> ResidualPlan:
        plan = self._plan(trainer, module, self.scheme)
        return fitting_plan(module, plan, lambda scheme: self._plan(trainer, module, scheme))

    def _plan(self, trainer: Any, module: nn.Module, scheme: Scheme) -> ResidualPlan:
        return plan_run(trainer, module, scheme, self.include, self.exclude, self.example_inputs)
