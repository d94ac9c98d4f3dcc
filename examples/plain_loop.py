"""A residual network that starts as the identity, in a loop of plain PyTorch.

python examples/plain_loop.py
"""

import torch
from torch import Tensor, nn

from lit_resinit import apply_, check_identity, fold_, make_plan, observe, param_groups


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def network(width: int = 16, depth: int = 8) -> nn.Sequential:
    return nn.Sequential(*(Block(width) for _ in range(depth)), nn.Linear(width, 1))


def batches(steps: int, width: int = 16, size: int = 64) -> list[tuple[Tensor, Tensor]]:
    """The product of two inputs, which a linear model cannot learn."""
    inputs = torch.randn(steps, size, width)
    return [(x, x[:, :1] * x[:, 1:2]) for x in inputs]


def main(steps: int = 300) -> dict[str, object]:
    torch.manual_seed(0)
    model, data = network(), batches(steps)

    plan = make_plan(model, data[0][0])  # finds the branches, writes nothing
    apply_(model, plan)  # closes them; before the optimizer, for it may add parameters
    check_identity(model, plan, data[0][0]).raise_if_open()
    optimizer = torch.optim.AdamW(param_groups(model, plan, lr=1e-3, gate_lr=1e-2))

    losses = []
    for step, (x, y) in enumerate(data):
        optimizer.zero_grad()
        if step == 0:
            with observe(model, plan, (x, y)) as seen:
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
            seen.gradients.raise_if_dead()
        else:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())

    folded = fold_(model)  # the plain network again
    print(plan)
    print(f"loss {losses[0]:.3f} at first, {sum(losses[-20:]) / 20:.3f} at the end; {len(folded)} gates folded")
    return {"plan": plan, "seen": seen, "losses": losses, "folded": folded, "model": model}


if __name__ == "__main__":
    main()
