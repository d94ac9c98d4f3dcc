"""The Lightning callback: hooks, each a guard and one call into the core."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from rich.console import Console
from torch import Tensor, nn

from lit_resinit.errors import GradientError, IdentityError, NoBranchError, ResInitError, TraceError, warn
from lit_resinit.graph.tensors import end_measuring
from lit_resinit.graph.where import clean_name
from lit_resinit.judge.gradients import SLOW, GradientReport
from lit_resinit.judge.identity import IdentityReport
from lit_resinit.judge.optimizers import (
    STEPS_TO_MOVE,
    check_optimizers,
    has_finite_gradients,
    has_rate,
    held_names,
    holds_gates,
    warn_about_rest,
    warn_about_still_gates,
)
from lit_resinit.judge.waking import Waking, until_stepped, until_unfrozen
from lit_resinit.plan.apply import apply_
from lit_resinit.plan.hooks import inserted_gates
from lit_resinit.plan.make import check_arguments, check_patterns, plan_forward
from lit_resinit.plan.mark import Applied, LoadHook, applied_plan, mark_applied, was_closed
from lit_resinit.plan.values import ResidualPlan, Scheme
from lit_resinit.report.figures import activation_figure, takes_figures
from lit_resinit.report.files import check_report, is_page, replace_file
from lit_resinit.report.page import LivePage, about_run, clock, later
from lit_resinit.report.tables import history_table
from lit_resinit.trainer.batches import give_back_loader
from lit_resinit.trainer.copies import fitting_plan
from lit_resinit.trainer.inputs import apart, candidates, few_batches, training_loss
from lit_resinit.trainer.ranks import agreed_plan
from lit_resinit.trainer.setups import may_come_later, refuse_copies, refuse_sharded, refuse_strategy
from lit_resinit.watch.history import History, to_record
from lit_resinit.watch.logs import metrics
from lit_resinit.watch.moments import gate_statistics
from lit_resinit.watch.steps import Watch
from lit_resinit.watch.usefulness import Agreement, agreements, measure_usefulness
from lit_resinit.words import together


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

Policy = Literal["raise", "warn", "ignore"]
_SCALER_WAIT = 50  # steps that a gradient scaler may skip before its overflow counts as ours


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
        usefulness: Ablate every branch on a few validation batches at the end. From then on the attribute holds the
            loss with a gate closed minus the loss, by branch; else it is None.
        report: Path of a page that is rewritten while the run goes on (``.html``), or of a picture of the history that
            is written at the end (``.png``, ``.pdf``, ``.svg``).
        per_branch: Whether loggers get every quantity of every branch, or quantiles; the former up to 64 branches when
            None.
        progress_bar: Show ``blocks on/<branches>`` in the Trainer's progress bar.

    Attributes:
        plan: The :class:`ResidualPlan`, after ``setup``.
        history: The :class:`History`.
        identity_report: The :class:`IdentityReport` of the first step.
        gradient_report: The :class:`GradientReport` of the last judged step.
        agreements: How usefulness agrees with early switching on, and with its first-order estimate; else empty.

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
        usefulness: bool = False,
        report: str | None = None,
        per_branch: bool | None = None,
        progress_bar: bool = False,
    ) -> None:
        super().__init__()
        _check_options(scheme, include, exclude, identity, gradient, patience, on_ratio, log_every_n_steps)
        self.scheme: Scheme = scheme
        self.include, self.exclude = include, exclude
        self.example_inputs = example_inputs
        self.identity, self.gradient = identity, gradient
        self.overwrite_trained, self.patience = overwrite_trained, patience
        self.on_ratio, self.log_every_n_steps = on_ratio, log_every_n_steps
        self.report = report
        self.per_branch, self.progress_bar = per_branch, progress_bar
        self.plan: ResidualPlan | None = None
        self.history = History([], on_ratio)
        self.identity_report: IdentityReport | None = None
        self.gradient_report: GradientReport | None = None
        self.usefulness: dict[str, float] | None = None
        self.agreements: tuple[Agreement, ...] = ()
        self._measure_usefulness = usefulness
        self._page: LivePage | None = None
        self._unpictured = False  # whether a record came after the last picture
        self._before: dict[str, Any] | None = None  # what was known of the run when its checkpoint was written
        self._resumed = False
        self._late: ResInitError | None = None
        self._mark: Applied | None = None
        self._slept: dict[str, int] = {}
        self._loading: Any = None
        self._watch = Watch()

    # ---------------------------------------------------------------- 1. close the gates

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Find the branches and close their gates, once, at the start of a fresh training.

        In the other verbs the gates that a checkpoint brings are inserted when it is loaded, and nothing else is done.
        """
        if stage == "fit":
            refuse_strategy(trainer.strategy)
            self._check_report(trainer)
            self._resumed, self._mark, self._slept = False, None, {}
            self._close_gates(trainer, pl_module)
        if applied_plan(pl_module) is None:
            self._explain_loading(pl_module, LoadHook(inserts=stage != "fit"))

    def _close_gates(self, trainer: Any, pl_module: Any) -> None:
        if self._recognise(trainer, pl_module):
            return
        try:
            self._prepare(trainer, pl_module)
        except (NoBranchError, TraceError) as error:
            if not may_come_later(pl_module):
                raise
            self._late = error

    def _check_report(self, trainer: Any) -> None:
        """A report that cannot be written is found now, and not after a night; every rank raises, or none."""
        if self.report is None:
            return
        problem: ResInitError | None = None
        if trainer.is_global_zero:
            try:
                check_report(self.report)
            except ResInitError as error:
                problem = error
        if self._any_rank(trainer, problem is not None):
            raise problem or ResInitError(f"checking the report's path: rank 0 cannot write {self.report!r}.")
        self._page = LivePage(self.report) if is_page(self.report) else None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Second chance for a network built in ``setup`` or ``configure_model``: closing only, no inserting."""
        late, self._late = self._late, None
        if late is None or self._recognise(trainer, pl_module):
            return
        if trainer.ckpt_path is not None:
            self._resumed = True
        refuse_sharded(pl_module)
        self._prepare(trainer, pl_module, late=True)

    def _recognise(self, trainer: Any, pl_module: nn.Module) -> bool:
        """Whether gates of this module or a part of it were closed before: then they are only watched."""
        found = applied_plan(pl_module)
        if found is not None:
            name, self._mark = found
            self._accept(self._mark.plan.below(name))
        elif was_closed(pl_module):
            plan = self._plan(trainer, pl_module, "observe")
            self._mark = mark_applied(pl_module, plan, moved=True)
            self._accept(plan)
        return self._mark is not None

    def _explain_loading(self, pl_module: nn.Module, hook: LoadHook) -> None:
        self._stop_explaining()
        self._loading = pl_module.register_load_state_dict_pre_hook(hook)

    def _stop_explaining(self) -> None:
        if self._loading is not None:
            self._loading.remove()
            self._loading = None

    def _prepare(self, trainer: Any, pl_module: nn.Module, late: bool = False) -> None:
        plan = self._plan(trainer, pl_module, self.scheme)
        plan = fitting_plan(pl_module, plan, lambda scheme: self._plan(trainer, pl_module, scheme))
        if late and any(b.action in ("insert", "sqrt_depth") for b in plan.branches):
            raise ResInitError(
                "closing the gates: expected the network and a batch when the callback is set up, found them only "
                "after `setup` and `configure_model`, where the optimizer is built already and no scalar can be "
                "inserted. Where only the data come late, pass `example_inputs`; where the "
                "network does, call `apply_(self.net, make_plan(self.net, ...))` at the end of that "
                "`configure_model` (or `setup`), or use scheme='last_layer'."
            )
        refuse_copies(trainer, plan)
        if late and self._resumed:
            self._mark = mark_applied(pl_module, plan, moved=True)
        else:
            apply_(pl_module, plan, overwrite_trained=self.overwrite_trained)
            self._mark = mark_applied(pl_module, plan)
            self.history = History([], self.on_ratio)  # what was recorded before is of another start
        self._accept(plan)

    def _plan(self, trainer: Any, pl_module: nn.Module, scheme: Scheme) -> ResidualPlan:
        """The plan of all ranks."""
        check_arguments(pl_module, scheme, self.include, self.exclude)
        return agreed_plan(trainer, pl_module, lambda: self._own_plan(trainer, pl_module, scheme))

    def _own_plan(self, trainer: Any, pl_module: nn.Module, scheme: Scheme) -> ResidualPlan:
        tried: list[str] = []
        for what, inputs, run in candidates(trainer, pl_module, self.example_inputs, tried):
            try:
                with apart(trainer, pl_module):
                    return plan_forward(pl_module, inputs, {}, run, scheme, self.include, self.exclude)
            except TraceError as error:
                tried.append(f"{what}: {error}")
        raise TraceError(
            "tracing one forward: tried " + ("; ".join(tried) or "nothing, for there is no training data") + ". Pass "
            "`ResidualInit(example_inputs=...)`, or set `example_input_array` on the module. Nothing was changed."
        )

    def _accept(self, plan: ResidualPlan) -> None:
        names = [b.name for b in plan.branches]
        if names != self.history.branches:
            self.history = History(names, self.on_ratio)
        self.plan = plan

    # ---------------------------------------------------------------- 2. prove the identity

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Every gate has to be in an optimizer, and should not be decayed."""
        moved = self._mark is not None and self._mark.moved
        fresh = trainer.global_step == 0 and not self._resumed and not moved
        self._watch = Watch(judge=self.plan is not None, fresh=fresh)
        if self.plan is not None:
            check_optimizers(trainer.optimizers, pl_module, self.plan)

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        """On the first step observe, on logging steps measure; otherwise nothing."""
        if self.plan is None:
            return
        first = self._watch.judge and self._watch.observation is None
        if first or (self._logs(trainer) and self.plan.branches):
            logs = _is_due(trainer, trainer.log_every_n_steps)
            self._watch.start(pl_module, self.plan, batch if first else None, logs)

    def on_before_backward(self, trainer: Any, pl_module: nn.Module, loss: Tensor) -> None:
        """The forward is done: every branch has to have contributed exactly nothing."""
        observation, waking = self._watch.observation, self._watch.waking
        if waking is not None and waking.waiting:
            waking.before_backward(pl_module, loss)
        if not pl_module.automatic_optimization:
            if observation is not None:
                observation.link(loss)
            return
        self._watch.stop_forward(loss)
        self._judge_identity(trainer)

    def _judge_identity(self, trainer: Any) -> None:
        observation, self._watch.fresh, fresh = self._watch.observation, False, self._watch.fresh
        if observation is None or not fresh or self.plan is None:
            return
        self.identity_report = observation.identity
        found = self._agreed(trainer, "" if self.identity_report.ok else str(self.identity_report))
        if found:
            self._act(self.identity, IdentityError(found, self.identity_report))
        changed = [s for s in self.identity_report.stacks if s.changed_by and s.deviation > 0]
        if changed and not found:
            warn(
                f"the stream from {changed[0].first} to {changed[0].last} also passes "
                f"{', '.join(changed[0].changed_by[:4])}: the branches are closed, "
                "but the stack is the identity only up to these."
            )

    # ---------------------------------------------------------------- 3. judge the gradients

    def on_after_backward(self, trainer: Any, pl_module: nn.Module) -> None:
        """Judge the first gradients, unless a scaler or manual optimization makes them final only later."""
        if pl_module.automatic_optimization and trainer.scaler is None:
            self._judge_gradients(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: nn.Module, optimizer: Any) -> None:
        """Unscaled, unclipped gradients: judge them if that is still due, look at sleepers again, record."""
        if self.plan is None or not holds_gates(optimizer, trainer.optimizers, pl_module, self.plan):
            return
        if not pl_module.automatic_optimization:
            self._watch.stop_forward(None)
            self._judge_identity(trainer)
        if self._watch.due:
            held = held_names(optimizer, pl_module) if len(trainer.optimizers) > 1 else None
            self._judge_step(trainer, pl_module, optimizer, held)
        self._record(trainer, pl_module)
        if self._mark is not None:
            self._mark.moved = True

    def _judge_step(self, trainer: Any, pl_module: nn.Module, optimizer: Any, held: set[str] | None) -> None:
        skipped = trainer.scaler is not None and self._any_rank(trainer, not has_finite_gradients(optimizer))
        if not skipped or self._watch.waited >= _SCALER_WAIT:
            self._judge_gradients(trainer, pl_module, held)
            self._look_again(trainer, pl_module, optimizer, held)
            self._warn_about_rest(pl_module, optimizer)
        elif self._watch.judge:
            self._watch.waited += 1
            self._watch.drop()

    def _judge_gradients(self, trainer: Any, pl_module: nn.Module, held: set[str] | None = None) -> None:
        """The first verdict; gates other than those ``held`` by this optimizer may have no gradient yet."""
        observation = self._watch.observation
        if observation is None or not self._watch.judge or self.plan is None or not observation.saw_backward:
            return
        self._watch.judge = False
        observation.finish()
        self._watch.retire()
        self.gradient_report = observation.gradients
        if _will_unfreeze(trainer):
            self.gradient_report = until_unfrozen(self.gradient_report, pl_module)
        if held is not None:
            self.gradient_report = until_stepped(self.gradient_report, held)
        self._watch.waking = Waking(self.gradient_report, self.patience)
        self._watch.alive = {n for n, g in self.gradient_report.gates.items() if g.status == "alive"}
        if self._slept:  # a run that was resumed: this is one more look at those that slept before
            self.gradient_report = self._watch.waking.resume(pl_module, self._slept)
            self._slept = {}
        self._watch.judged_now = True
        self._alarm(trainer)
        self._warn_about_sizes()

    def _look_again(self, trainer: Any, pl_module: nn.Module, optimizer: Any, held: set[str] | None) -> None:
        """A real step: some gate may have woken, or used up its patience."""
        waking = self._watch.waking
        if self._watch.judged_now:
            self._watch.judged_now = False
            return
        if waking is None or not self._watch.waiting or not has_rate(optimizer):
            return
        self.gradient_report = waking.step(pl_module, held)
        self._alarm(trainer)

    def _warn_about_frozen(self, trainer: Any, pl_module: nn.Module) -> None:
        waiting = self._watch.waking.slept if self._watch.waking is not None else {}
        frozen = [n for n, p in pl_module.named_parameters() if clean_name(n) in waiting and not p.requires_grad]
        if frozen and _will_unfreeze(trainer):
            warn(
                f"{len(frozen)} gates are still frozen at the end ({together(frozen)}): they were to be unfrozen, and "
                "were not, so their branches never contributed. Unfreeze them earlier, or train longer."
            )

    def _warn_about_rest(self, pl_module: nn.Module, optimizer: Any) -> None:
        """Some steps after the verdict, what has a gradient should have moved."""
        if self.plan is None or self._watch.judge or self._watch.steps > STEPS_TO_MOVE:
            return
        if self._watch.steps == STEPS_TO_MOVE and self._watch.alive:
            warn_about_rest(optimizer, pl_module, self.plan, self._watch.alive)
        self._watch.steps += has_rate(optimizer)

    def _alarm(self, trainer: Any) -> None:
        report = self.gradient_report
        assert report is not None
        found = self._agreed(trainer, "" if report.ok else str(report))
        if found:
            self._act(self.gradient, GradientError(found, report))
        waking = self._watch.waking
        self._watch.waiting = self._any_rank(trainer, waking is not None and waking.waiting)

    def _warn_about_sizes(self) -> None:
        assert self.gradient_report is not None
        gates = self.gradient_report.gates.values()
        exploding = [g for g in gates if g.status == "exploding"]
        if exploding:
            where = f", at {exploding[0].source}" if exploding[0].source else ""
            warn(f"{together([g.parameter for g in exploding])}: {exploding[0].cause}{where}.")
        slow = [g for g in gates if g.status == "alive" and g.slope < SLOW]
        if slow:
            by = f", attenuated by {slow[0].attenuated_by}" if slow[0].attenuated_by else ""
            warn(
                f"slow start: only {slow[0].slope:.1e} of the error reaches "
                f"{together([g.parameter for g in slow])}{by}. "
                "Raise that factor, or close it instead of what lies before it."
            )

    # ---------------------------------------------------------------- 4. watch the blocks switch on

    def _logs(self, trainer: Any) -> bool:
        every = self.log_every_n_steps
        return _is_due(trainer, trainer.log_every_n_steps if every is None else every)

    def _record(self, trainer: Any, pl_module: nn.Module) -> None:
        self._watch.collect()
        moments = self._watch.moments
        if self.plan is None or moments is None or self._watch.recorded:
            return
        moments.update(*torch.zeros(3, 2 * len(self.plan), device=moments.device))  # also where no block ran
        record = to_record(trainer.global_step, gate_statistics(pl_module, self.plan), moments)
        if bool(record.var_stream.isnan().all()):  # on no rank
            self._watch.end_record()
            return
        self.history.append(record.step, record.gates, record.var_stream, record.var_branch)
        self._watch.recorded = True

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Send the record to every logger; a batch without backward or optimizer step is tried again."""
        self._watch.stop_forward(None)  # there was no backward, or no step that ended it
        if self._watch.recorded:
            self._send(trainer, pl_module)
            self._unpictured = True
            self._watch.end_record()
            self._follow(trainer)
        if self._watch.observation is not None and not _accumulates(trainer):
            self._watch.drop()
        self._watch.end_batch()

    def _send(self, trainer: Any, pl_module: nn.Module) -> None:
        """One call to each logger; the progress bar only where that was asked for."""
        values = metrics(self.history, self.per_branch)
        aggregates = {k: torch.tensor(v) for k, v in values.items() if k.count("/") == 1}
        trainer.callback_metrics.update(aggregates)
        if self._watch.logs:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=_step_index(trainer))
        if self.progress_bar and trainer.progress_bar_callback is not None:
            name = f"blocks on/{len(self.history.branches)}"
            pl_module.log(name, values["resinit/switched_on"], prog_bar=True, logger=False)  # type: ignore[operator]

    def _send_figure(self, trainer: Any) -> None:
        """The heat map of a new record; matplotlib is an extra, without it loggers get numbers only."""
        if not self._unpictured or trainer.fast_dev_run or not trainer.is_global_zero:
            return
        takers = [send for logger in trainer.loggers if (send := takes_figures(logger)) is not None]
        if takers and importlib.util.find_spec("matplotlib") is not None:
            self._unpictured, figure = False, activation_figure(self.history)
            for send in takers:
                send("resinit/blocks", figure, _step_index(trainer))

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Print the table, and write what was asked for."""
        self._warn_about_frozen(trainer, pl_module)
        if self.plan is None or not len(self.history):
            return
        if self._measure_usefulness:
            shows = trainer.is_global_zero and trainer.progress_bar_callback is not None
            batches, loss = few_batches(trainer, 4), training_loss(trainer)
            self.usefulness = measure_usefulness(pl_module, self.plan, batches, loss, progress=shows)
            self.agreements = agreements(self.history, self.usefulness)
        now = gate_statistics(pl_module, self.plan).cpu()
        if trainer.is_global_zero:
            Console().print(history_table(self.plan, self.history, gate_max=now[1], step=trainer.global_step))
            for agreement in self.agreements:
                Console().print(str(agreement), highlight=False)
            moved = self.history.movement(now[0], now[1])
            judged, steps = self.gradient_report, trainer.global_step
            warn_about_still_gates(
                trainer.optimizers, pl_module, self.plan, moved, judged, steps, records=len(self.history)
            )
            if self.report is not None and self._page is None:
                replace_file(self.report, activation_figure(self.history).savefig)
        self._follow(trainer, "finished", last=True)

    def on_train_epoch_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Rewrite the page, where that is due, and give the picture to loggers that take one."""
        if self.plan is not None:
            self._follow(trainer)
            self._send_figure(trainer)

    def _follow(self, trainer: Any, state: str = "running", last: bool = False) -> None:
        """Rewrite the page; a full disk is a reason to say so, and none to stop the training."""
        if self._page is None or not trainer.is_global_zero or not (last or self._page.due):
            return
        try:
            text = f"{state} at step {trainer.global_step}, written {clock()}"
            self._page.write(self.history, self._about(), text, last)
        except OSError as error:
            warn(f"the page {self.report} could not be rewritten ({error}); the training goes on.")

    def _about(self) -> dict[str, Any]:
        woke = self._watch.waking.woke if self._watch.waking is not None else None
        told = " ".join(str(a) for a in self.agreements)
        now = about_run(self.plan, self.identity_report, self.gradient_report, woke, self.usefulness, told)
        return now if self._before is None else later(self._before, now)

    # ---------------------------------------------------------------- verdicts and state

    def _agreed(self, trainer: Any, message: str) -> str:
        """One rank's finding is every rank's, so that all of them raise, or none; "" when none found anything."""
        if not trainer.strategy.reduce_boolean_decision(bool(message), all=False):
            return ""
        found = _of_every_rank(message)
        return message or found

    def _any_rank(self, trainer: Any, found: bool) -> bool:
        return bool(trainer.strategy.reduce_boolean_decision(found, all=False))

    def _act(self, policy: Policy, error: ResInitError) -> None:
        if policy == "raise":
            self._watch.stop()
            raise error
        if policy == "warn":
            warn(str(error))

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Leave no hook or mode behind, and a page that says what stopped the run."""
        end_measuring()
        self._watch.stop()
        self._stop_explaining()
        give_back_loader(trainer, pl_module)
        if self.plan is not None:
            self._follow(trainer, f"stopped by {type(exception).__name__}", last=True)

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Leave no hook or mode behind, nor the bound ``log`` methods of the Trainer, which hold the module."""
        self._watch.close()
        self._stop_explaining()
        give_back_loader(trainer, pl_module)
        for name in ("log", "log_dict"):
            vars(self).pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        """Plain types only, so that the checkpoint loads with ``weights_only=True``."""
        folds = {g.parameter: [[n, g.value] for n in g.folds_into] for g in self.plan.gates} if self.plan else {}
        return {
            "closed": self.plan is not None,
            "history": self.history.to_dict(),
            "slept": self._watch.waking.slept if self._watch.waking is not None else dict(self._slept),
            "folds": folds,
            "about": self._about(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the history of the run that is resumed, and the patience with what slept."""
        self._resumed = bool(state_dict["closed"])
        self._slept = {str(k): int(v) for k, v in state_dict["slept"].items()}
        self._before = state_dict.get("about")
        history = History.from_dict(state_dict["history"])
        if not self.history.branches or history.branches == self.history.branches:
            self.history = history

    def on_load_checkpoint(self, trainer: Any, pl_module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Tell gates that came with the checkpoint into which weights they fold."""
        folds = checkpoint["callbacks"].get(self.state_key, {}).get("folds", {})
        for name, hook in inserted_gates(pl_module):
            if not hook.folds_into and name in folds:
                hook.folds_into = tuple((str(n), float(v)) for n, v in folds[name])


# -------------------------------------------------------------------- what the Trainer knows


def _check_options(
    scheme: str, include: Any, exclude: Any, identity: str, gradient: str, patience: Any, on_ratio: Any, every: Any
) -> None:
    if scheme not in get_args(Scheme):
        raise ValueError(f"Expected argument `scheme` to be one of {', '.join(get_args(Scheme))} but got {scheme!r}")
    for name, policy in (("identity", identity), ("gradient", gradient)):
        if policy not in get_args(Policy):
            raise ValueError(
                f"Expected argument `{name}` to be one of {', '.join(get_args(Policy))} but got {policy!r}"
            )
    check_patterns(include, exclude)
    if not isinstance(patience, int) or patience < 1:
        raise ValueError(f"Expected argument `patience` to be a number of steps of at least 1 but got {patience!r}")
    if not isinstance(on_ratio, int | float) or not on_ratio > 0:
        raise ValueError(f"Expected argument `on_ratio` to be a positive number but got {on_ratio!r}")
    if every is not None and (not isinstance(every, int) or every < 0):
        raise ValueError(f"Expected argument `log_every_n_steps` to be None or a number of steps but got {every!r}")


def _step_index(trainer: Any) -> int:
    """Optimizer steps counted by batches, the x-axis of Lightning's own logs."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def _is_due(trainer: Any, every: int) -> bool:
    return bool(every) and (_step_index(trainer) + 1) % every == 0


def _accumulates(trainer: Any) -> bool:
    return bool(trainer.fit_loop._should_accumulate())


def _of_every_rank(message: str) -> str:
    """The first message that is none of this rank's silence, with the rank that has it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return "on another rank, which says more."
    messages: list[str] = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(messages, message)
    return next((f"on rank {rank}: {text}" for rank, text in enumerate(messages) if text), "")


def _will_unfreeze(trainer: Any) -> bool:
    """Whether a callback of the kind of ``BackboneFinetuning`` unfreezes parameters later."""
    return any(hasattr(c, "unfreeze_and_add_param_group") for c in trainer.callbacks)
