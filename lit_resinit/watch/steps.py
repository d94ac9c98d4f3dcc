"""What a run holds only while its steps run."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit.judge.observe import Observation
from lit_resinit.judge.optimizers import STEPS_TO_MOVE
from lit_resinit.judge.waking import Waking
from lit_resinit.plan.values import ResidualPlan
from lit_resinit.watch.moments import Moments, Watcher


class Watch:
    """What lives only while steps run: modes, hooks, and the numbers of one step."""

    def __init__(self, judge: bool = False, fresh: bool = False) -> None:
        self.judge, self.fresh = judge, fresh
        self.observation: Observation | None = None
        self.waking: Waking | None = None
        self.waited, self.judged_now = 0, False
        self.alive: set[str] = set()
        self.waiting = False  # for a gate asleep, on any rank
        self.steps = 0  # real ones since the verdict
        self.moments: Moments | None = None
        self.recorded = self.logs = False
        self._watcher: Watcher | None = None
        self._graphs: list[list[Any]] = []  # of this batch, and of the one before; see `GradientProbe.release`
        self._older_graphs: list[list[Any]] = []
        self._modes = contextlib.ExitStack()

    @property
    def due(self) -> bool:
        """Whether the next optimizer step has something to judge."""
        return self.judge or self.waiting or self.steps <= STEPS_TO_MOVE

    def start(self, model: nn.Module, plan: ResidualPlan, batch: Any, logs: bool) -> None:
        """Enter the modes for one forward; without a batch they only measure, and the record is sent in any case."""
        self.close_modes()
        if batch is not None:
            self.observation = Observation(model, plan, batch)
            self.observation.start()
        if plan.branches and not self.recorded:
            self._watcher = Watcher(model, plan)
            self._modes.enter_context(torch.compiler.set_stance("force_eager"))
            self._modes.enter_context(self._watcher)
            device = next(model.parameters()).device
            self.moments = Moments(2 * len(plan)).to(device) if self.moments is None else self.moments
        self.logs = batch is None or logs

    def stop_forward(self, loss: Tensor | None) -> None:
        """Leave the modes, innermost first."""
        self.collect()
        self.close_modes()
        if self.observation is not None:
            if loss is not None:
                self.observation.link(loss)
            self.observation.stop()

    def collect(self) -> None:
        """Move what the watcher measured into the moments."""
        found = self._watcher.moments() if self._watcher is not None else None
        if found is not None and self.moments is not None:
            self.moments.update(*found)

    def end_record(self) -> None:
        """The record is written: forget its numbers."""
        self.moments, self.recorded = None, False

    def close_modes(self) -> None:
        """Leave the watcher."""
        self._modes.close()
        self._watcher = None

    def drop(self) -> None:
        """Give up this step's observation; the next batch is observed instead."""
        self.close_modes()
        self.retire()

    def retire(self) -> None:
        """Let go of the observation, but of its graph only when the loss of this batch is gone."""
        if self.observation is not None:
            self.observation.close()
            self._graphs.append(self.observation.graph)
            self.observation = None

    def end_batch(self) -> None:
        """The Trainer holds the loss of a batch until the next one is over."""
        self._older_graphs, self._graphs = self._graphs, []

    def stop(self) -> None:
        """Leave no hook, mode or number behind; a loss that an exception holds may still need its graph."""
        self.drop()
        self.end_record()

    def close(self) -> None:
        """Leave nothing behind."""
        self.stop()
        self._graphs, self._older_graphs = [], []
