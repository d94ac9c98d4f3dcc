"""The first steps of a training on trial: observe, prove, judge, wait, wake, and say each finding once.

One class, for every phase reads what those before it have found and still wait for.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from lit_resinit.errors import GradientError, IdentityError
from lit_resinit.graph.faults import Faults, in_words
from lit_resinit.graph.where import clean_name
from lit_resinit.judge.behind import SilentLayers
from lit_resinit.judge.compare import Reader
from lit_resinit.judge.findings import Finding, act, advice, changed_streams, far_off, still_frozen
from lit_resinit.judge.identity_report import IdentityReport
from lit_resinit.judge.observe import Observation
from lit_resinit.judge.optimizers import STEPS_TO_MOVE, has_rate, not_moved, to_move
from lit_resinit.judge.outlive import KeptGraphs
from lit_resinit.judge.ranks import Agree, alone, any_rank, of_any_rank
from lit_resinit.judge.verdicts import GradientReport
from lit_resinit.judge.waking import Waking, until_stepped, until_unfrozen
from lit_resinit.plan.values import ResidualPlan

__all__ = ["Finding", "Phase", "Trial", "act", "any_rank"]

# Steps that a gradient scaler may skip before its overflow counts as ours: torch's own starts at 2^16 and halves, so
# that twenty are enough for any network whose gradients are finite at all.
SCALER_WAIT = 50
Measured = TypeVar("Measured")
AGAIN = 8  # steps observed after the first verdict at most: a branch that hardly ever runs is not to slow a training


class Phase(enum.Enum):
    """Where a trial stands; it goes down this list, and back up to ``DUE`` where a batch gave no verdict."""

    DUE = "the next batch is observed"
    FORWARD = "a forward is observed"
    BACKWARD = "a forward was observed, its gradients are not judged yet"
    JUDGED = "the gradients were judged, and the optimizer step of that verdict comes next"
    ASLEEP = "some gate sleeps, on this rank or another: every real step is one more look"
    LAST = "the next real step is observed like the first: patience ends with it, or a layer has no gradient"
    AWAKE = "nothing is waited for"


def _nothing() -> None:
    """In place of a weak reference whose object has gone."""


class Trial:
    """The first steps of a training: every finding comes once, from the call in which it is certain.

    The first batch with a loss is observed, its branches compared with their skips, and the gradients of its backward
    judged. Gates that sleep are looked at again at every optimizer step that really happens, until they wake or
    ``patience`` is used up; the step that would use it up is observed as the first one was. A gradient scaler that
    skips steps, and gates whose own optimizer is still to step, are waited for. Two real steps after the verdict, what
    has a gradient has to have moved.

    In a loop of your own either :meth:`step` around forward and backward, or, where more is known, the four calls of
    which it is made. From then on a call costs nothing.

    Args:
        model: The model, with the plan applied; held weakly.
        plan: The plan.
        patience: Optimizer steps that a gate may sleep before it counts as dead.
        agree: Whether any rank found something, given whether this one did; :func:`any_rank` over the ranks of
            ``torch.distributed``, which then all have to make the same calls.
        fresh: Whether the gates are at their closing values still, so that there is an identity to prove.
        unfreezes: Whether parameters that are frozen now are unfrozen later, so that their gates only sleep.

    Attributes:
        phase: The :class:`Phase`.
        identity: The :class:`IdentityReport` of the observed forward; None before it, and where nothing is to prove.
        gradients: The :class:`GradientReport` of the last judged step; None before it.

    Example:
        >>> import torch
        >>> from lit_resinit import apply_, make_plan
        >>> layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True), torch.randn(2, 3, 8)
        >>> plan = make_plan(layer, x)
        >>> optimizer = torch.optim.SGD(apply_(layer, plan).parameters(), lr=0.1)
        >>> trial = Trial(layer, plan)
        >>> for _ in range(4):
        ...     with trial.step(optimizer, x):
        ...         layer(x).square().mean().backward()
        ...     optimizer.step()
        >>> trial.identity.ok, trial.gradients.ok, trial.phase.name
        (True, True, 'AWAKE')
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ResidualPlan,
        patience: int = 3,
        agree: Agree = alone,
        *,
        fresh: bool = True,
        unfreezes: bool = False,
    ) -> None:
        self.phase = Phase.DUE
        self.identity: IdentityReport | None = None
        self.gradients: GradientReport | None = None
        self._model: Callable[[], nn.Module | None] = weakref.ref(model)
        self._plan, self._patience, self._agree = plan, patience, agree
        self._proves, self._unfreezes = fresh, unfreezes
        self._observation: Observation | None = None
        self._waking: Waking | None = None
        self._slept: dict[str, int] = {}  # before the run was resumed
        self._waited = 0  # steps that a scaler skipped
        self._again = 0  # steps observed after the first verdict
        self._steps = 0  # real ones since the verdict
        self._alive: set[str] = set()
        self._said: set[str] = set()  # parameters of alarms
        self._layers = SilentLayers(plan)
        self._faults = Faults()
        self._told = False  # of a fault
        self._graphs = KeptGraphs()

    @property
    def model(self) -> nn.Module:
        """The model."""
        model = self._model()
        assert model is not None, "the model has gone"
        return model

    @property
    def observes(self) -> bool:
        """Whether a step is under observation."""
        return self._observation is not None

    @property
    def due(self) -> bool:
        """Whether the next optimizer step has something to judge."""
        return self.phase is not Phase.AWAKE or self._steps <= STEPS_TO_MOVE

    @property
    def woke(self) -> dict[str, int] | None:
        """After how many real steps each sleeper woke; None before the first verdict."""
        return None if self._waking is None else self._waking.woke

    # ---------------------------------------------------------------- the four calls of a step

    @contextlib.contextmanager
    def step(self, optimizer: Any, batch: Any = ()) -> Iterator[None]:
        """Around forward and backward, before the optimizer's step: raises what stops a run, and warns of the rest."""
        self.before_forward(batch)
        try:
            yield
            act(self.before_step(optimizer))
        except BaseException:
            self.stop()
            raise

    def before_forward(self, batch: Any = (), readers: Sequence[Reader] = ()) -> None:
        """Begin to observe, where that is due; tensors in the batch count as data, and readers measure along."""
        self._graphs.begin_batch()
        if self.phase is Phase.FORWARD:  # of a batch without a loss
            self.drop()
        if self.phase in (Phase.DUE, Phase.LAST):
            self._observe(batch, readers)

    def after_forward(self, loss: Tensor, *, more: bool = False) -> list[Finding]:
        """The forward is done: every branch has to have contributed exactly nothing.

        Args:
            loss: What the backward will start from.
            more: Whether more forwards come before the optimizer's step, which are observed with this one.
        """
        waking = self._waking
        if waking is not None and waking.waiting:
            self._safely(lambda: waking.before_backward(self.model, loss), None)
        if self._observation is None or self.phase is not Phase.FORWARD:
            return []
        self._observation.link(loss)
        return [] if more else self._end_forward()

    def after_backward(self) -> list[Finding]:
        """Judge the first gradients, where they are final now: no scaler, and no other optimizer before this one."""
        return [*self._judge(None), *self._fault()]

    def before_step(self, optimizer: Any, skipped: bool | None = None, held: set[str] | None = None) -> list[Finding]:
        """Judge the gradients, if that is still due, and look at sleepers again.

        Args:
            optimizer: The one that steps, with gradients unscaled.
            skipped: Whether a gradient scaler will skip the step, as far as this rank knows; None without one.
            held: Names of the parameters that this optimizer moves, where there are several; None for all.
        """
        seen = self._observation is not None and self._observation.saw_backward
        findings = self._end_forward() if seen else []
        if not self.due:
            return findings
        if skipped is not None and self._agree(skipped) and self._waited < SCALER_WAIT:
            self._wait()
            return findings
        findings += [*self._judge(held), *self._look_again(optimizer, held), *self._not_moved(optimizer, held)]
        return [*findings, *self._fault()]

    # ---------------------------------------------------------------- between the steps, and at the end

    def end_batch(self, *, accumulates: bool = False) -> None:
        """The batch is over; one that gave no verdict is forgotten, unless more batches lead to the same step."""
        if self._observation is not None:
            self._observation.stop()
            self.phase = Phase.BACKWARD
            if not accumulates:
                self.drop()
        self._graphs.end_batch()

    def drop(self) -> None:
        """Give up what was observed; the next batch is observed instead."""
        if self._observation is not None:
            self._retire()
            self.phase = Phase.DUE if self._waking is None else Phase.LAST

    def stop(self) -> None:
        """Leave no hook or mode behind; a loss that an exception holds may still need its graph."""
        self.drop()

    def close(self) -> None:
        """Leave nothing behind but the reports and the state, which can be pickled."""
        self.stop()
        self._model, self._agree = _nothing, alone
        self._graphs.clear()

    def end(self) -> list[Finding]:
        """The training is over: what was to be unfrozen has to have been."""
        waiting = self.state()["slept"] if self._waking is not None and self._unfreezes else {}
        frozen = [n for n, p in self.model.named_parameters() if clean_name(n) in waiting and not p.requires_grad]
        return still_frozen(frozen)

    def state(self) -> dict[str, Any]:
        """What a resumed run has to know, in plain types."""
        return {"slept": dict(self._slept if self._waking is None else self._waking.slept)}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on with the patience of a run that was interrupted."""
        self._slept = {str(name): int(steps) for name, steps in state["slept"].items()}

    # ---------------------------------------------------------------- what is done in them

    def _observe(self, batch: Any = (), readers: Sequence[Reader] = ()) -> None:
        self._again += self._waking is not None
        self._observation = Observation(self.model, self._plan, batch, readers)
        self._observation.start()
        self.phase = Phase.FORWARD

    def _end_forward(self) -> list[Finding]:
        if self._observation is None or self.phase is not Phase.FORWARD:
            return []
        self._observation.stop()
        self.phase = Phase.BACKWARD
        if not self._proves:
            return []
        self._proves, observation = False, self._observation
        self.identity = self._safely(lambda: observation.identity, None)
        open_ = self.identity is not None and not self.identity.ok
        found = of_any_rank(str(self.identity) if open_ else "", self._agree)
        if found:
            return [Finding("identity", found, IdentityError(found, self.identity))]
        return [] if self.identity is None else changed_streams(self.identity)

    def _judge(self, held: set[str] | None) -> list[Finding]:
        """The first verdict; gates other than those ``held`` by this optimizer may have no gradient yet."""
        report = self._observed() if self._waking is None else None
        if report is None:
            return []
        self.phase = Phase.JUDGED
        report = until_unfrozen(report, self.model) if self._unfreezes else report
        report = until_stepped(report, held) if held is not None else report
        self._waking = waking = Waking(report, self._patience)
        self._alive = to_move(report)
        if self._slept:  # a run that was resumed: this is one more look at those that slept before
            slept, self._slept = self._slept, {}
            report = self._safely(lambda: waking.resume(self.model, slept), report)
        self.gradients = report
        return [*self._alarms(), *far_off(report)]

    def _observed(self) -> GradientReport | None:
        """The verdicts on the step under observation, where its backward ran."""
        if self._observation is None or not self._observation.saw_backward:
            return None
        self._observation.finish(self._layers.silent, () if self._waking is None else self._waking.hidden())
        self._layers.learn(self._observation.inside, self._observation.layers)
        fault = self._observation.faults.first
        self._faults.note(fault)
        report = self._observation.gradients if fault is None else GradientReport({})
        self._retire()
        return report

    def _look_again(self, optimizer: Any, held: set[str] | None) -> list[Finding]:
        """A real step: some gate may have woken, or used up its patience."""
        if self._waking is None or self.phase in (Phase.FORWARD, Phase.AWAKE):
            return []
        found: list[Finding] = []
        if self.phase is not Phase.JUDGED:
            if not has_rate(optimizer):
                self._sleep_on()
                return []
            waking, ends = self._waking, self._ends(held)
            anew = self._observed() if ends or self._layers.silent else None
            waits = ends and self._again < AGAIN
            sleeping = GradientReport({}) if self.gradients is None else self.gradients
            self.gradients = self._safely(lambda: waking.step(self.model, held, anew, waits=waits), sleeping)
            found = [*self._alarms(), *self._named_layers(anew)]
        waiting = self._agree(self._waking.waiting and self._faults.first is None)
        last = self._ends(None) and self._again < AGAIN
        self._sleep_on()
        self.phase = (Phase.LAST if last else Phase.ASLEEP) if waiting else Phase.AWAKE
        if self.phase is Phase.LAST and held is not None:
            self._observe_after(optimizer)
        return found

    def _ends(self, held: set[str] | None) -> bool:
        """Whether one more step uses up the patience with some sleeper, on any rank."""
        waking = self._waking
        return self._agree(waking is not None and self._safely(lambda: waking.ends(self.model, held), False))

    def _sleep_on(self) -> None:
        """What was observed of this step is not needed."""
        if self._observation is not None:
            self._retire()
        self.phase = Phase.ASLEEP

    def _observe_after(self, optimizer: Any) -> None:
        """Of several optimizers another one may step in the same batch: what leads to that is observed."""

        def begin(*_: Any) -> None:
            handle.remove()
            if self.phase is Phase.LAST and self._model() is not None:
                self._observe()

        handle = optimizer.register_step_post_hook(begin)

    def _not_moved(self, optimizer: Any, held: set[str] | None) -> list[Finding]:
        """Some steps after the verdict, what has a gradient should have moved, and what it opens should have one."""
        if self._waking is None or self._steps > STEPS_TO_MOVE:
            return []
        ripe = self._steps == STEPS_TO_MOVE and bool(self._alive)
        self._steps += has_rate(optimizer)
        if not ripe:
            return []
        self._find_silent(held)
        return advice(self._safely(lambda: not_moved(optimizer, self.model, self._plan, self._alive), ""))

    def _alarms(self) -> list[Finding]:
        assert self.gradients is not None
        fresh = {g.parameter for g in self.gradients.alarms} - self._said
        self._said |= fresh
        found = of_any_rank(str(self.gradients) if fresh else "", self._agree)
        return [Finding("gradient", found, GradientError(found, self.gradients))] if found else []

    def _find_silent(self, held: set[str] | None) -> None:
        """Layers without a gradient although their gates are open: the next step is observed, and says why."""
        gradients = self.gradients
        if held is not None or gradients is None:  # of several optimizers each moves a part
            return
        found = self._safely(lambda: self._layers.look(self.model, gradients), False)
        if self._agree(found):
            self._layers.suspect()
            self.phase = Phase.LAST

    def _named_layers(self, anew: GradientReport | None) -> list[Finding]:
        return [] if anew is None else advice(self._layers.in_words())

    def _safely(self, measure: Callable[[], Measured], otherwise: Measured) -> Measured:
        """What is measured, or something else where that fails; every rank goes on in step with the others."""
        with self._faults:
            return measure()
        return otherwise

    def _fault(self) -> list[Finding]:
        """A fault of our own, once."""
        if self._told or self._faults.first is None:
            return []
        self._told = True
        return advice(in_words(self._faults.first, "judging the first steps"))

    def _wait(self) -> None:
        """A step that a scaler skips says nothing; a verdict that is still due needs another batch."""
        self._waited += self._waking is None
        self.drop()

    def _retire(self) -> None:
        """Let go of the observation, but of its graph only when the loss of this batch is gone."""
        if self._observation is not None:
            self._observation.close()
            self._graphs.keep(self._observation.graph)
            self._observation = None
