"""LightningCLI: the callback and its options stand in a YAML file, and the command line can change them.

    python examples/lightning_cli.py fit --config examples/lightning_cli.yaml --model.depth=8

Handwritten digits again, this time without a word about ``lit_resinit`` in the program.
"""

from __future__ import annotations

import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import ArgsType, LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class DigitsMLP(pl.LightningModule):
    """Stem, blocks and head for images of 8 x 8 pixels.

    Args:
        depth: Number of residual blocks.
        width: Width of the stream.
        lr: Learning rate.
    """

    def __init__(self, depth: int = 12, width: int = 64, lr: float = 0.003) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.lr = lr

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.head(self.blocks(self.stem(images))), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        data = load_digits()
        images = torch.tensor(data.data, dtype=torch.float32) / 8 - 1
        return DataLoader(TensorDataset(images, torch.tensor(data.target)), batch_size=128, shuffle=True)


def main(args: ArgsType = None) -> LightningCLI:
    """Run the command line."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")  # advice on workers, of no use for small data
        return LightningCLI(DigitsMLP, args=args, save_config_callback=None)


if __name__ == "__main__":
    main()
