"""Errors, interrupts and kills: nothing of ours stays behind, and the user's error is the one that is shown."""

import gc
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from networks import WIDTH, Classifier, Plain, PreNorm, Scaled, data, stack, trainer
from torch import Tensor, nn

from lit_resinit import ResidualInit, TraceError

HOOKS = [
    "setup",
    "on_fit_start",
    "on_sanity_check_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_save_checkpoint",
    "on_fit_end",
    "teardown",
]


class Fails(pl.Callback):
    """Raises in one hook."""

    def __init__(self, hook: str, error: BaseException) -> None:
        self.error = error
        setattr(self, hook, self._fail)

    def _fail(self, *args: Any, **kwargs: Any) -> None:
        raise self.error


def leftovers(module: nn.Module, ours: ResidualInit) -> list[str]:
    """Everything that an interrupted run of ours could have left behind."""
    found = []
    if torch._C._len_torch_dispatch_stack():
        found.append("a mode")
    if torch.is_anomaly_enabled() or not torch.is_grad_enabled():
        found.append("an autograd setting")
    if torch._dynamo.eval_frame._stance.stance != "default":
        found.append("a compiler stance")
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        found.append("a global hook")
    found += [f"patched {n}" for n in ("train_dataloader", "training_step", "log", "optimizers") if n in vars(module)]
    for name, part in module.named_modules():
        hooks = [h for h in part._forward_hooks.values() if type(h).__name__ != "GateHook"]
        if hooks or part._forward_pre_hooks or part._backward_hooks:
            found.append(f"a hook on {name}")
    looks = (ours._trial and ours._trial.observes) or (ours._watching and ours._watching.measures)
    if looks or ours._loading is not None:
        found.append("an observation")
    return found


def works(module: Classifier) -> bool:
    loss = module.train()(torch.randn(3, WIDTH)).square().sum()
    loss.backward()
    return bool(loss.isfinite())


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_in_any_hook_leaves_nothing(hook: str, first: bool, tmp_path: Path) -> None:
    module, ours = Classifier(stack(Plain)), ResidualInit()
    fails = Fails(hook, KeyError("mine"))
    options = {"num_sanity_val_steps": 1, "max_epochs": 1, "enable_checkpointing": True}
    run = trainer(tmp_path, *([fails, ours] if first else [ours, fails]), **options)
    with pytest.raises(KeyError, match="mine"):
        run.fit(module, data(WIDTH), data(WIDTH))
    assert leftovers(module, ours) == []
    assert works(module)
    trainer(tmp_path, again := ResidualInit()).fit(module, data(WIDTH))
    assert again.gradient_report.ok
    assert leftovers(module, again) == []


class Breaks(Classifier):
    """The user's own mistake, at a chosen forward of a chosen kind."""

    def __init__(self, at: int) -> None:
        super().__init__(stack(Plain))
        self.at, self.real = at, 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not isinstance(loss, torch._subclasses.FakeTensor):
            self.real += 1
            if self.real > self.at:
                raise KeyError("my own mistake")
        return loss


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_users_error_in_a_step_is_shown_as_it_is(at: int, tmp_path: Path) -> None:
    module, ours = Breaks(at), ResidualInit()
    with pytest.raises(KeyError, match="my own mistake"):
        trainer(tmp_path, ours).fit(module, data(WIDTH))
    assert leftovers(module, ours) == []
    assert works(module)


def test_a_users_error_in_the_trace_is_shown_inside(tmp_path: Path) -> None:
    class Wrong(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self(batch[0] @ torch.ones(3, 3)).sum()

    module, ours = Wrong(stack(Plain)), ResidualInit()
    with pytest.raises(TraceError, match=r"a batch of the training data: .*RuntimeError: .*(4x8 and 3x3|mat1)"):
        trainer(tmp_path, ours).fit(module, data(WIDTH))
    assert leftovers(module, ours) == []
    assert not any("residual_gate" in n for n, _ in module.named_parameters())


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_backward", "on_before_optimizer_step"])
def test_control_c_leaves_nothing(hook: str, tmp_path: Path) -> None:
    module, ours = Classifier(stack(Plain)), ResidualInit()
    with pytest.raises(SystemExit):
        trainer(tmp_path, ours, Fails(hook, KeyboardInterrupt())).fit(module, data(WIDTH))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert leftovers(module, ours) == []
    assert works(module)


KILLED = """
import sys, time
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from networks import WIDTH, Classifier, Plain, data, stack, trainer
from lit_resinit import ResidualInit

class Slow(pl.Callback):
    def on_train_batch_end(self, *args):
        time.sleep(0.05)

saving = ModelCheckpoint(sys.argv[1], save_last=True, every_n_train_steps=3)
options = dict(enable_checkpointing=True, max_steps=100000, max_epochs=-1)
trainer(sys.argv[1], ResidualInit(), saving, Slow(), **options).fit(Classifier(stack(Plain)), data(WIDTH))
"""


@pytest.mark.slow
def test_a_killed_run_resumes(tmp_path: Path) -> None:
    last = tmp_path / "last.ckpt"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    patience = time.monotonic() + 120
    while not last.exists() and process.poll() is None and time.monotonic() < patience:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    stored = torch.load(last, weights_only=True)
    steps = stored["global_step"]
    module, ours = Classifier(stack(Plain)), ResidualInit()
    run = trainer(tmp_path, ours, max_steps=steps + 2, max_epochs=-1)
    run.fit(module, data(WIDTH), ckpt_path=last)
    assert ours.history.steps.tolist() == list(range(steps + 2))
    assert torch.equal(ours.history.gate[:steps], stored["callbacks"]["ResidualInit"]["history"]["gate"])
    assert ours.identity_report is None
    assert ours.gradient_report.ok


@pytest.mark.slow
def test_three_hundred_fits_do_not_grow(tmp_path: Path) -> None:
    import resource

    def fit() -> None:
        trainer(tmp_path, ResidualInit(), max_steps=1).fit(Classifier(stack(Scaled, 1)), data(WIDTH, rows=4))

    def objects() -> int:
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sum(isinstance(o, torch.Tensor | nn.Module | ResidualInit) for o in gc.get_objects())

    for _ in range(20):
        fit()
    before, peak = objects(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(280):
        fit()
    assert objects() - before <= 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 30_000  # KiB


def test_a_failed_setup_gives_the_loader_back(tmp_path: Path) -> None:
    class Failing(Classifier):
        def train_dataloader(self):
            return data(WIDTH)

        def training_step(self, batch, batch_idx):
            raise KeyError("mine")

    module = Failing(stack(PreNorm))
    with pytest.raises(Exception, match="mine"):
        trainer(tmp_path, ResidualInit()).fit(module)
    assert "train_dataloader" not in vars(module)


DEEP = """
from networks import WIDTH, Classifier, Plain, Scaled, data, stack, trainer
from lit_resinit import GradientError, ResidualInit


class Dead(Scaled):
    def forward(self, x):
        return x + (self.scale * self.f(x)).relu()


fit = trainer("{root}", ResidualInit(), max_steps=4, max_epochs=-1)
fit.fit(Classifier(stack(Plain, 700)), data(WIDTH))
print("trained", fit.global_step)
try:
    trainer("{root}", ResidualInit("observe")).fit(Classifier(stack(lambda: Dead(value=0.0), 700)), data(WIDTH))
except GradientError:
    print("raised")
"""


@pytest.mark.slow
def test_the_graph_of_a_deep_network_goes_piece_by_piece(tmp_path: Path) -> None:
    import resource

    def small_stack() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (512 * 1024, 512 * 1024))

    script = [sys.executable, "-c", DEEP.format(root=tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        script, env=environment, preexec_fn=small_stack, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "trained 4" in done.stdout
    assert "raised" in done.stdout
