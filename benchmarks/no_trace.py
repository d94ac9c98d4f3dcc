"""The same training with ``scheme="observe"`` and without the callback, bit for bit, over a matrix of set-ups.

Run as ``python -m benchmarks.no_trace [--only TEXT] [--save FILE]``. One network with batch norm, dropout and a metric
is trained by a Trainer in every set-up: each value of each axis alone, then two to four, drawn with a fixed
seed. Compared are weights, buffers, the metric's state, optimizer states, the order and the content of the batches, the
Trainer's steps and logged numbers, and where every random generator stands after the run. The exit code is the number
of set-ups that differ.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import io
import itertools
import logging
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from lightning.pytorch import callbacks as cb
from torch import Tensor, nn
from torch.utils import data as tud
from torch.utils.checkpoint import checkpoint

from lit_resinit import ResidualInit

WIDTH, ROWS, BATCH, SEED, DRAWN = 8, 24, 4, 7, 60

# -------------------------------------------------------------------- networks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.f = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.f(self.norm(x)))


class Rerun(Block):
    """Runs its branch again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(checkpoint(self.f, self.norm(x), use_reentrant=False))


class Skipping(Block):
    """Skips itself at random."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and torch.rand(()) < 0.3 else super().forward(x)


def net(block: Callable[[], nn.Module] = Block) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), block(), block(), nn.Linear(WIDTH, 2))


class Adapter(nn.Module):
    """A frozen layer with a trained correction of rank two."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(2 * WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.a.T @ self.b.T


def adapted() -> nn.Module:
    model = net()
    for block in model[1:3]:
        block.f[0] = Adapter(block.f[0])
    return model


def frozen() -> nn.Module:
    model = net()
    model[1].requires_grad_(False)
    return model


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(
        nn.Unflatten(1, (2, WIDTH // 2)), nn.Linear(WIDTH // 2, WIDTH), body, nn.Flatten(), nn.Linear(16, 2)
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": net,
    "checkpointed": lambda: net(Rerun),
    "random depth": lambda: net(Skipping),
    "adapters": adapted,
    "frozen block": frozen,
    "encoder": encoder,
    "compiled": lambda: torch.compile(net(), backend="eager"),
}

# ---------------------------------------------------------------- modules: how the step and the optimizer are written


class Module(pl.LightningModule):
    def __init__(self, model: nn.Module, optimizer: str, schedule: str) -> None:
        super().__init__()
        self.net, self.optimizer, self.schedule = model, optimizer, schedule
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)
        self.seen: list[float] = []
        self.backbone = nn.Identity()  # what `BackboneFinetuning` asks for

    def loss(self, batch: Any) -> Tensor:
        while isinstance(batch, dict):
            batch = next(iter(batch.values()))
        x, y = batch
        out = self.net(x.to(self.dtype)).float()
        self.accuracy.update(out, y)
        return nn.functional.cross_entropy(out, y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        while isinstance(batch, dict):
            batch = next(iter(batch.values()))
        self.seen.append(float(batch[0].double().sum()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        own = [p for p in self.parameters() if p.requires_grad]
        optimizer = OPTIMIZERS[self.optimizer](own)
        if self.schedule == "none":
            return optimizer
        if self.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}
        if self.schedule == "step":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
        total = int(self.trainer.estimated_stepping_batches)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total + 2, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


class ByHand(Module):
    """Manual optimisation."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Closure(ByHand):
    """The optimizer runs forward and backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class Two(ByHand):
    """Two optimizers, in turns, found by a loop."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        own = [p for p in self.parameters() if p.requires_grad]
        return [torch.optim.SGD(own[::2], 0.01), torch.optim.Adam(own[1::2], 0.01)]


class InBackward(ByHand):
    """Every parameter has an optimizer that steps as soon as its gradient is there."""

    def configure_optimizers(self) -> None:
        for parameter in self.parameters():
            if parameter.requires_grad:
                self._step_at_once(parameter)

    @staticmethod
    def _step_at_once(parameter: nn.Parameter) -> None:
        own = torch.optim.SGD([parameter], 0.01)

        def step(_: Tensor) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()


class Averaging(Module):
    """Keeps an average of its own, and clamps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.average = {n: p.detach().clone() for n, p in self.net.named_parameters()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for name, parameter in self.net.named_parameters():
                self.average[name].lerp_(parameter, 0.1)
                parameter.clamp_(-2.0, 2.0)
        return super().training_step(batch, batch_idx)


class Hooks(Module):
    """Every hook a user may write, each drawing a random number."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        torch.rand(1)

    def on_after_backward(self) -> None:
        np.random.rand()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        random.random()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0.01 * torch.randn_like(batch[0]), batch[1]] if isinstance(batch, list) else batch


class Skips(Module):
    """Leaves out some batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx % 3 == 0 else super().training_step(batch, batch_idx)


MODULES: dict[str, type[Module]] = {
    "automatic": Module,
    "by hand": ByHand,
    "by hand, closure": Closure,
    "by hand, two optimizers": Two,
    "steps in the backward": InBackward,
    "average of its own": Averaging,
    "hooks that draw": Hooks,
    "skips batches": Skips,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda own: torch.optim.SGD(own, 0.05, momentum=0.9),
    "adamw": lambda own: torch.optim.AdamW(own, 0.01),
    "adam, foreach": lambda own: torch.optim.Adam(own, 0.01, foreach=True),
    "adagrad": lambda own: torch.optim.Adagrad(own, 0.01),
    "rmsprop": lambda own: torch.optim.RMSprop(own, 0.001),
    "lbfgs": lambda own: torch.optim.LBFGS(own, 0.1, max_iter=3),
}
SCHEDULES = ["none", "step", "one cycle", "plateau"]

# -------------------------------------------------------------------- data


def rows() -> tud.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return tud.TensorDataset(torch.randn(ROWS, WIDTH, generator=generator), torch.arange(ROWS) % 3 // 2)


class Stream(tud.IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(rows())


class OnePass(tud.IterableDataset):
    """Can be read once."""

    def __init__(self) -> None:
        self.rest = iter([row for _ in range(40) for row in rows()])

    def __iter__(self) -> Iterator[Any]:
        return self.rest


class Noisy(tud.Dataset):
    """Draws when an item is read."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        x, y = rows()[index]
        return x + 0.1 * torch.randn(WIDTH) + random.random() + np.random.rand(), y


class Counting(tud.Sampler):
    """Holds a state that moves on."""

    def __init__(self) -> None:
        self.start = 0

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        self.start += 1
        return iter([(i + self.start) % ROWS for i in range(ROWS)])


class Collate:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, items: Any) -> Any:
        self.calls += 1
        x, y = tud.default_collate(items)
        return [x + 0.001 * self.calls, y]


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return tud.DataLoader(rows(), BATCH, shuffle=True)

    def val_dataloader(self) -> Any:
        return tud.DataLoader(rows(), BATCH)


def weighted() -> tud.Sampler:
    return tud.WeightedRandomSampler([1.0, 2.0] * (ROWS // 2), ROWS)


def in_batches() -> tud.BatchSampler:
    return tud.BatchSampler(tud.RandomSampler(rows()), BATCH, drop_last=True)


def listed() -> list[list[Tensor]]:
    x, y = rows().tensors
    return [[x[i : i + BATCH], y[i : i + BATCH]] for i in (0, 4, 8)]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: tud.DataLoader(rows(), BATCH),
    "shuffled": lambda: tud.DataLoader(rows(), BATCH, shuffle=True),
    "own generator": lambda: tud.DataLoader(rows(), BATCH, shuffle=True, generator=seeded()),
    "two workers": lambda: tud.DataLoader(Noisy(), BATCH, shuffle=True, num_workers=2),
    "workers that stay": lambda: tud.DataLoader(Noisy(), BATCH, num_workers=1, persistent_workers=True),
    "items that draw": lambda: tud.DataLoader(Noisy(), BATCH, shuffle=True),
    "stream": lambda: tud.DataLoader(Stream(), BATCH),
    "stream, once": lambda: tud.DataLoader(OnePass(), BATCH),
    "weighted": lambda: tud.DataLoader(rows(), BATCH, sampler=weighted()),
    "sampler with a state": lambda: tud.DataLoader(rows(), BATCH, sampler=Counting()),
    "batch sampler": lambda: tud.DataLoader(rows(), batch_sampler=in_batches()),
    "collate with a state": lambda: tud.DataLoader(rows(), BATCH, collate_fn=Collate()),
    "two loaders": lambda: {"a": tud.DataLoader(rows(), BATCH, shuffle=True), "b": tud.DataLoader(rows(), BATCH)},
    "list of batches": listed,
    "data module": Data,
}

# -------------------------------------------------------------------- the Trainer


def scaled() -> dict[str, Any]:
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    return {"plugins": [plugin], "precision": None}


PRECISIONS = ["32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed"]
TRAINERS: dict[str, dict[str, Any]] = {
    "two epochs": {},
    "accumulates 2": {"accumulate_grad_batches": 2},
    "accumulates 4": {"accumulate_grad_batches": 4},
    "clips norms": {"gradient_clip_val": 0.1},
    "clips values": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "two batches": {"limit_train_batches": 2},
    "overfits": {"overfit_batches": 1},
    "sanity steps": {"num_sanity_val_steps": 2},
    "validates in between": {"val_check_interval": 2},
    "fast dev run": {"fast_dev_run": 2},
    "barebones": {"barebones": True},
    "reloads": {"reload_dataloaders_every_n_epochs": 1},
    "no inference mode": {"inference_mode": False},
    "detects anomalies": {"detect_anomaly": True},
    "simple profiler": {"profiler": "simple"},
    "max steps": {"max_steps": 7, "max_epochs": -1},
    "csv": {"logger": True},
    "records every step": {"log_every_n_steps": 1},
    "never records": {"log_every_n_steps": 0},
}
NEIGHBOURS: dict[str, Callable[[], list[pl.Callback]]] = {
    "none": lambda: [],
    "ema": lambda: [cb.EMAWeightAveraging()],
    "swa": lambda: [cb.StochasticWeightAveraging(0.01, 1)],
    "checkpoints": lambda: [cb.ModelCheckpoint(save_last=True, save_top_k=-1, every_n_train_steps=2)],
    "early stopping": lambda: [cb.EarlyStopping("loss", patience=1)],
    "rate monitor": lambda: [cb.LearningRateMonitor()],
    "accumulation plan": lambda: [cb.GradientAccumulationScheduler({0: 1, 1: 2})],
    "rate finder": lambda: [cb.LearningRateFinder(num_training_steps=5)],
    "batch size finder": lambda: [cb.BatchSizeFinder("power", 1, 2, max_val=8)],
    "pruning": lambda: [cb.ModelPruning("l1_unstructured", amount=0.2)],
    "timer": lambda: [cb.Timer("00:01:00:00")],
    "finetuning": lambda: [cb.BackboneFinetuning(1)],
    "device stats": lambda: [cb.DeviceStatsMonitor()],
}
OURS: dict[str, dict[str, Any]] = {"observe": {}, "usefulness": {"usefulness": True}, "page": {"report": "run.html"}}


@dataclasses.dataclass(frozen=True)
class Setup:
    """One value on each axis."""

    module: str = "automatic"
    net: str = "batch norm"
    optimizer: str = "sgd"
    schedule: str = "none"
    loader: str = "shuffled"
    precision: str = "32-true"
    trainer: str = "two epochs"
    neighbours: str = "none"
    ours: str = "observe"

    def __str__(self) -> str:
        default = dataclasses.asdict(Setup())
        own = [f"{k}: {v}" for k, v in dataclasses.asdict(self).items() if v != default[k]]
        return "; ".join(own) or "the default"

    @property
    def possible(self) -> bool:
        """Whether Lightning takes it, and whether it can be run twice alike."""
        manual = issubclass(MODULES[self.module], ByHand)
        accumulating = self.trainer.startswith("accumulates")
        bare = self.trainer in ("barebones", "fast dev run")
        finder = self.neighbours in ("rate finder", "batch size finder")
        return not (
            (manual and (accumulating or self.trainer.startswith("clips") or self.optimizer == "lbfgs"))
            or (manual and (self.schedule != "none" or self.neighbours in ("swa", "accumulation plan", "rate finder")))
            or (self.module == "steps in the backward" and self.neighbours != "none")
            or (self.precision == "16-mixed" and (self.optimizer == "lbfgs" or manual))
            or (self.optimizer == "lbfgs" and (self.trainer.startswith("clips") or accumulating))
            or (bare and self.neighbours != "none")
            or (self.trainer == "barebones" and self.ours == "page")
            or (self.neighbours in ("device stats", "rate monitor") and self.trainer != "csv")
            or (accumulating and self.neighbours == "accumulation plan")
            or (finder and self.loader not in ("shuffled", "in order"))
            or (self.neighbours == "finetuning" and self.net == "frozen block")
            or (self.neighbours == "pruning" and (self.net != "batch norm" or self.precision == "16-mixed"))
            or (self.trainer == "overfits" and self.loader in ("list of batches", "two loaders"))
            or (self.module in ("skips batches", "by hand", "by hand, closure") and self.neighbours == "early stopping")
            or (self.module == "hooks that draw" and self.loader == "two loaders")
            or (self.schedule == "one cycle" and self.loader in ("stream", "stream, once"))
            or (self.neighbours == "swa" and self.schedule == "plateau")
        )


AXES: dict[str, list[str]] = {
    "module": [*MODULES],
    "net": [*NETS],
    "optimizer": [*OPTIMIZERS],
    "schedule": SCHEDULES,
    "loader": [*LOADERS],
    "precision": PRECISIONS,
    "trainer": [*TRAINERS],
    "neighbours": [*NEIGHBOURS],
    "ours": [*OURS],
}


def setups() -> list[Setup]:
    """Each value alone, then some of several, drawn with a fixed seed."""
    found = {Setup(): None}
    for axis, values in AXES.items():
        for value in values:
            extra = {"trainer": "csv"} if value in ("device stats", "rate monitor") else {}
            found[Setup(**{axis: value} | extra)] = None
    draw = random.Random(SEED)
    drawn = 0
    while drawn < DRAWN:
        axes = draw.sample([*AXES], draw.choice((2, 3, 4)))
        setup = Setup(**{axis: draw.choice(AXES[axis]) for axis in axes})
        if setup.possible and setup not in found:
            found[setup] = None
            drawn += 1
    return [s for s in found if s.possible]


# -------------------------------------------------------------------- a run, and what is compared


def run(setup: Setup, observed: bool, root: Path) -> dict[str, Any]:
    """What is left of a training."""
    pl.seed_everything(5, verbose=False)
    module = MODULES[setup.module](NETS[setup.net](), setup.optimizer, setup.schedule)
    options: dict[str, Any] = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "log_every_n_steps": 2}
    options |= TRAINERS[setup.trainer] | {"default_root_dir": str(root)}
    if setup.trainer == "barebones":
        for name in (
            "enable_progress_bar",
            "enable_model_summary",
            "logger",
            "log_every_n_steps",
            "num_sanity_val_steps",
        ):
            options.pop(name, None)
    options |= scaled() if setup.precision == "16-mixed" else {"precision": setup.precision}
    neighbours = NEIGHBOURS[setup.neighbours]()
    if not any(isinstance(c, cb.ModelCheckpoint) for c in neighbours):
        options["enable_checkpointing"] = False
    given = OURS[setup.ours] | ({"report": str(root / "run.html")} if setup.ours == "page" else {})
    ours = [ResidualInit(scheme="observe", identity="ignore", gradient="ignore", **given)] if observed else []
    loader = LOADERS[setup.loader]()
    trainer = pl.Trainer(**options, callbacks=[*ours, *neighbours])
    if isinstance(loader, pl.LightningDataModule):
        trainer.fit(module, datamodule=loader)
    else:
        trainer.fit(module, loader, tud.DataLoader(rows(), BATCH))
    if ours:
        assert len(ours[0].history) or setup.trainer == "never records", "nothing was recorded"
    return {
        "weights and buffers": module.state_dict(),
        "metric": {n: v for n, v in module.accuracy.metric_state.items()},
        "optimizers": [o.state_dict() for o in trainer.optimizers],
        "batches": module.seen,
        "steps": trainer.global_step,
        "logged": {k: v for k, v in trainer.callback_metrics.items() if not k.startswith("resinit/")},
        "torch's random numbers": torch.get_rng_state(),
        "Python's random numbers": random.getstate(),
        "numpy's random numbers": np.random.get_state(),
    }


def equal(left: Any, right: Any) -> bool:
    """Equal to the bit; NaN equals NaN."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and _same_bits(left, right)
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right))
    if isinstance(left, dict):
        return isinstance(right, dict) and list(left) == list(right) and all(equal(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right or (left != left and right != right))


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and bool(((left == right) | ((left != left) & (right != right))).all())


def compare(setup: Setup) -> list[str]:
    """What differs, by name; or the error that only one of the two runs ends in."""
    found: list[Any] = []
    for observed in (False, True):
        with tempfile.TemporaryDirectory() as root, contextlib.redirect_stdout(io.StringIO()):
            try:
                found.append(run(setup, observed, Path(root)))
            except Exception as error:
                found.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    plain, watched = found
    if isinstance(plain, str) or isinstance(watched, str):
        return [] if isinstance(plain, str) and plain == watched else [f"without: {_end(plain)}, with: {_end(watched)}"]
    return [name for name in plain if not equal(plain[name], watched[name])]


def _end(found: Any) -> str:
    return found[:200] if isinstance(found, str) else "a whole run"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="set-ups whose description holds this text")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    chosen = [s for s in setups() if options.only in str(s)]
    lines, apart, begun = list[str](), 0, time.perf_counter()
    for setup in chosen:
        differing = compare(setup)
        apart += bool(differing)
        lines.append(
            f"{'differs' if differing else 'equal':8}{setup}{'  <- ' + ', '.join(differing) if differing else ''}"
        )
        print(lines[-1], flush=True)
    kinds = collections.Counter(itertools.chain.from_iterable(dataclasses.asdict(s).items() for s in chosen))
    head = f"{len(chosen) - apart} of {len(chosen)} set-ups equal bit for bit, {len(kinds)} values on {len(AXES)} axes"
    head += f"; {time.perf_counter() - begun:.0f} s; torch {torch.__version__}, lightning {pl.__version__}"
    print(head)
    if options.save:
        options.save.write_text("\n".join([head, "", *lines]) + "\n")
    return apart


if __name__ == "__main__":
    sys.exit(main())
