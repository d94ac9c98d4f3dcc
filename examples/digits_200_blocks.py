"""Train a residual network of 200 blocks, without norm or scale, on scikit-learn's handwritten digits.

    python examples/digits_200_blocks.py

The same network is trained twice: once with one more line, ``callbacks=[ResidualInit()]``, and once as it is.
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
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from lit_resinit import ResidualInit
from lit_resinit.report import activation_figure

WIDTH = 64
BATCH = 128
LEARNING_RATE = 0.01
SEED = 0


class Block(nn.Module):
    """Pre-activation block ``x + f(x)``: no norm, no scale, and He's initialisation for layers behind a ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        for layer in self.branch:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class DigitsNetwork(pl.LightningModule):
    """Stem, blocks, head; images of 8 x 8 pixels in, ten classes out. Nothing in it knows of ``lit_resinit``."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Linear(64, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH) for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, 10)
        self.losses: list[float] = []
        self.accuracy = 0.0

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self(images), labels)
        self.losses.append(loss.item())
        return loss

    def on_validation_epoch_start(self) -> None:
        self.right, self.seen = 0, 0

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.right += int((self(images).argmax(dim=1) == labels).sum())
        self.seen += len(labels)

    def on_validation_epoch_end(self) -> None:
        self.accuracy = self.right / self.seen

    def on_train_epoch_end(self) -> None:
        epoch, epochs = self.current_epoch + 1, self.trainer.max_epochs
        print(f"epoch {epoch} of {epochs}: loss {self.losses[-1]:.3g}, accuracy {self.accuracy:.1%}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=0.9)


def digits() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders of 1,437 images to train on and 360 to validate on."""
    data = load_digits()
    images = (torch.tensor(data.data, dtype=torch.float32) - 4.88) / 6.02  # mean 0, standard deviation 1
    whole = TensorDataset(images, torch.tensor(data.target))
    train, validation = random_split(whole, [0.8, 0.2], generator=torch.Generator().manual_seed(SEED))
    return DataLoader(train, batch_size=BATCH, shuffle=True), DataLoader(validation, batch_size=512)


def fit(blocks: int, epochs: int, callbacks: list[pl.Callback]) -> DigitsNetwork:
    """Train a new network; the seed is the same whatever the callbacks are."""
    pl.seed_everything(SEED, verbose=False)
    network = DigitsNetwork(blocks)
    trainer = pl.Trainer(
        max_epochs=epochs,
        callbacks=callbacks,
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
    return network


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run both trainings, print what happened, save the picture, and return the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=200, help="number of residual blocks (default: 200)")
    parser.add_argument("--epochs", type=int, default=12, help="epochs of each training (default: 12)")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the picture (default: here)")
    parser.add_argument("--history", type=Path, help="write what was recorded to this file (.npz) too")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()

    print(f"--- {options.blocks} blocks with ResidualInit ---", flush=True)
    callback = ResidualInit(log_every_n_steps=2)
    network = fit(options.blocks, options.epochs, [callback])

    print(f"\nPlan: {callback.plan}")
    stream = callback.identity_report.stacks[0]
    print(f"\nIdentity: {callback.identity_report}")
    print(f"Stream from {stream.first} to {stream.last}: Var(out) / Var(in) = {stream.growth}, exact: {stream.exact}")
    print(f"\nGradients: {callback.gradient_report}")
    on, order = callback.history.switched_on(), callback.history.order()
    print(f"\nBlocks that switched on: {len(order)} of {len(callback.plan)}; the first ten:")
    print(", ".join(f"{name} (step {on[name]})" for name in order[:10]) or "none")
    picture = options.out / "digits_200_blocks.png"
    title = f"{options.blocks} residual blocks switching on (handwritten digits)"
    activation_figure(callback.history, title).savefig(picture, dpi=150)
    if options.history is not None:
        callback.history.save(options.history)
    print(f"\nLoss: {network.losses[0]:.3g} at the first step, {network.losses[-1]:.3g} at the last")
    print(f"Validation accuracy: {network.accuracy:.1%}")
    print(f"Picture: {picture}")

    print("\n--- the same network without it ---", flush=True)
    plain = fit(options.blocks, options.epochs, [])
    print(f"Loss: {plain.losses[0]:.3g} at the first step, {plain.losses[-1]:.3g} at the last")
    print(f"Validation accuracy: {plain.accuracy:.1%}")
    seconds = time.perf_counter() - started
    print(f"\nBoth trainings took {seconds:.0f} seconds.")

    return {
        "branches": len(callback.plan),
        "identity": callback.identity_report.ok,
        "exact": stream.exact,
        "growth": stream.growth,
        "gradients": callback.gradient_report.ok,
        "order": order,
        "losses": network.losses,
        "accuracy": network.accuracy,
        "plain_losses": plain.losses,
        "plain_accuracy": plain.accuracy,
        "picture": picture,
        "seconds": seconds,
    }


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    main()
