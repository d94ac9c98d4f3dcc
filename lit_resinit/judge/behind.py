"""Layers of a block whose gates are open and learn, and that get no gradient all the same: named once."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from lit_resinit.find.gates import holds
from lit_resinit.graph.tensors import whole
from lit_resinit.graph.where import clean_name
from lit_resinit.judge.flow import Flow
from lit_resinit.judge.sizes import gradient_sizes
from lit_resinit.judge.verdicts import GateGradient, GradientReport
from lit_resinit.plan.values import ResidualPlan
from lit_resinit.words import together


def layers_inside(plan: ResidualPlan, flow: Flow) -> dict[str, str]:
    """The block of every parameter that meets data inside of one, judged ones left out."""
    judged = {n for b in plan.active for g in b.gates for n in (g.parameter, *g.biases)} | set(plan.zero_layers)
    blocks = {b.block for b in plan.active if b.gates}
    found: dict[str, str] = {}
    for name in flow.leaves.keys() - judged:
        reader = flow.reader(name)
        block = None if reader is None else _innermost(flow.graph.calls[reader].owner, blocks)
        if block is not None:
            found[name] = block
    return found


def _innermost(owner: str, blocks: Collection[str]) -> str | None:
    """The smallest of these modules that a module is, or lies in."""
    while owner not in blocks and owner:
        owner = owner.rpartition(".")[0]
    return owner if owner in blocks else None


class SilentLayers:
    """Layers of a plan's blocks, looked at once when their gates are open, and named once.

    Args:
        plan: The plan.

    Attributes:
        silent: Those without a gradient, of which the next observed step is to say why.
    """

    def __init__(self, plan: ResidualPlan) -> None:
        self.silent: set[str] = set()
        self._plan = plan
        self._inside: dict[str, str] = {}  # see `layers_inside`
        self._verdicts: list[GateGradient] = []

    def learn(self, inside: Mapping[str, str], verdicts: list[GateGradient]) -> None:
        """What an observed step says of the layers: where they are, and why the silent ones have no gradient."""
        self._inside, self._verdicts = self._inside or dict(inside), verdicts

    def look(self, model: nn.Module, report: GradientReport) -> bool:
        """Whether some have no gradient now, although every gate of their block is open and alive.

        Every rank has to come here, where parameters are sharded.
        """
        parameters = {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
        sizes = gradient_sizes(parameters)
        shut = _shut_blocks(self._plan, parameters, sizes, report)
        self.silent = {
            name
            for name, block in self._inside.items()
            if block not in shut and name in parameters and parameters[name].requires_grad and not sizes.get(name)
        }
        return bool(self.silent)

    def suspect(self) -> None:
        """Some rank found one: without one of its own, a rank looks at all."""
        self.silent = self.silent or set(self._inside)

    def in_words(self) -> str:
        """Those of the silent ones that no training step changes, as one message, once; "" for none."""
        found = [v for v in self._verdicts if v.status in ("dead", "missing")] if self.silent else []
        self.silent = set()
        if not found:
            return ""
        first = next((v for v in found if v.source), found[0])
        where = f", at {first.source}" if first.source else ""
        return (
            "looked at the layers of blocks whose gates are open and learn; expected a gradient on each, found none on "
            f"{len(found)} parameters: {together([v.parameter for v in found])}. {first.parameter}: {first.status}: "
            f"{first.cause}{where}. They stay as they were initialised: let what they compute reach the loss, or "
            "freeze them (`requires_grad_(False)`)."
        )


def _shut_blocks(
    plan: ResidualPlan, parameters: Mapping[str, nn.Parameter], sizes: Mapping[str, float], report: GradientReport
) -> set[str]:
    """Blocks with a gate that is closed still, or does not learn."""
    shut = {b.block for b in plan.active if not b.gates}
    for branch in plan.active:
        for gate in branch.gates:
            verdict = report.gates.get(gate.parameter)
            alive = verdict is not None and verdict.status == "alive" and sizes.get(gate.parameter)
            value = whole(parameters[gate.parameter]) if gate.parameter in parameters else None
            if not alive or value is None or holds(value if gate.index is None else value[gate.index], gate.value):
                shut.add(branch.block)
    return shut
