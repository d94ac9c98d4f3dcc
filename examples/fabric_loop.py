"""A residual network that starts as the identity, in a loop of Lightning Fabric, with moments merged over the ranks.

python examples/fabric_loop.py --devices 2
"""

import argparse

import torch
from lightning.fabric import Fabric
from plain_loop import batches, network
from torch import nn

from lit_resinit import apply_, check_identity, make_plan, observe, param_groups
from lit_resinit.watch.moments import Moments, Watcher


def main(arguments: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    fabric = Fabric(accelerator="cpu", devices=options.devices)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)

    model = network()
    plan = make_plan(model, torch.randn(4, 16))
    apply_(model, plan)  # before `fabric.setup`, which wraps the model and takes the optimizer
    check_identity(model, plan, torch.randn(4, 16)).raise_if_open()
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(param_groups(model, plan, lr=1e-3, gate_lr=1e-2)))

    torch.manual_seed(fabric.global_rank)  # every rank its own data
    losses, ratios = [], []
    for step, (x, y) in enumerate(batches(options.steps)):
        optimizer.zero_grad()
        if step == 0:
            with observe(model, plan, (x, y)) as seen:
                loss = nn.functional.mse_loss(wrapped(x), y)
                fabric.backward(loss)
            seen.gradients.raise_if_dead()
        elif step % 50 == 49:
            with Watcher(model, plan) as watcher:
                loss = nn.functional.mse_loss(wrapped(x), y)
            moments = Moments(2 * len(plan))
            moments.update(*watcher.moments())
            stream, branch = moments.compute().reshape(-1, 2).T  # one number for all ranks
            ratios.append(branch / stream)
            fabric.backward(loss)
        else:
            loss = nn.functional.mse_loss(wrapped(x), y)
            fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())

    fabric.print(f"loss {losses[0]:.3f} at first, {sum(losses[-20:]) / 20:.3f} at the end")
    for ratio in ratios:
        fabric.print("variance ratio of each branch:", " ".join(f"{r:.1e}" for r in ratio.tolist()))
    return {"plan": plan, "seen": seen, "losses": losses, "ratios": ratios}


if __name__ == "__main__":
    main()
