"""A branch that dies at the start, caught in seconds: a soft bound after a layer that starts at zero, in three forms.

    python examples/soft_bound.py

The bound keeps a correction shorter than B: ``bound(v) = B tanh(n/B)/n v`` with ``n = |v|``. At ``n = 0`` this is 0/0.
How that is guarded decides whether the layer before it can ever learn. All three start as the identity, with one loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit import GradientError, make_plan, observe

B = 2.0


def guarded_to_zero(v: Tensor) -> Tensor:
    """Scale 0 at zero. Wrong: the limit is 1, and the error is multiplied by 0 for ever."""
    n = v.norm(dim=-1, keepdim=True)
    scale = torch.where(n > 0, B * torch.tanh(n / B) / n.clamp(min=1e-12), torch.zeros_like(n))
    return scale * v


def guarded_too_late(v: Tensor) -> Tensor:
    """Scale 1 at zero, but the division is still evaluated there: 0 times NaN in the backward pass is NaN."""
    n = v.square().sum(dim=-1, keepdim=True).sqrt()
    scale = torch.where(n > 0, B * torch.tanh(n / B) / n, torch.ones_like(n))
    return scale * v


def guarded_before(v: Tensor) -> Tensor:
    """The division never sees a zero, and then the limit is chosen: right."""
    squared = v.square().sum(dim=-1, keepdim=True)
    n = torch.where(squared > 0, squared, torch.ones_like(squared)).sqrt()
    scale = torch.where(squared > 0, B * torch.tanh(n / B) / n, torch.ones_like(n))
    return scale * v


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "guarded to 0": guarded_to_zero,
    "guarded to 1, after the division": guarded_too_late,
    "guarded to 1, before the division": guarded_before,
}


class Block(nn.Module):
    """``x + bound(layer(x))`` with a last layer of zeros, so that the block starts as the identity."""

    def __init__(self, bound: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.inner, self.last, self.bound = nn.Linear(width, 32), nn.Linear(32, width), bound
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bound(self.last(torch.tanh(self.inner(x))))


def train(model: nn.Module, steps: int, width: int) -> list[float]:
    """Losses of a training that nobody watches."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        x = torch.randn(256, width)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x + 0.5 * torch.sin(2 * x))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Judge each form, train it all the same, and return both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args(argv)
    width, found = 4, {}
    for name, bound in FORMS.items():
        torch.manual_seed(0)
        model, x = Block(bound, width), torch.randn(256, width)
        plan = make_plan(model, x, scheme="observe")
        with observe(model, plan, x) as seen:
            nn.functional.mse_loss(model(x), x + 0.5 * torch.sin(2 * x)).backward()
        status = {g.status for g in seen.gradients.gates.values()}
        print(f"--- {name}: starts as the identity: {seen.identity.ok}; gates: {', '.join(sorted(status))}")
        try:
            seen.gradients.raise_if_dead()
        except GradientError as error:
            print(error)
        losses = train(model, options.steps, width)
        print(
            f"trained all the same: loss {losses[0]:.3g} at the first step, {losses[-1]:.3g} at the last\n", flush=True
        )
        found[name] = {"closed": seen.identity.ok, "status": status, "losses": losses, "gradients": seen.gradients}
    return found


if __name__ == "__main__":
    main()
