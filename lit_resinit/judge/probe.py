"""Records the values and errors of one step, on both sides of every operation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_resinit.graph.faults import Faults
from lit_resinit.graph.tensors import measuring, peak_of, to_host
from lit_resinit.graph.where import clean_name
from lit_resinit.judge.backward import Errors
from lit_resinit.judge.compare import Reader
from lit_resinit.judge.flow import Flow
from lit_resinit.judge.identity import IdentityProbe
from lit_resinit.judge.identity_report import IdentityReport
from lit_resinit.judge.seen import Seen
from lit_resinit.plan.values import ResidualPlan


class GradientProbe:
    """Context manager around one forward: additions compared, values measured, and the backward's errors hooked."""

    def __init__(
        self,
        model: nn.Module,
        plan: ResidualPlan,
        inputs: Any = (),
        readers: Sequence[Reader] = (),
        faults: Faults | None = None,
    ) -> None:
        self._forward = IdentityProbe(model, plan, inputs, readers=readers, faults=faults)
        self._errors = Errors(model, self._forward.recorder)
        self._forward.recorder.listeners.insert(0, self._errors)
        self._model = model
        self._buffers = {clean_name(n): (b, _version(b)) for n, b in model.named_buffers()}

    def __enter__(self) -> GradientProbe:
        self._forward.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._forward.__exit__(*exc)

    def link(self, loss: Tensor) -> None:
        """Let the backward of ``loss`` itself be seen too."""
        self._errors.link(loss)

    @property
    def saw_backward(self) -> bool:
        """Whether an error arrived anywhere yet."""
        return self._errors.seen

    def identity(self) -> IdentityReport:
        """The verdicts on the branches."""
        return self._forward.identity()

    def flow(self) -> Flow:
        """Everything that was seen, as numbers."""
        with measuring():
            seen, errors, parameters = self._errors.numbers(), self._errors, self._forward.parameters
            return Flow(
                Seen(
                    self._forward.graph,
                    self._values(),
                    seen.arriving,
                    seen.edges,
                    dict(self._forward.additions.calls),
                    {n for n, p in parameters.items() if not p.requires_grad},
                    seen.hooked,
                    seen.replaced,
                    errors.written,
                    errors.python,
                    errors.applied,
                    seen.full,
                    seen.halved,
                    self._changed_buffers(),
                )
            )

    def _changed_buffers(self) -> frozenset[str]:
        """Buffers that were written, or replaced, since the step began, as counters and averages are."""
        now = {clean_name(n): b for n, b in self._model.named_buffers()}
        before = self._buffers.items()
        return frozenset(n for n, (b, version) in before if now.get(n) is not b or _version(b) != version)

    def _values(self) -> dict[int, float]:
        """Largest absolute value of every node, parameters included."""
        sizes, parameters = self._errors.hooked.sizes, self._forward.parameters
        leaves = [n for n in self._forward.graph.nodes if n.op == "parameter"]
        peaks = [sizes[n.name] if n.name in sizes else peak_of(parameters[n.name]) for n in leaves]
        known = to_host([torch.full((), math.nan) if s is None else s for s in peaks])
        return {n.index: v for n, v in zip(leaves, known, strict=True)} | self._forward.peaks.numbers()

    def close_windows(self) -> None:
        """Forget what a backward that raised has left."""
        self._errors.close_windows()

    def release(self) -> list[Any]:
        """Remove every hook and let go of every tensor; see :meth:`Errors.release`."""
        functions = self._errors.release()
        self._forward.recorder.forget()
        self._forward.comparison.forget()
        return functions


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
