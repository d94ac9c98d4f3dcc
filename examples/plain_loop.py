"""A residual network that starts as the identity, in a loop of plain PyTorch: closed, proven, judged, watched.

python examples/plain_loop.py [--page run.html] [--picture run.png] [--history run.npz]
"""

import argparse
import contextlib

import torch
from rich.console import Console
from torch import Tensor, nn

from lit_resinit import History, Trial, apply_, fold_, make_plan, param_groups, watch
from lit_resinit.report.about import about_run
from lit_resinit.report.page import write_page
from lit_resinit.report.tables import history_table


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


def main(
    steps: int = 300, page: str | None = None, picture: str | None = None, saved: str | None = None
) -> dict[str, object]:
    torch.manual_seed(0)
    model, data = network(), batches(steps)

    plan = make_plan(model, data[0][0])  # finds the branches, writes nothing
    apply_(model, plan)  # closes them; before the optimizer, for it may add parameters
    optimizer = torch.optim.AdamW(param_groups(model, plan, lr=1e-3, gate_lr=1e-2))
    trial, history = Trial(model, plan), History([b.name for b in plan.branches])

    losses = []
    for step, (x, y) in enumerate(data):
        optimizer.zero_grad()
        logs = watch(model, plan, history, step) if step % 20 == 0 else contextlib.nullcontext()
        with trial.step(optimizer, (x, y)), logs:  # the first step is proven and judged, sleepers are waited for
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())

    print(plan)
    print(f"{trial.identity}\n{trial.gradients}")
    Console().print(history_table(plan, history))
    if page is not None:
        write_page(page, history, about_run(plan, trial.identity, trial.gradients, trial.woke))
    if picture is not None:
        history.plot().savefig(picture, dpi=150)
    if saved is not None:
        history.save(saved)  # `lit-resinit report run.npz` reads it
    folded = fold_(model)  # the plain network again
    print(f"loss {losses[0]:.3f} at first, {sum(losses[-20:]) / 20:.3f} at the end; {len(folded)} gates folded")
    return {"plan": plan, "seen": trial, "history": history, "losses": losses, "folded": folded, "model": model}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", help="write the run as one HTML page")
    parser.add_argument("--picture", help="draw the heat map")
    parser.add_argument("--history", help="write what was recorded")
    options = parser.parse_args()
    main(page=options.page, picture=options.picture, saved=options.history)
