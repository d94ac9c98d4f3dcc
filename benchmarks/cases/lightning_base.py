"""Small Lightning helpers for the trainer cases.  Nothing here imports the package under test.

A trainer case's bundle has

``run(make_callbacks, root)``
    plays the whole scenario.  ``make_callbacks()`` is called once for every Trainer that the
    scenario builds and returns the callbacks to add; the return value is a dict of raw
    observations (``seen``) that the expectation talks about.
``expect`` and ``truth`` as in the torch cases; ``truth`` uses plain Lightning plus ``RawProbe``.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .base import classify, fixed

FEATURES = 6
TARGETS = 2


def quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def table(rows: int = 32, seed: int = 3) -> TensorDataset:
    return TensorDataset(fixed(rows, FEATURES, seed=seed), fixed(rows, TARGETS, seed=seed + 1))


def loader(rows: int = 32, batch: int = 8, **more) -> DataLoader:
    return DataLoader(table(rows), batch_size=batch, **more)


def make_trainer(root, callbacks=(), **kwargs) -> pl.Trainer:
    quiet()
    defaults = dict(
        default_root_dir=str(root),
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    return pl.Trainer(**{**defaults, **kwargs, "callbacks": list(callbacks)})


class Gated(nn.Module):
    """x + gate * f(x)."""

    def __init__(self, width: int = FEATURES):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.gate * self.f(x)


class Ending(nn.Module):
    """x + f(x); its last linear is what has to be zeroed."""

    def __init__(self, width: int = FEATURES):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.f(x)


class Regression(pl.LightningModule):
    """Residual blocks and a linear head, mean squared error, SGD."""

    def __init__(self, block=Gated, depth: int = 2, lr: float = 0.1):
        super().__init__()
        self.lr = lr
        self.blocks = nn.Sequential(*(block() for _ in range(depth)))
        self.head = nn.Linear(FEATURES, TARGETS)

    def forward(self, x):
        return self.head(self.blocks(x))

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), logger=False)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), logger=False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def last_layers(module: nn.Module) -> list[str]:
    """Names of the trailing tensors of every ``Ending`` block."""
    return [
        f"{name}.f.2.{part}"
        for name, sub in module.named_modules()
        if isinstance(sub, Ending)
        for part in ("weight", "bias")
    ]


class RawProbe(pl.Callback):
    """Writes down raw facts at the hooks; changes nothing."""

    def __init__(self, names: list[str] | None = None, endings: tuple = ("gate",)):
        self.names, self.endings = names, endings
        self.hooks: list[str] = []
        self.after_backward: list[dict] = []
        self.before_step: list[tuple[int, dict]] = []
        self.sizes: list[dict] = []
        self.values: list[dict] = []

    def _chosen(self, module):
        for name, parameter in module.named_parameters():
            if name in self.names if self.names is not None else name.endswith(self.endings):
                yield name, parameter

    def _kinds(self, module):
        return {n: classify(p.grad) for n, p in self._chosen(module)}

    def setup(self, trainer, pl_module, stage):
        self.hooks.append(f"setup:{getattr(stage, 'value', stage)}")

    def on_fit_start(self, trainer, pl_module):
        self.hooks.append("on_fit_start")

    def on_train_start(self, trainer, pl_module):
        self.hooks.append("on_train_start")
        self.values.append({n: p.detach().clone() for n, p in self._chosen(pl_module)})

    def on_after_backward(self, trainer, pl_module):
        self.hooks.append("on_after_backward")
        self.after_backward.append(self._kinds(pl_module))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.hooks.append("on_before_optimizer_step")
        index = [id(o) for o in trainer.optimizers].index(id(getattr(optimizer, "optimizer", optimizer)))
        self.before_step.append((index, self._kinds(pl_module)))
        self.sizes.append(
            {n: float("nan") if p.grad is None else float(p.grad.abs().max()) for n, p in self._chosen(pl_module)}
        )

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append({n: p.detach().clone() for n, p in self._chosen(pl_module)})


class ZeroIn(pl.Callback):
    """Stand-in that zeroes tensors in one named hook; used to show what is safe and what is not."""

    def __init__(self, hook: str, names: Callable = last_layers, only_fit: bool = True):
        self.hook, self.names, self.only_fit = hook, names, only_fit
        self.found: list[int] = []

    def _zero(self, module):
        wanted = set(self.names(module))
        self.found.append(len(wanted))
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in wanted:
                    parameter.zero_()

    def setup(self, trainer, pl_module, stage):
        if self.hook == "setup" and (stage == "fit" or not self.only_fit):
            self._zero(pl_module)

    def on_fit_start(self, trainer, pl_module):
        if self.hook == "on_fit_start":
            self._zero(pl_module)


class FirstIdentity(pl.Callback):
    """During the first training forward, is each block's output exactly its input?"""

    def __init__(self, kinds: tuple = (Gated, Ending)):
        self.kinds, self.equal, self._handles = kinds, {}, []

    def on_train_start(self, trainer, pl_module):
        for name, sub in pl_module.named_modules():
            if isinstance(sub, self.kinds):
                self._handles.append(sub.register_forward_hook(self._compare(name)))

    def _compare(self, name):
        def hook(module, inputs, output):
            self.equal.setdefault(name, torch.equal(inputs[0], output))

        return hook

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        while self._handles:
            self._handles.pop().remove()


def in_temporary_folder(function: Callable) -> Callable:
    """Give a truth function a throw-away folder as its second argument."""

    def wrapped(fresh):
        with tempfile.TemporaryDirectory() as root:
            return function(fresh, Path(root))

    return wrapped


def none() -> list:
    return []
