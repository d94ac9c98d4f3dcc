"""Forward and backward of one step under observation, for both verdicts."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from lit_resinit.errors import warn
from lit_resinit.graph.eager import eager
from lit_resinit.graph.faults import Faults, in_words
from lit_resinit.judge.behind import layers_inside
from lit_resinit.judge.compare import Reader
from lit_resinit.judge.gradients import judge_layers, judge_step
from lit_resinit.judge.identity_report import IdentityReport
from lit_resinit.judge.probe import GradientProbe
from lit_resinit.judge.step import Judged
from lit_resinit.judge.verdicts import GateGradient, GradientReport
from lit_resinit.plan.values import ResidualPlan, check_plan

_WHAT = "judging the observed step"


class Observation:
    """What :func:`observe` saw: ``identity`` once the forward is done, ``gradients`` after the block.

    An exception of ours is kept in ``faults``, and from then on nothing is observed.
    """

    def __init__(self, model: nn.Module, plan: ResidualPlan, inputs: Any = (), readers: Sequence[Reader] = ()) -> None:
        self._model, self._plan, self._inputs, self._readers = model, plan, inputs, readers
        self._probe: GradientProbe | None = None
        self._exit = contextlib.ExitStack()
        self._identity: IdentityReport | None = None
        self._gradients: GradientReport | None = None
        self.inside: dict[str, str] = {}  # see `layers_inside`
        self.layers: list[GateGradient] = []  # the verdicts on those that were asked for
        self.faults = Faults()
        self.graph: list[Any] = []  # see `Errors.release`

    @property
    def identity(self) -> IdentityReport:
        """Verdicts on the branches as the observed forward ran them."""
        if self._identity is None:
            if self.faults.first is not None:
                raise RuntimeError(in_words(self.faults.first, _WHAT)) from self.faults.first
            if self._probe is None:
                raise RuntimeError("Expected an observed forward but none ran inside `with observe(...)`")
            self._identity = self._probe.identity()
        return self._identity

    @property
    def gradients(self) -> GradientReport:
        """Verdicts on the gates after the observed backward."""
        if self._gradients is None:
            if self.faults.first is not None:
                raise RuntimeError(in_words(self.faults.first, _WHAT)) from self.faults.first
            raise RuntimeError("Expected a finished `with observe(...)` block around one forward and backward")
        return self._gradients

    @property
    def saw_backward(self) -> bool:
        """Whether a backward pass ran yet, as far as that is still known."""
        return self.faults.first is not None or (self._probe is not None and self._probe.saw_backward)

    def start(self) -> None:
        """Begin to observe."""
        with self.faults:
            self._probe = GradientProbe(self._model, self._plan, self._inputs, self._readers, self.faults)
            self._exit.enter_context(eager())
            self._exit.enter_context(self._probe)

    def stop(self) -> None:
        """Stop recording operations; the hooks on the autograd graph stay until :meth:`finish`."""
        if self._probe is not None:
            self._probe.close_windows()
        self._exit.close()

    def finish(self, layers: Collection[str] = (), known: Sequence[Judged] = ()) -> None:
        """Judge what was seen, and let go of everything that was held for it.

        Args:
            layers: Layers to judge besides.
            known: What earlier steps have judged besides the plan's.
        """
        self.stop()
        if self._probe is not None and self.faults.first is None:
            with self.faults:
                _ = self.identity
                flow = self._probe.flow()
                report = judge_step(self._model, self._plan, flow, known)
                reached = any(isinstance(target, str) for target in flow.edges)  # a parameter of this model
                self._gradients = report if reached else _without_backward(report)
                self.inside = layers_inside(self._plan, flow)
                self.layers = judge_layers(self._model, self._plan, flow, layers) if reached and layers else []
        self.close()

    def link(self, loss: Tensor) -> None:
        """Let the backward of ``loss`` itself be seen too."""
        if self._probe is not None and self.faults.first is None:
            with self.faults:
                self._probe.link(loss)

    def close(self) -> None:
        """Leave no hook, mode or tensor behind."""
        self.stop()
        if self._probe is not None:
            with self.faults:
                self.graph = self._probe.release()
            self._probe = None


def _without_backward(report: GradientReport) -> GradientReport:
    """No gradient is of this step: what an earlier one left says nothing of it."""
    why = "no backward of this model ran inside the block; the gradient on it is of an earlier step"
    remedy = "run one forward and `loss.backward()` of this model inside `with observe(...)`"
    return GradientReport(
        {
            name: gate
            if math.isnan(gate.size)
            else dataclasses.replace(gate, status="missing", cause=why, source="", waits_for=None, remedy=remedy)
            for name, gate in report.gates.items()
        }
    )


@contextlib.contextmanager
def observe(model: nn.Module, plan: ResidualPlan, inputs: Any = ()) -> Iterator[Observation]:
    """Watch one forward and backward of yours, and judge both.

    Every operation is recorded with its module and line, every addition of the plan is compared with its skip, and the
    error is measured on both sides of every operation of the backward pass. Nothing is computed twice and no value of
    yours changes.

    Args:
        model: The model, with the plan applied.
        plan: The plan.
        inputs: The batch, if at hand; without it every tensor that is no parameter, no buffer and was not made in the
            forward counts as data.

    Yields:
        An :class:`Observation`; ``identity`` and ``gradients`` are ready after the block.

    Note:
        Cost: one to three plain steps (``benchmarks/overhead.py``), more where a checkpointed forward is run again.
        Compiled modules run uncompiled inside.

    Example:
        >>> import torch
        >>> from lit_resinit import apply_, make_plan
        >>> layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True), torch.randn(2, 3, 8)
        >>> plan = make_plan(layer, x)
        >>> _ = apply_(layer, plan)
        >>> with observe(layer, plan, x) as seen:
        ...     layer(x).square().mean().backward()
        >>> seen.identity.ok, seen.gradients.ok
        (True, True)

    Reference:
        Pradeep (2026), A zero-initialised layer learns only through a nonzero path.
    """
    check_plan(model, plan)
    seen = Observation(model, plan, inputs)
    seen.start()
    try:
        yield seen
        seen.finish()
    finally:
        seen.close()
    if seen.faults.first is not None:
        warn(in_words(seen.faults.first, _WHAT))
