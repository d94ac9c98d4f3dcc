"""One record on its way: measured in forwards, completed before the optimizer's step."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lit_resinit.errors import warn
from lit_resinit.graph.eager import eager
from lit_resinit.graph.faults import Faults, in_words
from lit_resinit.graph.tensors import measuring
from lit_resinit.plan.values import ResidualPlan
from lit_resinit.watch.gates import gate_statistics
from lit_resinit.watch.history import History
from lit_resinit.watch.lapses import gated
from lit_resinit.watch.measure import Measured, Watcher

if TYPE_CHECKING:
    from lit_resinit.watch.moments import Moments


class Watching:
    """Measures stream and branch at every addition of the forwards that lead to one step, and records them.

    Args:
        model: The model, with the plan applied; held weakly.
        plan: The plan.
        history: Where the records go.

    Attributes:
        recorded: Whether the record of this batch is in the history.
    """

    def __init__(self, model: nn.Module, plan: ResidualPlan, history: History) -> None:
        self._model, self._plan, self._history = weakref.ref(model), plan, history
        self._measured = Measured(plan)
        self._moments: Moments | None = None
        self._modes: contextlib.ExitStack | None = None
        self.recorded = False
        self._faults = Faults()
        self._told = False  # of a fault

    @property
    def measures(self) -> bool:
        """Whether a mode of its own is on."""
        return self._modes is not None

    def readers(self) -> tuple[Measured, ...]:
        """Begin a record, or go on with it, at the additions of a forward that somebody else observes."""
        model = self._model()
        if model is None or not self._plan.branches or self.recorded:
            return ()
        if self._moments is None:
            from lit_resinit.watch.moments import Moments  # torchmetrics is slow to import

            self._moments = Moments(2 * len(self._plan)).to(next(model.parameters()).device)
        return (self._measured,) if self._faults.first is None else ()

    def before_forward(self) -> None:
        """Measure the forward that comes, which nobody else observes, together with those since the last record."""
        self._leave()
        model = self._model()
        if model is not None and self.readers():
            self._modes = contextlib.ExitStack()
            with self._faults:
                self._modes.enter_context(eager())
                self._modes.enter_context(Watcher(model, self._plan, self._measured, self._faults))

    def after_forward(self) -> None:
        """The forward is done: no operation is looked at from here on."""
        self._collect()
        self._leave()

    def before_step(self, step: int) -> None:
        """Complete the record of an optimizer step, where one was begun and a branch ran on some rank."""
        self._collect()
        model = self._model()
        if model is None or self._moments is None or self.recorded:
            return
        self._moments.update(*torch.zeros(3, 2 * len(self._plan), device=self._moments.device))  # where no block ran
        gates = torch.full((4, len(self._plan)), math.nan)
        with self._faults:
            gates = gate_statistics(model, self._plan)
        with self._faults:  # all ranks come here, whatever was measured on this one
            self.recorded = record(self._history, step, gates, self._moments)
        if not self.recorded:
            self.end()
        elif news := self._history.lapses.news(gated(self._plan)):
            warn(news)
        if self._faults.first is not None and not self._told:
            self._told = True
            warn(in_words(self._faults.first, "recording the branches"))

    def end(self) -> None:
        """Forget the numbers of this record: the next one begins."""
        self._moments, self.recorded = None, False

    def stop(self) -> None:
        """Leave no mode and no number behind."""
        self._leave()
        self._measured.moments()
        self.end()

    def _collect(self) -> None:
        with self._faults:
            found = self._measured.moments()
            if found is not None and self._moments is not None and self._faults.first is None:
                self._moments.update(*found)

    def _leave(self) -> None:
        if self._modes is not None:
            self._modes.close()
            self._modes = None


def record(history: History, step: int, gates: Tensor, moments: Moments) -> bool:
    """Add gate statistics and variances of one step to a history, in one transfer from the device.

    Returns:
        Whether there was anything to record: a branch ran, on some rank.
    """
    with measuring():
        variance = moments.compute()
        host = torch.cat([gates, variance.view(-1, 2).T.to(gates.device)]).cpu()
    if bool(host[4].isnan().all()):
        return False
    history.append(step, host[:4], host[4], host[5])
    return True


@contextlib.contextmanager
def watch(model: nn.Module, plan: ResidualPlan, history: History, step: int) -> Iterator[Watching]:
    """Measure one step of yours, forward and backward, and add it to a history.

    What the callback records: gate, gate gradient, first-order usefulness and both variances of every branch. Over the
    ranks of ``torch.distributed`` the moments are merged, so that every rank records the same, and has to come here.

    Args:
        model: The model, with the plan applied.
        plan: The plan.
        history: ``History([b.name for b in plan.branches])``, to which a record is added after the block; without one
            where no branch ran.
        step: The optimizer step, the x-axis of everything that is drawn.

    Yields:
        The :class:`Watching`. Of several forwards inside the first is measured; where several batches lead to one step,
        call a :class:`Watching` around each forward instead.

    Note:
        Cost: some per cent of a step (``benchmarks/overhead.py``); record every fiftieth or so. Compiled modules run
        uncompiled inside. Gradients have to be unscaled and not clipped yet when the block ends.

    Example:
        >>> from lit_resinit import History, apply_, make_plan
        >>> layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True), torch.randn(2, 3, 8)
        >>> plan = make_plan(layer, x)
        >>> history = History([b.name for b in plan.branches])
        >>> _ = apply_(layer, plan)
        >>> with watch(layer, plan, history, step=0):
        ...     layer(x).square().mean().backward()
        >>> history.variance_ratio
        tensor([[0., 0.]])
    """
    watching = Watching(model, plan, history)
    watching.before_forward()
    try:
        yield watching
        watching.after_forward()
        watching.before_step(step)
    finally:
        watching.stop()
