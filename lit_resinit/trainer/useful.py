"""Usefulness of the branches during a run and at its end: when it is measured, and on which data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils._pytree import tree_map

from lit_resinit.errors import warn
from lit_resinit.plan.values import ResidualPlan
from lit_resinit.trainer.fits import Fits
from lit_resinit.trainer.heldout import first_size, fixed_batches, loss_scale, own_copy, step_loss, validation_loader
from lit_resinit.trainer.inputs import apart
from lit_resinit.trainer.steps import agreement, steps_done
from lit_resinit.watch.conclusion import Conclusion, conclude
from lit_resinit.watch.history import History
from lit_resinit.watch.losses import LossFunction, has_gates
from lit_resinit.watch.path import Attribution, attribute
from lit_resinit.watch.usefulness import Ablation, ablate

EVERY = 10  # records from one measurement to the next
_DURING = {"most": 4, "samples": 256}
_AT_END = {"most": 8, "samples": 512, "parts": 8}
_TRAINING = 4  # training batches that stand in for validation data

Found = TypeVar("Found")


class RunUsefulness:
    """Measures what each branch takes off the loss of the training step, on data that stay the same.

    These are validation data where there are any and the training step has a loss on them, and the first training
    batches else. What goes wrong on them is told once, and the training goes on.

    Args:
        plan: The plan.
        history: Where the measurements go.
        fits: How the steps of this fit are counted there.
        during: Whether there are any before the end.
    """

    def __init__(self, plan: ResidualPlan, history: History, fits: Fits, *, during: bool) -> None:
        self._plan, self._history, self._fits, self._during = plan, history, fits, during
        self._records = 0
        self._held: dict[str, list[Any]] = {}
        self._training: list[Any] = []
        self._wanted: bool | None = None  # whether training batches are kept; None as long as nobody looked
        self._unfit: set[str] = set()  # kinds of data without a loss that has a gradient
        self._told = False  # the error itself would keep the model alive

    def offer(self, trainer: Any, batch: Any) -> None:
        """Keep a training batch, where those are what there is."""
        if self._wanted is None:
            self._wanted = self._during and validation_loader(trainer) is None
        if self._wanted:
            self._training.append(tree_map(own_copy, batch))
            enough = sum(map(first_size, self._training)) >= _DURING["samples"]
            self._wanted = not enough and len(self._training) < _TRAINING

    def after_record(self, trainer: Any, module: Any) -> bool:
        """Measure after every tenth record; whether that was now."""
        due = self._during and self._records % EVERY == 0
        self._records += 1
        return due and self.now(trainer, module)

    def now(self, trainer: Any, module: Any) -> bool:
        """Measure, unless this step has been; whether there is something new."""
        step = self._fits.step(steps_done(trainer))
        attributions = self._history.attributions
        if not self._during or self._told or (len(attributions) and int(attributions.steps[-1]) == step):
            return False

        def path(data: list[Any], loss_fn: LossFunction) -> Attribution:
            return self._path(trainer, module, data, loss_fn)

        found = self._measured(trainer, module, self._fixed, path)
        if found is not None:
            self._add(step, found[0])
        return found is not None

    def at_end(self, trainer: Any, module: Any, *, progress: bool) -> Conclusion | None:
        """Close each branch in turn, and follow the gate path on the same data."""
        self.now(trainer, module)

        def both(data: list[Any], loss_fn: LossFunction) -> tuple[Ablation, Attribution | None]:
            ablation = ablate(module, self._plan, data, loss_fn, progress=progress)
            try:
                return ablation, self._path(trainer, module, data, loss_fn)
            except Exception as error:  # a loss, but no gradient
                self._tell(error)
                return ablation, None

        found = self._measured(trainer, module, self._fresh, both)
        if found is None:
            return None
        (ablation, path), kind = found
        if path is not None and not self._during:
            self._add(self._fits.step(steps_done(trainer)), path)
        count = len(ablation.losses)
        data = f"{count} {kind} batch{'' if count == 1 else 'es'}"
        return conclude(self._history, ablation, path, data)

    def _path(self, trainer: Any, module: Any, data: list[Any], loss_fn: LossFunction) -> Attribution:
        return attribute(module, self._plan, data, loss_fn, scale=loss_scale(trainer))

    def _add(self, step: int, path: Attribution) -> None:
        self._history.attribute(step, path, path.loss, path.joint)

    # ---------------------------------------------------------------- on which data

    def _measured(
        self,
        trainer: Any,
        module: Any,
        data: Callable[[Any, Any, str], list[Any]],
        use: Callable[[list[Any], LossFunction], Found],
    ) -> tuple[Found, str] | None:
        """What was found, and on which kind of data; None where no kind has a loss."""
        if not has_gates(self._plan, module):
            return None
        trouble: Exception | None = None
        during = data == self._fixed
        unfit = self._unfit if during else set()  # at the end there is less to ask for
        for kind in ("validation", "training"):
            try:
                batches = [] if kind in unfit else data(trainer, module, kind)
            except Exception as error:  # data and hooks are the user's
                batches, trouble = [], error
                unfit.add(kind)
            if agreement(trainer)(not batches):
                continue
            try:
                with apart(trainer, module):
                    return use(batches, step_loss(trainer)), kind
            except Exception as error:  # raised on every rank
                unfit.add(kind)
                trouble = error
        if during and not self._training and "training" not in unfit:
            self._wanted = True  # the next batches are another chance
        elif trouble is not None:
            self._tell(trouble)
        return None

    def _fixed(self, trainer: Any, module: Any, kind: str) -> list[Any]:
        """The batches of the measurements during a run."""
        if kind == "training":
            return self._training
        if kind not in self._held:
            self._held[kind] = fixed_batches(trainer, module, validation_loader(trainer), **_DURING)
        return self._held[kind]

    def _fresh(self, trainer: Any, module: Any, kind: str) -> list[Any]:
        """The batches of the measurement at the end."""
        if kind == "training" and self._training:
            return self._training
        loader = validation_loader(trainer) if kind == "validation" else trainer.train_dataloader
        return fixed_batches(trainer, module, loader, **_AT_END)

    def _tell(self, trouble: Exception) -> None:
        if not self._told:
            warn(
                "measuring the usefulness of the branches: expected a loss of the training step on validation or "
                f"training data, with a gradient, found {type(trouble).__name__}: {trouble}. What needs it is not "
                "measured; the training goes on. "
                "`lit_resinit.attribute` and `measure_usefulness` take a loss of your own."
            )
        self._told = True
