"""Set-ups of a Trainer and a module in which gates cannot be closed, or only later."""

from __future__ import annotations

from typing import Any

from torch import nn

from lit_resinit.errors import ResInitError
from lit_resinit.graph.tensors import is_sharded
from lit_resinit.plan.values import ResidualPlan
from lit_resinit.words import together


def may_come_later(module: nn.Module) -> bool:
    """Whether the module builds something after ``Callback.setup``: it overrides ``setup`` or ``configure_model``."""
    base: Any = next(c for c in type(module).__mro__ if c.__name__ == "LightningModule")
    return any(getattr(type(module), n) is not getattr(base, n) for n in ("setup", "configure_model"))


def packing(strategy: Any) -> str:
    """The strategy's name, where its engine packs parameters into buffers of its own; "" for any other.

    There a gate's value and gradient can be read before the engine is built only.
    """
    names = {c.__name__ for c in type(strategy).__mro__} & {"FSDPStrategy", "DeepSpeedStrategy"}
    return min(names, default="")


def refuse_packed(strategy: Any) -> None:
    """A network that came after ``setup`` is in the engine already."""
    name = packing(strategy)
    if name:
        raise ResInitError(
            f"closing the gates under {name}: expected the network and a batch when the callback is set up, found them "
            "only after the engine has packed the parameters into buffers of its own. Tried in `setup`: a trace of the "
            "module as it was then, which had no residual branch, or no inputs. Build the network in `__init__`, or "
            "pass `example_inputs`; or close it at the end of `configure_model` with `apply_(self.net, "
            "make_plan(self.net, ...))`, which this callback recognises. Nothing was changed."
        )


def in_workers(strategy: Any) -> bool:
    """Whether the training runs in processes whose network the main process loads when they end (spawn, fork)."""
    launcher = getattr(strategy, "launcher", None)
    return launcher is not None and hasattr(launcher, "_recover_results_in_main_process")


def refuse_workers(strategy: Any, plan: ResidualPlan) -> None:
    """The network in the main process gets the weights of the workers', but no scalar that does not fold into them."""
    stuck = [g.parameter for g in plan.gates if g.module and not g.folds_into]
    if stuck:
        raise ResInitError(
            f"setting up under {type(strategy).__name__} with processes that are spawned or forked: expected scalars "
            f"that fold into the weights before them, found {len(stuck)} that do not ({together(stuck)}). The network "
            "in the main process would get the trained weights without them, and compute something else. Train with "
            "strategy='ddp', or use scheme='last_layer'. Nothing was trained."
        )


def refuse_sharded(module: nn.Module) -> None:
    """The forward of a sharded network cannot be traced: its parameters are put together while it runs."""
    sharded = [n for n, p in module.named_parameters() if is_sharded(p)]
    if sharded:
        raise ResInitError(
            f"closing the gates: expected a network that is not sharded yet, found {len(sharded)} sharded parameters "
            f"({together(sharded)}). In `configure_model`, after building and before `fully_shard`, call "
            "`apply_(self.net, make_plan(self.net, ...))`; this callback recognises it. Nothing was changed."
        )


def refuse_copies(trainer: Any, plan: ResidualPlan) -> None:
    """A callback that copied the module in its own ``setup`` would miss the parameters inserted now."""
    if not any(b.action == "insert" for b in plan.branches):
        return
    copied = [c for c in trainer.callbacks if getattr(c, "_average_model", None) is not None]
    if copied:
        raise ResInitError(
            f"inserting gates: expected no copy of the module yet, found one in {type(copied[0]).__name__}, whose "
            "`setup` ran first (WeightAveraging and its kind copy the module there). List ResidualInit before it in "
            "`Trainer(callbacks=[...])`. Nothing was changed."
        )
