"""The callback in every trainer case: what it reports and leaves behind is the case's known answer."""

import functools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from benchmarks.cases.base import Case, as_tuple, load
from benchmarks.cases.lightning_base import FirstIdentity, RawProbe
from lit_resinit import GateOptimizerError, ResidualInit, ResInitError

CASES = {name: item for name, item in load().items() if item.lightning}
Run = Callable[..., dict[str, Any]]


def play(name: str, *others: pl.Callback, **options: Any) -> tuple[Case, ResidualInit, Run]:
    """The case, the last callback that its run will make, and the run itself."""
    item = CASES[name]
    ours = ResidualInit(**options)
    return item, ours, functools.partial(item.build()["run"], lambda: [ours, *others])


def assert_reports(item: Case, ours: ResidualInit) -> None:
    """The verdicts that the case states are those of the callback."""
    if "identity" in item.expect:
        assert ours.identity_report is not None
        found = {row.block: row for row in ours.plan.branches}
        status = {row.name: row.status for row in ours.identity_report.branches}
        for block, verdict in item.expect["identity"].items():
            assert status[found[block].name] == verdict[0]
    assert ours.gradient_report is not None
    for name, accepted in item.expect["gradient"].items():
        assert ours.gradient_report.gates[name].status in as_tuple(accepted)


class ValuesAt(pl.Callback):
    """Notes the largest absolute value of some parameters in the hooks before training."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.largest: dict[str, float] = {}
        self.batches = 0

    def _note(self, hook: str, module: pl.LightningModule) -> None:
        values = [float(p.detach().abs().max()) for n, p in module.named_parameters() if n in self.names]
        self.largest[hook] = max(values, default=math.nan)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._note("setup", pl_module)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note("on_fit_start", pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.batches += 1


# -------------------------------------------------------------------- when the model exists


def test_blocks_built_in_the_constructor_are_closed_in_setup(tmp_path: Path) -> None:
    at, probe = ValuesAt(CASES["blocks_built_in_the_constructor"].expect["zeroed"]), FirstIdentity()
    item, ours, run = play("blocks_built_in_the_constructor", at, probe, scheme="last_layer")
    run(tmp_path)
    assert at.largest[item.expect["initialised_in"]] == 0.0
    assert probe.equal == {"blocks.0": True, "blocks.1": True}
    assert_reports(item, ours)


def test_blocks_built_in_configure_model_are_closed_at_fit_start(tmp_path: Path) -> None:
    at, probe = ValuesAt(CASES["blocks_built_in_configure_model"].expect["zeroed"]), FirstIdentity()
    item, ours, run = play("blocks_built_in_configure_model", at, probe, scheme="last_layer")
    run(tmp_path)
    assert math.isnan(at.largest["setup"])
    assert at.largest[item.expect["initialised_in"]] == 0.0
    assert probe.equal == {"blocks.0": True, "blocks.1": True}
    assert_reports(item, ours)


def test_inserting_into_blocks_of_configure_model_is_refused(tmp_path: Path) -> None:
    at = ValuesAt([])
    item, _, run = play("blocks_built_in_configure_model", at, scheme="insert")
    with pytest.raises(ResInitError) as caught:
        run(tmp_path)
    assert at.batches == 0
    for name in item.expect["insert_instead"]["names_in_text"]:
        assert name in str(caught.value)


# -------------------------------------------------------------------- repeated verbs, resume


def test_only_the_first_fit_closes_anything(tmp_path: Path) -> None:
    item, _, run = play("fit_then_validate_test_and_fit_again", scheme="last_layer")
    shots = run(tmp_path)["snapshots"]
    tails = shots["start of second fit"]
    assert tails
    for label in item.expect["unchanged_by"]:
        assert all(torch.equal(shots["fit"][name], shots[label][name]) for name in tails)
    assert all(bool(shots["fit"][name].any()) for name in tails)


def test_resuming_restores_the_trained_gates(tmp_path: Path) -> None:
    item = CASES["resume_from_a_full_checkpoint"]
    seen = item.build()["run"](lambda: [ResidualInit(scheme="last_layer")], tmp_path)
    first_batch = seen["probe"].values[0]
    assert set(first_batch) == set(item.expect["restored_exactly"])
    for name, value in first_batch.items():
        assert torch.equal(value, seen["stored"][name])
        assert bool(value.any())
    (second,) = seen["callbacks"]
    assert second.identity_report is None
    assert_reports(item, second)


# -------------------------------------------------------------------- optimisers


def test_gates_in_no_optimizer_stop_the_run_before_the_first_batch(tmp_path: Path) -> None:
    at = ValuesAt([])
    item, _, run = play("optimizer_built_from_an_explicit_list", at)
    with pytest.raises(GateOptimizerError) as caught:
        run(tmp_path)
    assert at.batches == 0
    assert [n for n in item.expect["names_in_text"] if n not in str(caught.value)] == []


def test_gates_are_judged_at_the_step_of_their_own_optimizer(tmp_path: Path) -> None:
    item, ours, run = play("two_optimizers_by_hand_critic_first")
    run(tmp_path)
    assert_reports(item, ours)


def test_one_unclipped_record_for_each_optimizer_step(tmp_path: Path) -> None:
    probe = RawProbe()
    item, ours, run = play("accumulate_two_batches_and_clip_hard", probe, log_every_n_steps=1)
    run(tmp_path)
    assert_reports(item, ours)
    assert ours.history.steps.tolist() == list(range(item.expect["optimizer_steps"]))
    for row, sizes in zip(ours.history.gate_grad, probe.sizes, strict=True):
        assert row.tolist() == pytest.approx(list(sizes.values()), rel=1e-6)


class FirstVerdict(pl.Callback):
    """Notes at which optimizer step the callback had its first verdict."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.calls = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        ours = next(c for c in trainer.callbacks if isinstance(c, ResidualInit))
        if self.step is None and ours.gradient_report is not None:
            self.step = self.calls
        self.calls += 1


def test_gradient_scaler_overflow_is_waited_out(tmp_path: Path) -> None:
    probe, verdict = RawProbe(), FirstVerdict()
    item, ours, run = play("gradient_scaler_skips_the_first_steps", probe, verdict)
    run(tmp_path)
    gates = list(item.expect["gradient"])
    moved = [all(float(values[n]) != 0.0 for n in gates) for values in probe.values]
    assert verdict.step == moved.index(True) - 1 > 0
    assert_reports(item, ours)


def test_a_training_step_that_returns_none_says_nothing(tmp_path: Path) -> None:
    verdict = FirstVerdict()
    item, ours, run = play("training_step_returns_none_once", verdict)
    run(tmp_path)
    assert verdict.step == 1
    assert_reports(item, ours)


def test_a_learning_rate_of_zero_is_no_alarm(tmp_path: Path) -> None:
    item, ours, run = play("learning_rate_zero_for_two_steps")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(tmp_path)
    assert [w for w in caught if item.expect["must_not_warn"] in str(w.message)] == []
    assert_reports(item, ours)


# -------------------------------------------------------------------- logging, copies


def test_history_is_kept_without_any_logger(tmp_path: Path) -> None:
    item, ours, run = play("no_logger_at_all")
    assert len(run(tmp_path)["trainer"].loggers) == item.expect["trainer_loggers"]
    assert ours.history.steps.tolist() == [0, 1, 2, 3]
    assert_reports(item, ours)


def test_inserting_before_weight_averaging_works(tmp_path: Path) -> None:
    _, ours, run = play("weight_averaging_listed_before_the_inserter", scheme="insert")
    run(tmp_path)
    assert ours.gradient_report.ok


def test_inserting_after_weight_averaging_is_refused(tmp_path: Path) -> None:
    at = ValuesAt([])
    item, _, run = play("weight_averaging_listed_before_the_inserter", at, scheme="insert")
    with pytest.raises(ResInitError) as caught:
        run(tmp_path, averaging_first=True)
    assert at.batches == 0
    for name in item.expect["order"]["averaging first"]["names_in_text"]:
        assert name in str(caught.value)


def test_closing_after_weight_averaging_works(tmp_path: Path) -> None:
    _, ours, run = play("weight_averaging_listed_before_the_inserter", scheme="last_layer")
    run(tmp_path, averaging_first=True)
    assert ours.gradient_report.ok


# -------------------------------------------------------------------- two processes, compilers


class WriteVerdict(pl.Callback):
    """Saves the verdicts of each process to a file."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ours = next(c for c in trainer.callbacks if isinstance(c, ResidualInit))
        verdict = {
            "identity": [(b.name, b.status) for b in ours.identity_report.branches],
            "gradient": {n: g.status for n, g in ours.gradient_report.gates.items()},
            "variance": ours.history.var_stream,
        }
        torch.save(verdict, self.root / f"verdict{trainer.global_rank}.pt")


@pytest.mark.ranks
def test_two_processes_start_and_judge_alike(tmp_path: Path) -> None:
    item, _, run = play("two_gloo_processes", WriteVerdict(tmp_path), scheme="last_layer", log_every_n_steps=1)
    ranks = run(tmp_path)["ranks"]
    for rank in ranks:
        assert rank["world"] == 2
        assert all(not rank["start"][n].any() for n in item.expect["zeroed"])
        assert all(rank["alive"].values())
    verdicts = [torch.load(tmp_path / f"verdict{r}.pt") for r in range(2)]
    assert verdicts[0]["gradient"] == verdicts[1]["gradient"] == item.expect["gradient"]
    assert verdicts[0]["identity"] == verdicts[1]["identity"]
    assert {status for _, status in verdicts[0]["identity"]} == {"closed"}
    assert_merged(*(v["variance"] for v in verdicts))


def assert_merged(left: Tensor, right: Tensor) -> None:
    """The moments of all ranks are one number, seen alike by each."""
    assert left.shape[0] > 0
    assert torch.equal(left, right)


def test_compiled_blocks_are_closed_under_their_own_names(tmp_path: Path) -> None:
    at = ValuesAt(CASES["compiled_submodule_and_late_hooks"].expect["zeroed"])
    item, ours, run = play("compiled_submodule_and_late_hooks", at, scheme="last_layer")
    run(tmp_path)
    assert at.largest["setup"] == 0.0
    assert item.expect["names_without"] not in str(ours.plan.to_dict())
    assert_reports(item, ours)


def test_gates_inserted_into_compiled_blocks_learn(tmp_path: Path) -> None:
    _, ours, run = play("compiled_submodule_and_late_hooks", scheme="insert")
    module = run(tmp_path)["module"]
    assert ours.identity_report.ok
    assert all(float(module.get_parameter(g.parameter).detach()) != 0.0 for g in ours.plan.gates)


# -------------------------------------------------------------------- traces and cost


def test_metric_in_the_training_step_counts_each_row_once(tmp_path: Path) -> None:
    item, ours, run = play("metric_in_training_step_is_not_polluted")
    module = run(tmp_path)["module"]
    assert float(module.rows.compute()) == item.expect["metric"]["rows"]
    assert_reports(item, ours)


def test_observing_leaves_no_trace(tmp_path: Path) -> None:
    item, ours, run = play("no_trace_with_norm_dropout_and_workers", scheme="observe", log_every_n_steps=2)
    plain = item.build()["run"](list, tmp_path)
    watched = run(tmp_path)
    assert watched["losses"] == plain["losses"]
    assert watched["fingerprint"] == plain["fingerprint"]
    assert ours.history.steps.tolist() == [0, 1, 3]
    assert_reports(item, ours)


def test_host_waits_only_on_logging_steps(tmp_path: Path) -> None:
    item, ours, run = play("forty_eight_blocks_without_host_reads")
    plain = item.build()["run"](list, tmp_path)["reads_per_step"]
    added = [more - less for more, less in zip(run(tmp_path)["reads_per_step"], plain, strict=True)]
    logging = {9, 19}
    assert [n for i, n in enumerate(added) if i >= 3 and i not in logging] == [0] * 15
    assert max(added[i] for i in logging) <= 2
    assert ours.history.steps.tolist() == [0, 9, 19]
    assert_reports(item, ours)


def test_no_activation_outlives_its_step(tmp_path: Path) -> None:
    item, ours, run = play("no_activation_kept_alive_over_steps", log_every_n_steps=5)
    alive = run(tmp_path)["alive"]
    assert alive[58] - alive[10] == item.expect["live_tensors_added"]
    assert alive[10] == item.build()["run"](list, tmp_path)["alive"][10]
    assert_reports(item, ours)


def test_every_trainer_case_is_played() -> None:
    assert len(CASES) == 18
