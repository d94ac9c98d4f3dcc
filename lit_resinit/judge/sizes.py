"""How large gradients are, and which parameters have none for a reason."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lit_resinit.find.gates import INSERTED_NAME
from lit_resinit.graph.tensors import is_sharded, peak_of, to_host
from lit_resinit.plan.values import Branch


def frozen_branches(branches: Sequence[Branch], parameters: dict[str, nn.Parameter]) -> set[str]:
    """Those in whose block only what was inserted is trained: an EMA teacher, a part that is unfrozen later."""
    trained: set[str] = set()  # modules with something in them that is
    for name in (n for n, p in parameters.items() if p.requires_grad and INSERTED_NAME not in n):
        while name not in trained:
            trained.add(name)
            name = name.rpartition(".")[0]
    return {b.name for b in branches if b.block not in trained}


def steps_in_backward(parameter: Tensor) -> bool:
    """Whether hooks run once the gradient is there, as those of an optimizer that steps in the backward."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def gradient_sizes(parameters: dict[str, nn.Parameter]) -> dict[str, float]:
    """Largest absolute gradient of every parameter that has one, in one transfer; of sharded ones over all ranks."""
    grads: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        grad = parameter.grad
        if grad is not None:
            peak = peak_of(grad.coalesce().values() if grad.is_sparse else grad)
            grads[name] = torch.zeros(()) if peak is None else peak
    sizes = dict(zip(grads, to_host(list(grads.values())), strict=True))
    sharded = [n for n, p in parameters.items() if is_sharded(p)]
    return sizes | _largest_of_ranks({n: sizes.get(n) for n in sharded}, parameters) if sharded else sizes


def _largest_of_ranks(sizes: dict[str, float | None], parameters: dict[str, nn.Parameter]) -> dict[str, float]:
    """The sizes over all ranks: a shard may be empty, and a parameter is without gradient only where none has one."""
    device = next(p.device for n, p in parameters.items() if n in sizes)
    known = torch.tensor([-1.0 if s is None else s for s in sizes.values()], device=device)
    known = known.nan_to_num(nan=math.inf, posinf=math.inf)
    torch.distributed.all_reduce(known, torch.distributed.ReduceOp.MAX)
    return {n: s for n, s in zip(sizes, known.tolist(), strict=True) if s >= 0.0}
