"""A character model of Python's own documentation, the text that `help()` shows, in a loop of plain PyTorch.

    python examples/characters.py

A small causal transformer with two branches in each block. At the end its scalars are folded into the weights, and the
plain network writes a line.
"""

from __future__ import annotations

import argparse
import contextlib
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit import History, Trial, apply_, fold_, make_plan, param_groups, watch


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class CharacterModel(nn.Module):
    def __init__(self, characters: int, length: int, width: int, depth: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.characters(ids) + self.places(places))))


@torch.no_grad()
def write(model: nn.Module, start: Tensor, count: int, length: int) -> list[int]:
    """Characters that follow, each drawn from what the model expects."""
    ids = start
    for _ in range(count):
        logits = model(ids[None, -length:])[0, -1]
        ids = torch.cat([ids, torch.multinomial(torch.softmax(logits / 0.7, dim=0), 1)])
    return ids.tolist()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, print what happened, and return it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=64, help="characters that the model sees at once (default: 64)")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    text = "\n".join(topics.values())
    alphabet = sorted(set(text))
    number = {c: i for i, c in enumerate(alphabet)}
    ids = torch.tensor([number[c] for c in text])
    print(f"{len(text):,} characters, {len(alphabet)} different ones", flush=True)

    def batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(ids) - options.length - 1, (32, 1))
        window = ids[starts + torch.arange(options.length + 1)]
        return window[:, :-1], window[:, 1:]

    model = CharacterModel(len(alphabet), options.length, options.width, options.depth)
    plan = make_plan(model, batch()[0])
    apply_(model, plan)
    optimizer = torch.optim.AdamW(param_groups(model, plan, lr=2e-3, weight_decay=0.1, gate_lr=1e-2))
    trial, history = Trial(model, plan), History([b.name for b in plan.branches])
    losses = []
    for step in range(options.steps):
        x, y = batch()
        optimizer.zero_grad()
        logs = watch(model, plan, history, step) if step % 10 == 0 else contextlib.nullcontext()
        with trial.step(optimizer, x), logs:
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 49 or step == options.steps - 1:
            on = len(history.order())
            print(f"step {step + 1}: loss {losses[-1]:.3f}, {on} of {len(plan)} branches on", flush=True)

    print(plan, trial.identity, trial.gradients, sep="\n\n")
    folded = fold_(model)
    line = "".join(alphabet[i] for i in write(model, ids[: options.length], 100, options.length)[options.length :])
    print(f"\n{len(folded)} scalars folded into the weights. The network writes: {line!r}")
    return {"plan": plan, "trial": trial, "history": history, "losses": losses, "folded": folded, "text": line}


if __name__ == "__main__":
    main()
