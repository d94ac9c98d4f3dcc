"""Adapters on a frozen network: trained on the digits 0 to 4, it learns 5 to 9 without losing a bit at the start.

    python examples/adapters.py

A network is trained and frozen. Each of its blocks gets a small new branch, and only these are closed. The network with
adapters then computes exactly what the one without computes, until they learn.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lit_resinit import Trial, apply_, fold_, make_plan


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Adapter(nn.Module):
    def __init__(self, width: int, rank: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, rank), nn.GELU(), nn.Linear(rank, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Adapted(nn.Module):
    """A frozen block, and an adapter after it."""

    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__()
        self.block, self.adapter = block.requires_grad_(False), Adapter(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(self.block(x))


def learn(model: nn.Module, x: Tensor, y: Tensor, steps: int, trial: Trial | None = None) -> list[float]:
    """Train what is not frozen."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for step in range(steps):
        rows = torch.randint(len(x), (128,))
        optimizer.zero_grad()
        if trial is None:
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
        else:
            with trial.step(optimizer, x[rows]):
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
                loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    return losses


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model(x).argmax(dim=1) == y).float().mean())


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train twice, print what happened, and return it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps of each training (default: 300)")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 8 - 1, torch.tensor(data.target)
    old, new = y < 5, y >= 5
    stem, head = nn.Linear(64, options.width), nn.Linear(options.width, 5)
    blocks = [Block(options.width) for _ in range(options.depth)]
    print("a network for 0 to 4")
    learn(nn.Sequential(stem, *blocks, head), x[old], y[old], options.steps)

    stem.requires_grad_(False)
    trained = nn.Sequential(stem, *blocks)
    before = trained(x)
    model = nn.Sequential(stem, *(Adapted(block, options.width) for block in blocks))
    plan = make_plan(model, x[:8], include="*.adapter")
    apply_(model, plan)
    same = torch.equal(model(x), before)
    print(f"\n{plan}\nthe network with adapters computes bit for bit what it did before: {same}")

    print("\nadapters and a new head for 5 to 9")
    whole = nn.Sequential(model, nn.Linear(options.width, 5))
    trial = Trial(whole, plan.below("0"))
    losses = learn(whole, x[new], y[new] - 5, options.steps, trial)
    found = accuracy(whole, x[new], y[new] - 5)
    folded = fold_(model)
    print(f"\n{trial.identity}\n{trial.gradients}\naccuracy on 5 to 9: {found:.1%}; {len(folded)} scalars folded")
    return {"plan": plan, "same": same, "trial": trial, "losses": losses, "accuracy": found, "folded": folded}


if __name__ == "__main__":
    main()
