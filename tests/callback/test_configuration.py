"""Command line, YAML, callbacks of the module, and both names of the package."""

import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from networks import WIDTH, Classifier, Plain, data, stack, trainer
from torch.utils.data import DataLoader

from lit_resinit import ResidualInit


class Module(Classifier):
    """A module that the command line can build."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__(stack(Plain, depth))


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return data(WIDTH)


QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "max_steps": 3,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def run_cli(*arguments: str) -> ResidualInit:
    cli = LightningCLI(
        Module, Data, args=list(arguments), trainer_defaults=QUIET, save_config_callback=None, seed_everything_default=1
    )
    (ours,) = [c for c in cli.trainer.callbacks if isinstance(c, ResidualInit)]
    return ours


def test_command_line(tmp_path: Path) -> None:
    ours = run_cli(
        "fit",
        f"--trainer.default_root_dir={tmp_path}",
        "--trainer.callbacks+=ResidualInit",
        "--trainer.callbacks.scheme=last_layer",
        "--trainer.callbacks.include=[net.0]",
        "--trainer.callbacks.log_every_n_steps=1",
        "--model.depth=3",
    )
    assert [b.action for b in ours.plan.branches] == ["last_layer", "excluded", "excluded"]
    assert ours.history.steps.tolist() == [0, 1, 2]


YAML = """
trainer:
  callbacks:
    - class_path: lit_resinit.ResidualInit
      init_args:
        scheme: insert
        exclude: net.1
        identity: warn
        patience: 7
        on_ratio: 0.01
        log_every_n_steps: 1
"""


def test_yaml(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(YAML)
    ours = run_cli("fit", f"--config={tmp_path / 'config.yaml'}", f"--trainer.default_root_dir={tmp_path}")
    assert (ours.scheme, ours.identity, ours.patience, ours.on_ratio) == ("insert", "warn", 7, 0.01)
    assert [b.action for b in ours.plan.branches] == ["insert", "excluded"]
    assert ours.identity_report.ok


@pytest.mark.parametrize("wrong", ["--trainer.callbacks.scheme=nothing", "--trainer.callbacks.patience=many"])
def test_a_wrong_value_on_the_command_line_is_named(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_cli("fit", "--trainer.callbacks+=ResidualInit", wrong)
    assert wrong.rpartition("=")[2] in capsys.readouterr().err


def test_every_option_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        LightningCLI(Module, Data, args=["fit", "--trainer.callbacks.help=ResidualInit"])
    printed = capsys.readouterr().out
    for text in (
        "Globs on branch names; only these are touched",
        "Optimizer steps that a gate may sleep",
        "Close every branch in turn on a few validation batches",
        "Path of a page",
    ):
        assert text in " ".join(printed.split())


def test_a_module_may_bring_the_callback_itself(tmp_path: Path) -> None:
    made: list[ResidualInit] = []

    class Brings(Classifier):
        def configure_callbacks(self) -> ResidualInit:
            made.append(ResidualInit())
            return made[-1]

    module, run = Brings(stack(Plain), lr=0.1), trainer(tmp_path, max_epochs=-1)
    run.fit(module, data(WIDTH))
    trained = {n: p.detach().clone() for n, p in module.named_parameters()}
    assert made[0].identity_report.ok
    run.validate(module, data(WIDTH), verbose=False)
    assert all(torch.equal(trained[n], p) for n, p in module.named_parameters())
    run.fit_loop.epoch_loop.max_steps = 6
    run.fit(module, data(WIDTH))  # a new instance, which recognises the module
    assert len(made) == 3
    assert made[2].identity_report is None
    assert made[2].gradient_report.ok
    assert made[2].history.steps.tolist() == [3, 4, 5]
    assert all(bool(module.get_parameter(g.parameter).detach().any()) for g in made[2].plan.gates)


SCRIPT = """
import torch
{first}
import {package} as pl
from {package}.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    def forward(self, x):
        return x + self.f(x)

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Block(), Block())

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=4)

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
quiet |= dict(accelerator="cpu", max_epochs=1, log_every_n_steps=1)
args = ["fit", "--trainer.callbacks+=lit_resinit.ResidualInit"]
cli = LightningCLI(Module, Data, args=args, trainer_defaults=quiet, save_config_callback=None)
from lit_resinit import ResidualInit
ours = next(c for c in cli.trainer.callbacks if isinstance(c, ResidualInit))
assert isinstance(ours, pl.Callback)
assert ours.identity_report.ok and ours.gradient_report.ok and len(ours.history) == 3
ours = ResidualInit()
pl.Trainer(**quiet, callbacks=[ours]).fit(Module(), Data())
assert ours.identity_report.ok and len(ours.plan) == 2
"""


@pytest.mark.parametrize("imported", ["", "import lightning.pytorch"], ids=["alone", "both"])
@pytest.mark.slow
def test_the_older_name_of_the_package(imported: str, tmp_path: Path) -> None:
    source = SCRIPT.format(first=imported, package="pytorch_lightning")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
