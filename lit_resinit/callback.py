"""The Lightning callback: hooks, each a guard and one call into the core.

Longer than other files, for Lightning wants every hook, and what a checkpoint has to hold, on one object.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lit_resinit.errors import warn
from lit_resinit.graph.tensors import end_measuring
from lit_resinit.judge.identity_report import IdentityReport
from lit_resinit.judge.optimizers import check_optimizers, held_names, holds_gates
from lit_resinit.judge.trial import Finding, Phase, Trial
from lit_resinit.judge.verdicts import GradientReport
from lit_resinit.plan.fold import fold_
from lit_resinit.plan.hooks import inserted_gates
from lit_resinit.plan.mark import Applied, LoadHook, applied_plan
from lit_resinit.plan.values import CLOSED, ResidualPlan, Scheme
from lit_resinit.report.about import versions
from lit_resinit.trainer.batches import give_back_loader
from lit_resinit.trainer.checkpoints import (
    end_training,
    expect_nothing,
    expect_plain,
    keep_plain,
    learn_folds,
)
from lit_resinit.trainer.closing import Closing
from lit_resinit.trainer.engines import judge_before
from lit_resinit.trainer.fits import Fits
from lit_resinit.trainer.known import Known
from lit_resinit.trainer.loggers import prints, send_attribution, send_figure, send_record, show_progress
from lit_resinit.trainer.options import Policy, Usefulness, check_options, check_usefulness
from lit_resinit.trainer.reports import RunReport
from lit_resinit.trainer.saved import read_state
from lit_resinit.trainer.setups import (
    in_workers,
    packing,
    refuse_workers,
)
from lit_resinit.trainer.steps import (
    accumulates,
    agreement,
    is_due,
    moves_by_itself,
    steps_done,
    will_skip,
    will_unfreeze,
)
from lit_resinit.trainer.useful import RunUsefulness
from lit_resinit.watch.agreement import Agreement
from lit_resinit.watch.conclusion import Conclusion
from lit_resinit.watch.gates import gate_statistics
from lit_resinit.watch.history import History
from lit_resinit.watch.watching import Watching


def _callback_class() -> Any:
    """``Callback`` of the package that is in use; of both, when both are: each knows only its own."""
    names = ("lightning.pytorch", "pytorch_lightning")
    loaded = [sys.modules[name].Callback for name in names if hasattr(sys.modules.get(name), "Callback")]
    if not loaded:
        try:
            import lightning.pytorch as package
        except ImportError:  # pragma: no cover - only the older package is installed
            import pytorch_lightning as package  # type: ignore[no-redef]
        loaded = [package.Callback]
    return loaded[0] if len(loaded) == 1 else type("Callback", tuple(loaded), {})


if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    Callback = _callback_class()


class ResidualInit(Callback):
    """Start a residual network as the identity, prove it, judge the gates' gradients, and watch the blocks switch on.

    In ``setup`` every residual branch ``x + g * u(x)`` is found in a trace of one forward and its gate closed. Before
    the first batch trains, every branch is compared with its skip; after the first backward every gate's gradient is
    judged; on logging steps gate, gate gradient, variances and first-order usefulness go to every logger.

    Args:
        scheme: ``auto``, ``zero``, ``insert``, ``last_layer``, ``sqrt_depth``, ``downscale``, or ``observe``, which
            changes nothing and only checks and watches.
        include: Globs on branch names; only these are touched.
        exclude: Globs on branch names that are left alone.
        example_inputs: Positional inputs of the module's forward, when neither ``example_input_array`` nor the training
            data do.
        identity: What an open branch does before the first step: ``raise``, ``warn`` or ``ignore``.
        gradient: What a dead, missing or nonfinite gate does: ``raise``, ``warn`` or ``ignore``.
        overwrite_trained: Close branches of trained blocks too.
        patience: Optimizer steps that a gate may sleep before it counts as dead.
        on_ratio: Variance ratio from which a branch counts as switched on.
        log_every_n_steps: Steps between records; the Trainer's own setting when None.
        usefulness: Close every branch in turn on a few validation batches at the end, and follow the gate path there
            (:func:`lit_resinit.attribute`); with ``"path"`` follow it during the run too, after every tenth record and
            after each validation. From the end on the attribute holds the loss with a gate closed minus the loss, by
            branch; else it is None.
        report: Path of a page that is rewritten while the run goes on (``.html``), or of a picture of the history that
            is written at the end (``.png``, ``.pdf``, ``.svg``).
        per_branch: Whether loggers get every quantity of every branch, or quantiles; the former up to 64 branches when
            None.
        progress_bar: Show ``blocks on/<branches>`` in the Trainer's progress bar.
        table: Print a table at the end, unless the Trainer's bars are disabled (``refresh_rate=0``, ``barebones``).

    Attributes:
        plan: The :class:`ResidualPlan`, after ``setup``.
        history: The :class:`History`.
        identity_report: The :class:`IdentityReport` of the first step.
        gradient_report: The :class:`GradientReport` of the last judged step.
        agreements: How usefulness agrees with early switching on, with its first-order estimate and with the gate path;
            else empty.

    Raises:
        NoBranchError: In ``setup``, for a network without a residual branch.
        TrainedWeightsError: In ``setup``, for trained blocks.
        IdentityError: Before the first backward.
        GradientError: After the first backward, or when ``patience`` is used up.
        GateOptimizerError: Before the first batch, when a gate is in no optimizer.

    Note:
        Logged metrics: see :func:`lit_resinit.watch.metrics`. The training is what it would have been without the
        callback, bit for bit, apart from the closed gates.

    Example:
        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(callbacks=[ResidualInit()], logger=False, enable_checkpointing=False)
    """

    def __init__(
        self,
        scheme: Scheme = "auto",
        include: list[str] | str | None = None,
        exclude: list[str] | str | None = None,
        example_inputs: Any = None,
        identity: Policy = "raise",
        gradient: Policy = "raise",
        overwrite_trained: bool = False,
        patience: int = 3,
        on_ratio: float = 1e-3,
        log_every_n_steps: int | None = None,
        usefulness: Usefulness = False,
        report: str | None = None,
        per_branch: bool | None = None,
        progress_bar: bool = False,
        table: bool = True,
    ) -> None:
        super().__init__()
        check_options(scheme, include, exclude, identity, gradient, patience, on_ratio, log_every_n_steps)
        check_usefulness(usefulness)
        self.scheme: Scheme = scheme
        self.include, self.exclude = include, exclude
        self.example_inputs = example_inputs
        self.identity, self.gradient = identity, gradient
        self.overwrite_trained, self.patience = overwrite_trained, patience
        self.on_ratio, self.log_every_n_steps = on_ratio, log_every_n_steps
        self.report = report
        self.per_branch, self.progress_bar, self.table = per_branch, progress_bar, table
        self.plan: ResidualPlan | None = None
        self.history = History([], on_ratio)
        self.identity_report: IdentityReport | None = None
        self.gradient_report: GradientReport | None = None
        self.usefulness: dict[str, float] | None = None
        self.agreements: tuple[Agreement, ...] = ()
        self.conclusion: Conclusion | None = None
        self._measure_usefulness: Usefulness = usefulness
        self._useful: RunUsefulness | None = None
        self._run_report: RunReport | None = None
        self._unpictured = False  # whether a record came after the last picture
        self._to_loggers = False  # whether this record is one that loggers get
        self._before: dict[str, Any] | None = None  # what was known of the run when its checkpoint was written
        self._for_workers = False  # whether a main process without scalars will load what was trained
        self._engine = ""  # a strategy that hides the gates once it is built
        self._closing = Closing(scheme)
        self._slept: dict[str, int] = {}
        self._fits = Fits()
        self._network: Applied | None = None  # the mark of the network that history and reports are of
        self._stage = "fit"
        self._loading: Any = None
        self._trial: Trial | None = None
        self._watching: Watching | None = None

    def __repr__(self) -> str:
        found = "not set up" if self.plan is None else f"{len(self.plan)} branches, {len(self.history)} records"
        return f"<ResidualInit: scheme {self.scheme}, {found}>"

    # ---------------------------------------------------------------- 1. close the gates

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Find the branches and close their gates, once, at the start of a fresh training.

        In the other verbs the gates that a checkpoint brings are inserted when it is loaded, and nothing else is done.
        """
        self._stage = stage
        if stage == "fit":
            self._engine = packing(trainer.strategy)
            self._for_workers = in_workers(trainer.strategy) and not any(True for _ in inserted_gates(pl_module))
            self._run_report = None if self.report is None else RunReport(self.report, trainer)
            self._slept = {}
            options = (self.scheme, self.include, self.exclude, self.example_inputs, self.overwrite_trained)
            self._closing = Closing(*options)
            self._accept(trainer, pl_module, self._closing.close(trainer, pl_module))
            if self._engine and self._closing.mark is not None and not self._closing.moved:
                self._judge_before(trainer, pl_module)
        if applied_plan(pl_module) is None:
            self._explain_loading(pl_module, LoadHook(inserts=stage != "fit"))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Second chance for a network built in ``setup`` or ``configure_model``: closing only, no inserting."""
        self._accept(trainer, pl_module, self._closing.close_late(trainer, pl_module))
        if not self._engine:
            expect_plain(trainer, pl_module)

    def _accept(self, trainer: Any, pl_module: nn.Module, plan: ResidualPlan | None) -> None:
        if plan is None:
            return
        closing = self._closing
        another = self._network is not None and self._network is not closing.mark
        if closing.closed or (another and not closing.resumed):
            self._start_anew()
        self._network = closing.mark
        names = [b.name for b in plan.branches]
        if names != self.history.branches:
            self.history = History(names, self.on_ratio)
        self.plan = plan
        if not self._engine:
            keep_plain(pl_module)
        if self._for_workers:
            refuse_workers(trainer.strategy, plan)

    def _judge_before(self, trainer: Any, pl_module: nn.Module) -> None:
        """The engine hides the gates: what can be judged is judged before it is built."""
        assert self.plan is not None
        self._trial = Trial(pl_module, self.plan, self.patience, agreement(trainer))
        try:
            judge_before(trainer, pl_module, self._trial, self.example_inputs, self._act, self._engine)
        finally:
            self._trial = None

    def _start_anew(self) -> None:
        """What was recorded and judged before is of another network, or of another start of this one."""
        self.history, self._fits, self._before = History([], self.on_ratio), Fits(), None
        self.identity_report = self.gradient_report = self.usefulness = None
        self.agreements = ()

    def _explain_loading(self, pl_module: nn.Module, hook: LoadHook) -> None:
        self._stop_explaining()
        self._loading = pl_module.register_load_state_dict_pre_hook(hook)

    def _stop_explaining(self) -> None:
        if self._loading is not None:
            self._loading.remove()
            self._loading = None

    # ---------------------------------------------------------------- 2. and 3. prove the identity, judge the gradients

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Every gate has to be in an optimizer, and should not be decayed."""
        expect_nothing(trainer)
        self._trial = self._watching = self._useful = None
        if self.plan is None or self._engine:
            return
        fresh = trainer.global_step == 0 and not self._closing.resumed and not self._closing.moved
        options = {"fresh": fresh, "unfreezes": will_unfreeze(trainer)}
        self._trial = Trial(pl_module, self.plan, self.patience, agreement(trainer), **options)
        self._trial.resume({"slept": self._slept})
        if not len(self.history):
            self.history.begin([fresh and b.action in CLOSED for b in self.plan.branches])
        self._fits.begin(steps_done(trainer), int(self.history.steps[-1]) if len(self.history) else -1)
        self._watching = Watching(pl_module, self.plan, self.history)
        if self._measure_usefulness:
            self._useful = RunUsefulness(self.plan, self.history, self._fits, during=self._measure_usefulness == "path")
        check_optimizers(trainer.optimizers, pl_module, self.plan)

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        """On the first step observe, on logging steps measure; otherwise nothing."""
        if self._trial is None or self._watching is None:
            return
        if self._useful is not None:
            self._useful.offer(trainer, batch)
        first = self._trial.phase is Phase.DUE
        self._trial.before_forward(batch, self._watching.readers() if first else ())
        if first:
            self._to_loggers = is_due(trainer, trainer.log_every_n_steps)
        elif self._logs(trainer):
            self._to_loggers = True
            self._watching.before_forward()

    def on_before_backward(self, trainer: Any, pl_module: nn.Module, loss: Tensor) -> None:
        """The forward is done: every branch has to have contributed exactly nothing."""
        if self._trial is None or self._watching is None:
            return
        by_hand = not pl_module.automatic_optimization
        if not by_hand:
            self._watching.after_forward()
        self._act(self._trial.after_forward(loss, more=by_hand))

    def on_after_backward(self, trainer: Any, pl_module: nn.Module) -> None:
        """Judge the first gradients, unless a scaler or manual optimization makes them final only later."""
        if self._trial is not None and pl_module.automatic_optimization and trainer.scaler is None:
            self._act(self._trial.after_backward())

    def on_before_optimizer_step(self, trainer: Any, pl_module: nn.Module, optimizer: Any) -> None:
        """Unscaled, unclipped gradients: judge them if that is still due, look at sleepers again, record."""
        if self._trial is None or self._watching is None or self.plan is None:
            return
        if not holds_gates(optimizer, trainer.optimizers, pl_module, self.plan):
            return
        if not pl_module.automatic_optimization:
            self._watching.after_forward()
        if self._trial.due:
            held = held_names(optimizer, pl_module) if len(trainer.optimizers) > 1 else None
            self._act(self._trial.before_step(optimizer, will_skip(trainer, optimizer), held))
        self._watching.before_step(self._fits.step(steps_done(trainer)))
        if self._closing.mark is not None:
            self._closing.mark.moved = True

    def _act(self, findings: Iterable[Finding]) -> None:
        """Raise, warn or say nothing, as the policies want it."""
        assert self._trial is not None
        self.identity_report = self._trial.identity or self.identity_report
        self.gradient_report = self._trial.gradients or self.gradient_report
        for finding in findings:
            policy = {"identity": self.identity, "gradient": self.gradient}.get(finding.about, "warn")
            if policy == "raise" and finding.error is not None:
                self._stop()
                raise finding.error
            if policy == "warn":
                warn(str(finding.error or finding.message))

    # ---------------------------------------------------------------- 4. watch the blocks switch on

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Send the record to every logger; a batch without backward or optimizer step is tried again."""
        if self._trial is None or self._watching is None:
            return
        if moves_by_itself(trainer) and not pl_module.automatic_optimization:
            self.on_before_optimizer_step(trainer, pl_module, trainer.optimizers[0])
        self._watching.after_forward()  # there was no backward, or no step that ended it
        if self._watching.recorded:
            self._watching.end()
            self._send(trainer, pl_module)
        self._trial.end_batch(accumulates=accumulates(trainer))

    def on_validation_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Follow the gate path, where that was asked for."""
        if self._useful is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if len(self.history) and self._useful.now(trainer, pl_module):
            send_attribution(trainer, self.history, self.per_branch)
            self._follow(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Rewrite the page, where that is due, and give the picture to loggers that take one."""
        if self.plan is not None:
            self._follow(trainer)
            self._unpictured = self._unpictured and not send_figure(trainer, self.history)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Print the table, and write what was asked for."""
        if self._trial is None or self.plan is None:
            return
        self._fits.end(steps_done(trainer))
        self._act(self._trial.end())
        if not len(self.history):
            return
        if self._useful is not None:
            self._measure(trainer, pl_module, self._useful)
        now = gate_statistics(pl_module, self.plan).cpu()
        if trainer.is_global_zero:
            self._conclude(trainer, pl_module, now)
        self._follow(trainer, "finished", last=True)

    def _logs(self, trainer: Any) -> bool:
        every = self.log_every_n_steps
        return is_due(trainer, trainer.log_every_n_steps if every is None else every)

    def _send(self, trainer: Any, pl_module: nn.Module) -> None:
        """One call to each logger; the progress bar only where that was asked for."""
        values = send_record(trainer, self.history, self.per_branch, to_loggers=self._to_loggers)
        if self.progress_bar:
            show_progress(trainer, pl_module, self.history, values)
        if self._useful is not None and self._useful.after_record(trainer, pl_module):
            send_attribution(trainer, self.history, self.per_branch)
        self._unpictured = True
        self._follow(trainer)

    def _measure(self, trainer: Any, pl_module: nn.Module, useful: RunUsefulness) -> None:
        shows = trainer.is_global_zero and trainer.progress_bar_callback is not None
        self.conclusion = useful.at_end(trainer, pl_module, progress=shows)
        if self.conclusion is not None:
            self.usefulness, self.agreements = self.conclusion.ablation.means, self.conclusion.agreements

    def _conclude(self, trainer: Any, pl_module: nn.Module, now: Tensor) -> None:
        """Table, gates that hardly moved, picture."""
        known, step = self._known(), self._fits.step(steps_done(trainer))
        if self.table and prints(trainer):
            known.print_table(self.history, now[1], step)
        for text in known.lost(trainer.optimizers, pl_module, self.history, now, step):
            warn(text)
        if self._run_report is not None:
            self._run_report.draw(self.history)

    def _follow(self, trainer: Any, state: str = "running", last: bool = False) -> None:
        if self._run_report is not None:
            state = f"{state} at step {self._fits.step(steps_done(trainer))}"
            self._run_report.follow(trainer, self.history, self._known().about, state, last=last)

    def _known(self) -> Known:
        woke, reports = None if self._trial is None else self._trial.woke, (self.identity_report, self.gradient_report)
        return Known(self.plan, *reports, woke, self.conclusion, self._fits, self._before, self._setting())

    def _setting(self) -> dict[str, str]:
        """What a reader of the page needs to repeat the run."""
        named = ("scheme", "include", "exclude", "overwrite_trained", "patience", "on_ratio", "log_every_n_steps")
        options = {name: str(getattr(self, name)) for name in named if getattr(self, name) not in (None, False)}
        usefulness = {"usefulness": str(self._measure_usefulness)} if self._measure_usefulness else {}
        return {**options, **usefulness, "seed": os.environ.get("PL_GLOBAL_SEED", "none set"), **versions()}

    # ---------------------------------------------------------------- the end, and what a checkpoint keeps

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Leave no hook or mode behind, and a page that says what stopped the run."""
        end_measuring()
        expect_nothing(trainer)
        if not self._engine:
            end_training(pl_module)
        self._stop()
        self._stop_explaining()
        give_back_loader(trainer, pl_module)
        if self.plan is not None and self._stage == "fit":
            self._fits.end(steps_done(trainer))
            self._follow(trainer, f"stopped by {type(exception).__name__}", last=True)

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Leave no hook or mode behind, nor the bound ``log`` methods of the Trainer, which hold the module."""
        self._stop()
        if self._trial is not None:
            self._trial.close()
        self._watching = self._useful = None
        self._stop_explaining()
        expect_nothing(trainer)
        give_back_loader(trainer, pl_module)
        if self._for_workers and stage == "fit":
            fold_(pl_module)
        elif not self._engine:
            end_training(pl_module)
        for name in ("log", "log_dict"):
            vars(self).pop(name, None)

    def _stop(self) -> None:
        if self._watching is not None:
            self._watching.stop()
        if self._trial is not None:
            self._trial.stop()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle takes along, also of a callback whose run goes on: no hook, and no network."""
        state = vars(self) | dict.fromkeys(("_trial", "_watching", "_loading", "_network"))
        state["_closing"] = dataclasses.replace(self._closing, mark=None, late=None)
        if self._trial is not None:
            state |= {"_slept": self._trial.state()["slept"], "_before": self._known().about()}
        return {k: v for k, v in state.items() if k not in ("log", "log_dict")}

    def state_dict(self) -> dict[str, Any]:
        """Plain types only, so that the checkpoint loads with ``weights_only=True``."""
        trial = {"slept": dict(self._slept)} if self._trial is None else self._trial.state()
        return self._known().state(self.history, trial)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the history of the run that is resumed, and the patience with what slept.

        In other verbs there is no run to be resumed, and what this one recorded is kept.
        """
        if self._stage != "fit":
            return
        saved = read_state(state_dict)
        self._closing.resumed, self._slept, self._before = saved.closed, saved.slept, saved.about
        self._fits, history = Fits(saved.steps, list(saved.fits)), saved.history
        if history is not None and (not self.history.branches or history.branches == self.history.branches):
            self.history = history

    def on_load_checkpoint(self, trainer: Any, pl_module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Tell gates that came with the checkpoint into which weights they fold."""
        learn_folds(pl_module, checkpoint)
