"""Measures at the planned additions of a forward, and writes nothing down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from lit_resinit.graph import ops
from lit_resinit.graph.faults import Faults
from lit_resinit.graph.ops import Does
from lit_resinit.graph.record import announce
from lit_resinit.graph.tensors import is_not_forward
from lit_resinit.graph.values import Graph
from lit_resinit.graph.where import locate, module_names
from lit_resinit.judge.compare import AtAdditions

RESCALES = Does.NORMALISES | Does.REDUCES


class Tap(TorchDispatchMode):
    """Context manager around one forward, whose planned additions are shown to whoever measures there.

    Operations of other kinds than the planned additions pass untouched, and a backward pass inside is ignored, so that
    what it runs again is not measured twice.

    Args:
        model: The model, with the plan applied.
        additions: Who measures at the additions.
        before_write: Called with every tensor that an operation is about to write.
        notes_rescaling: Whether to note where something is divided by its own size: norms, also those written out.
        faults: What becomes of an exception of ours; it passes on when None. From the first one on nothing is measured.

    Attributes:
        rescaling: What was noted: operations, and the modules that run them.
    """

    def __init__(
        self,
        model: nn.Module,
        additions: AtAdditions,
        *,
        before_write: Callable[[Tensor], None] | None = None,
        notes_rescaling: bool = False,
        faults: Faults | None = None,
    ) -> None:
        super().__init__()
        self.rescaling: set[str] = set()
        self._faults = Faults(strict=True) if faults is None else faults
        self._names = module_names(model)
        self._additions, self._before_write = additions, before_write
        self._noted = ops.named(RESCALES) if notes_rescaling else frozenset()
        self._kinds = additions.kinds | self._noted

    def __enter__(self) -> Tap:
        self._additions.start(Graph())
        return super().__enter__()  # type: ignore[no-any-return]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._before_write is not None and ops.written_arguments(func):
            announce(self._before_write, func, args, kwargs)
        op = ops.base_name(func)
        if op not in self._kinds or is_not_forward(func):
            return func(*args, **kwargs)
        if self._faults.first is None:
            with self._faults:
                self._begin(op, func, args, kwargs)
        out = func(*args, **kwargs)
        if self._faults.first is None:
            with self._faults:
                self._additions.end(out)
        return out

    def _begin(self, op: str, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        owner, line = locate(self._names, 3)
        if op in self._noted:
            self.rescaling |= {owner, "norm" if ops.does(op, Does.NORMALISES) else op}
        self._additions.begin(owner, line, func, args, kwargs)
