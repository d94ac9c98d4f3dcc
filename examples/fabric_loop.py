"""A residual network that starts as the identity, in a loop of Lightning Fabric: judged and watched over all ranks.

python examples/fabric_loop.py --devices 2
"""

import argparse
import contextlib

import torch
from lightning.fabric import Fabric
from plain_loop import batches, network
from torch import nn

from lit_resinit import History, Trial, apply_, make_plan, param_groups, watch
from lit_resinit.judge.trial import any_rank


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
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(param_groups(model, plan, lr=1e-3, gate_lr=1e-2)))
    # what one rank finds, all of them raise; moments are those of all ranks
    trial, history = Trial(model, plan, agree=any_rank), History([b.name for b in plan.branches])

    torch.manual_seed(fabric.global_rank)  # every rank its own data
    losses = []
    for step, (x, y) in enumerate(batches(options.steps)):
        optimizer.zero_grad()
        logs = watch(model, plan, history, step) if step % 50 == 49 else contextlib.nullcontext()
        with trial.step(optimizer, (x, y)), logs:
            loss = nn.functional.mse_loss(wrapped(x), y)
            fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())

    fabric.print(f"loss {losses[0]:.3f} at first, {sum(losses[-20:]) / 20:.3f} at the end")
    for ratio in history.variance_ratio:
        fabric.print("variance ratio of each branch:", " ".join(f"{r:.1e}" for r in ratio.tolist()))
    return {"plan": plan, "seen": trial, "losses": losses, "ratios": list(history.variance_ratio)}


if __name__ == "__main__":
    main()
