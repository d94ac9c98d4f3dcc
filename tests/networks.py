"""Tiny networks that several tests use."""

from collections.abc import Callable

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 8


def mlp(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


class Plain(nn.Module):
    """``x + f(x)`` without any scale."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.f = mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


class InPlace(Plain):
    """``x += f(x)``."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += self.f(x.clone())
        return x


class Scaled(Plain):
    """``x + scale * f(x)`` with one number or one for each channel."""

    def __init__(self, width: int = WIDTH, value: float = 1.0, size: int = 1) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.full((size,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.f(x)


class PreNorm(nn.Module):
    """``x + f(norm(x))``."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(width), mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.norm(x))


class PostNorm(PreNorm):
    """``norm(x + f(x))``."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.f(x))


class NormLast(PreNorm):
    """``x + norm(f(x))``."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.f(x))


class RootMeanSquare(nn.Module):
    """A norm written in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class ConvBlock(nn.Module):
    """A residual block of two convolutions with batch norm, and a projection where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.skip = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(out + self.skip(x))


class PreActivation(nn.Module):
    """``x + conv(relu(bn(x)))``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(functional.relu(self.bn(x)))


def encoder(layers: int = 2, norm_first: bool = True) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def stack(block: Callable[[], nn.Module], depth: int = 2, outputs: int = 2) -> nn.Sequential:
    """Blocks and a linear head."""
    return nn.Sequential(*(block() for _ in range(depth)), nn.Linear(WIDTH, outputs))


class Classifier(pl.LightningModule):
    """Any network, cross entropy, SGD; no ``example_input_array``."""

    def __init__(self, net: nn.Module, lr: float = 0.01) -> None:
        super().__init__()
        self.net, self.lr = net, lr

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x).flatten(1)
        loss = functional.cross_entropy(out, y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", functional.cross_entropy(self(batch[0]).flatten(1), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def data(*shape: int, rows: int = 12, batch: int = 4) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, *shape, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.arange(rows) % 3 // 2), batch_size=batch)


def trainer(root: object, *callbacks: pl.Callback, **options: object) -> pl.Trainer:
    """A silent CPU Trainer of three steps."""
    defaults: dict = {
        "default_root_dir": str(root),
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 3,
        "log_every_n_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**defaults | options, callbacks=list(callbacks))
