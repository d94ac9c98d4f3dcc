"""One callback in several fits: steps go on, or a new history starts, and what is shown says so."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from networks import WIDTH, Classifier, NormLast, Plain, Scaled, data, stack, trainer
from torch import nn

from lit_resinit import ResidualInit


def test_a_cell_that_runs_twice_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, module = ResidualInit(report=str(tmp_path / "run.html")), Classifier(stack(Plain))
    for _ in range(3):
        trainer(tmp_path, ours).fit(module, data(WIDTH))
    assert ours.history.steps.tolist() == list(range(9))
    assert ours.identity_report.ok  # that of the first start
    assert "3 fits of this network" in capsys.readouterr().out
    page = (tmp_path / "run.html").read_text()
    assert "3 fits of this network: a later one began at step 3, 6" in page
    assert "finished at step 9" in page


def test_the_same_trainer_goes_on_where_it_was(tmp_path: Path) -> None:
    ours, module = ResidualInit(), Classifier(stack(Plain))
    runner = trainer(tmp_path, ours, max_epochs=-1)
    runner.fit(module, data(WIDTH))
    runner.fit_loop.epoch_loop.max_steps = 6
    runner.fit(module, data(WIDTH))
    assert ours.history.steps.tolist() == list(range(6))


def test_a_fit_after_one_that_was_stopped_goes_on(tmp_path: Path) -> None:
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
            if trainer.global_step == 2:
                raise RuntimeError("stopped")

    ours, module = ResidualInit(), Classifier(stack(Plain))
    with pytest.raises(RuntimeError, match="stopped"):
        trainer(tmp_path, ours, Stop()).fit(module, data(WIDTH))
    trainer(tmp_path, ours).fit(module, data(WIDTH))
    assert ours.history.steps.tolist() == list(range(5))


@pytest.mark.parametrize("second", [lambda: Classifier(stack(Plain)), lambda: Classifier(stack(NormLast))])
def test_another_network_starts_anew(second: Any, tmp_path: Path) -> None:
    ours = ResidualInit()
    trainer(tmp_path, ours).fit(Classifier(stack(Plain)), data(WIDTH))
    first = ours.identity_report
    trainer(tmp_path, ours, max_steps=2).fit(second(), data(WIDTH))
    assert ours.history.steps.tolist() == [0, 1]
    assert ours.identity_report is not first
    assert ours.identity_report.ok


def test_a_network_that_another_callback_closed_starts_anew(tmp_path: Path) -> None:
    closed, ours = Classifier(stack(Plain)), ResidualInit()
    trainer(tmp_path, ResidualInit()).fit(closed, data(WIDTH))
    trainer(tmp_path, ours).fit(Classifier(stack(Plain)), data(WIDTH))
    trainer(tmp_path, ours, max_steps=2).fit(copy.deepcopy(closed), data(WIDTH))
    assert ours.history.steps.tolist() == [0, 1]
    assert ours.identity_report is None  # there was none to prove


def test_a_run_that_fails_in_setup_shows_nothing_of_the_one_before(tmp_path: Path) -> None:
    ours = ResidualInit()
    trainer(tmp_path, ours).fit(Classifier(stack(Plain)), data(WIDTH))

    class Broken(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("broken")

    with pytest.raises(Exception, match="broken"):
        trainer(tmp_path, ours).fit(Broken(stack(Plain)), data(WIDTH))
    trainer(tmp_path, ours, max_steps=2).fit(Classifier(stack(Plain)), data(WIDTH))
    assert ours.history.steps.tolist() == [0, 1]


def test_steps_go_on_over_a_resume_of_the_second_fit(tmp_path: Path) -> None:
    ours, module = ResidualInit(), Classifier(stack(Plain))
    trainer(tmp_path, ours).fit(module, data(WIDTH))
    runner = trainer(tmp_path, ours)
    runner.fit(module, data(WIDTH))
    runner.save_checkpoint(tmp_path / "run.ckpt")
    again = ResidualInit()
    resumed = trainer(tmp_path, again, max_steps=5, max_epochs=-1)
    resumed.fit(Classifier(stack(Plain)), data(WIDTH), ckpt_path=tmp_path / "run.ckpt")
    assert again.history.steps.tolist() == list(range(8))
    earlier = trainer(tmp_path, ours, max_steps=5, max_epochs=-1)  # the callback of before resumes what it has seen
    earlier.fit(module, data(WIDTH), ckpt_path=tmp_path / "run.ckpt")
    assert ours.history.steps.tolist() == list(range(8))


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_a_checkpoint_in_another_verb_leaves_the_records_alone(verb: str, tmp_path: Path) -> None:
    class Tested(Classifier):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.validation_step(batch, batch_idx)

    ours, module = ResidualInit(), Tested(stack(Plain))
    runner = trainer(tmp_path, ours, max_epochs=-1)
    runner.fit(module, data(WIDTH))
    runner.save_checkpoint(tmp_path / "early.ckpt")
    runner.fit_loop.epoch_loop.max_steps = 6
    runner.fit(module, data(WIDTH))
    getattr(runner, verb)(module, data(WIDTH), ckpt_path=tmp_path / "early.ckpt", verbose=False)
    assert ours.history.steps.tolist() == list(range(6))


# -------------------------------------------------------------------- branches that were not closed by the callback


def excluded(tmp_path: Path) -> ResidualInit:
    ours = ResidualInit(exclude="net.0", on_ratio=1e-9)
    trainer(tmp_path, ours).fit(Classifier(stack(Scaled, 3), lr=0.1), data(WIDTH))
    return ours


def observed(tmp_path: Path) -> ResidualInit:
    ours = ResidualInit(scheme="observe", identity="ignore", on_ratio=1e-9)
    trainer(tmp_path, ours).fit(Classifier(stack(Scaled, 3)), data(WIDTH))
    return ours


def joined(tmp_path: Path) -> ResidualInit:
    """Joins at a resume of a run that was not closed."""
    runner = trainer(tmp_path)
    runner.fit(Classifier(stack(Scaled, 3)), data(WIDTH))
    runner.save_checkpoint(tmp_path / "run.ckpt")
    ours, again = ResidualInit(on_ratio=1e-9), Classifier(stack(Scaled, 3))
    trainer(tmp_path, ours, max_steps=6, max_epochs=-1).fit(again, data(WIDTH), ckpt_path=tmp_path / "run.ckpt")
    return ours


@pytest.mark.parametrize(("run", "opened"), [(excluded, 1), (observed, 3), (joined, 3)])
def test_what_was_open_does_not_switch_on(
    run: Any, opened: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = run(tmp_path)
    assert ours.history.open_from_start() == [f"net.{i}" for i in range(opened)]
    assert ours.history.order() == sorted(f"net.{i}" for i in range(opened, 3)) or opened < 3
    assert not {*ours.history.order()} & {*ours.history.open_from_start()}
    printed = capsys.readouterr().out
    assert f"{3 - opened} of {3 - opened} residual branches switched on" in printed
    assert f"{opened} open from the start" in printed


def test_a_closed_branch_that_is_on_at_its_first_record_counts(tmp_path: Path) -> None:
    class Opens(Classifier):
        def on_train_start(self) -> None:
            with torch.no_grad():
                self.net[0].scale.fill_(0.5)

    ours = ResidualInit(identity="ignore", on_ratio=1e-9)
    trainer(tmp_path, ours).fit(Opens(stack(Scaled, 3)), data(WIDTH))
    assert ours.history.switched_on()["net.0"] == 0
    assert ours.history.order()[0] == "net.0"


def test_an_excluded_branch_shows_its_scale_whatever_comes_after(tmp_path: Path) -> None:
    class Bounded(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.relu(self.scale * self.f(x))

    ours, net = ResidualInit(exclude="net.0"), nn.Sequential(Bounded(), Scaled(), nn.Linear(WIDTH, 2))
    trainer(tmp_path, ours).fit(Classifier(net), data(WIDTH))
    assert [[g.parameter for g in b.gates] for b in ours.plan.branches] == [["net.0.scale"], ["net.1.scale"]]
    assert ours.history.gate[0, 0] == 1.0


# -------------------------------------------------------------------- the table


def test_the_table_can_be_turned_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, ResidualInit(table=False)).fit(Classifier(stack(Plain)), data(WIDTH))
    assert "switched on" not in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"barebones": True}, {"enable_progress_bar": True}])
def test_the_table_is_silent_where_the_bars_are(
    options: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "barebones" in options:
        runner = pl.Trainer(barebones=True, max_steps=3, callbacks=[ResidualInit()], accelerator="cpu", devices=1)
    else:
        runner = trainer(tmp_path, ResidualInit(), pl.callbacks.TQDMProgressBar(refresh_rate=0), **options)
    runner.fit(Classifier(stack(Plain)), data(WIDTH))
    assert "switched on" not in capsys.readouterr().out


def test_the_table_shows_when_a_gate_woke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = stack(Plain)
    nn.init.zeros_(net[-1].weight)
    trainer(tmp_path, ResidualInit()).fit(Classifier(net), data(WIDTH))
    head = capsys.readouterr().out.split("┡")[0]
    assert "woke" in head
    assert "after" in head
