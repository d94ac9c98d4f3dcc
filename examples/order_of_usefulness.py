"""Is the order in which blocks switch on the order of usefulness? In one setting it is, in another it is not.

    python examples/order_of_usefulness.py

The same network learns scikit-learn's handwritten digits with plain SGD at a small learning rate, where a gate moves as
fast as its gradient is large, and with AdamW, where all gates move at one speed; three seeds each. During the run the
gate path says what each branch takes off the loss on validation images. At the end each gate is closed in turn, and
Spearman's rank correlation says how far the branches that switched on first are those without which the loss rises
most; beside it stands the reliability of that ranking itself, beyond which no correlation can go.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from lit_resinit import ResidualInit
from lit_resinit.report import run_figure

WIDTH = 32
BATCH = 64
ON_RATIO = 1e-4
SETTINGS = {"SGD": (0.003, 12), "AdamW": (0.001, 5)}  # optimizer: learning rate, epochs


class Block(nn.Module):
    """Pre-norm block ``x + f(norm(x))``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class DigitsNetwork(pl.LightningModule):
    """Stem, blocks, norm and head."""

    def __init__(self, blocks: int, optimizer: str) -> None:
        super().__init__()
        self.stem = nn.Linear(64, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))
        self.optimizer = optimizer
        self.loss = 0.0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.head(self.blocks(self.stem(images))), labels)
        self.loss = loss.item()
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        pass  # usefulness is the training loss on validation images

    def configure_optimizers(self) -> torch.optim.Optimizer:
        rate, _ = SETTINGS[self.optimizer]
        if self.optimizer == "SGD":
            return torch.optim.SGD(self.parameters(), lr=rate)
        return torch.optim.AdamW(self.parameters(), lr=rate, weight_decay=0.0)


def digits() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders of 1,437 images to train on and 360 to validate on."""
    data = load_digits()
    images = (torch.tensor(data.data, dtype=torch.float32) - 4.88) / 6.02  # mean 0, standard deviation 1
    whole = TensorDataset(images, torch.tensor(data.target))
    train, validation = random_split(whole, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=BATCH, shuffle=True), DataLoader(validation, batch_size=512)


def fit(blocks: int, epochs: int, optimizer: str, seed: int) -> tuple[ResidualInit, float]:
    """Train a new network; returns the callback and the last loss."""
    pl.seed_everything(seed, verbose=False)
    network = DigitsNetwork(blocks, optimizer)
    callback = ResidualInit(scheme="insert", log_every_n_steps=2, on_ratio=ON_RATIO, usefulness="path")
    trainer = pl.Trainer(
        max_epochs=epochs,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")  # advice on workers, of no use for small data
        trainer.fit(network, *digits())
    return callback, network.loss


def picture(found: dict[str, list[ResidualInit]], path: Path) -> None:
    """Usefulness against the order of switching on, one panel for each optimizer, one colour for each seed."""
    figure = Figure(figsize=(9.0, 4.0), layout="constrained")
    for panel, (optimizer, callbacks) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        for seed, callback in enumerate(callbacks):
            order, useful = callback.history.order(), callback.usefulness
            never = [name for name in useful if name not in order]
            label = f"seed {seed}: {callback.agreements[0].correlation:+.2f}"
            dots = panel.scatter(range(1, len(order) + 1), [useful[n] for n in order], s=16, label=label)
            if never:
                last = [len(callback.history.branches) + 1] * len(never)
                panel.scatter(last, [useful[n] for n in never], s=16, marker="x", color=dots.get_facecolor())
        panel.set(xlabel="order of switching on (crosses: never)", ylabel="loss without the branch, minus loss")
        panel.set_title(f"{optimizer}, learning rate {SETTINGS[optimizer][0]:g}")
        panel.legend(title="Spearman", fontsize="small")
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run all trainings, print and draw what was measured, and return it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12, help="number of residual blocks (default: 12)")
    parser.add_argument("--epochs", type=int, help="epochs of each training (default: 12 for SGD, 5 for AdamW)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each setting (default: 3)")
    parser.add_argument("--small", action="store_true", help="4 blocks, 1 epoch, 1 seed: only to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the picture (default: here)")
    options = parser.parse_args(argv)
    if options.small:
        options.blocks, options.epochs, options.seeds = 4, 1, 1
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()

    found: dict[str, list[ResidualInit]] = {}
    losses: dict[str, list[float]] = {}
    for optimizer, (_, epochs) in SETTINGS.items():
        for seed in range(options.seeds):
            print(f"--- {optimizer}, seed {seed} ---")
            callback, loss = fit(options.blocks, options.epochs or epochs, optimizer, seed)
            found.setdefault(optimizer, []).append(callback)
            losses.setdefault(optimizer, []).append(loss)

    print()
    for optimizer, callbacks in found.items():
        for seed, callback in enumerate(callbacks):
            print(f"{optimizer}, seed {seed}, last loss {losses[optimizer][seed]:.3g}:")
            print(callback.conclusion)
    path, carried = options.out / "order_of_usefulness.png", options.out / "who_carries_the_loss.png"
    picture(found, path)
    run_figure(found["SGD"][0].history, "SGD, seed 0").savefig(carried, dpi=150)
    print(f"\nPictures: {path} and {carried}\nAll trainings took {time.perf_counter() - started:.0f} seconds.")
    return {
        "correlations": {name: [c.agreements[0].correlation for c in rows] for name, rows in found.items()},
        "beyond_chance": {name: [c.agreements[0].beyond_chance for c in rows] for name, rows in found.items()},
        "usefulness": {name: [c.usefulness for c in rows] for name, rows in found.items()},
        "losses": losses,
        "paths": {name: [dict(c.conclusion.path) for c in rows] for name, rows in found.items()},
        "picture": path,
        "carried": carried,
    }


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    main()
