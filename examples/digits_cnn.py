"""A residual CNN on real images, scikit-learn's handwritten digits: the gates are the last norm of each block.

    python examples/digits_cnn.py

Nothing is added to the network: with a norm at the end of each branch, closing it means that the norm's weight is zero.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lit_resinit import ResidualInit


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.skip(x) + self.branch(x))


class DigitsCNN(pl.LightningModule):
    """A ResNet of three stages for images of 8 x 8 pixels."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        widths = [width, width, 2 * width, 4 * width]
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        stages = [
            Block(widths[stage] if first else widths[stage + 1], widths[stage + 1], 2 if first and stage else 1)
            for stage in range(3)
            for first in [True] + [False] * (blocks - 1)
        ]
        self.blocks, self.head = nn.Sequential(*stages), nn.Linear(4 * width, 10)
        self.losses: list[float] = []
        self.right: list[bool] = []
        self.accuracy = 0.0

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.right += (self(images).argmax(dim=1) == labels).tolist()

    def on_validation_epoch_end(self) -> None:
        self.accuracy, self.right = sum(self.right) / len(self.right), []

    def on_train_epoch_end(self) -> None:
        epoch, epochs = self.current_epoch + 1, self.trainer.max_epochs
        print(f"epoch {epoch} of {epochs}: loss {self.losses[-1]:.3g}, accuracy {self.accuracy:.1%}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, print what happened, and return it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=3, help="blocks in each of the three stages (default: 3)")
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage (default: 16)")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args(argv)

    pl.seed_everything(0, verbose=False)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    train, validation = random_split(
        TensorDataset(images, torch.tensor(data.target)), [0.8, 0.2], generator=torch.Generator().manual_seed(0)
    )
    network = DigitsCNN(options.blocks, options.width)
    callback = ResidualInit(log_every_n_steps=4)
    trainer = pl.Trainer(
        max_epochs=options.epochs,
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
        trainer.fit(network, DataLoader(train, batch_size=64, shuffle=True), DataLoader(validation, batch_size=512))
    print(callback.plan, callback.identity_report, callback.gradient_report, sep="\n\n")
    print(f"\nValidation accuracy: {network.accuracy:.1%}")
    return {"callback": callback, "losses": network.losses, "accuracy": network.accuracy}


if __name__ == "__main__":
    main()
