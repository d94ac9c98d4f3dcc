"""Branches without a gate that nothing can open: what makes them zero is no parameter, no data, no draw, no counter."""

from __future__ import annotations

from lit_resinit.graph.values import Node
from lit_resinit.judge.flow import Flow
from lit_resinit.judge.verdicts import GateGradient
from lit_resinit.plan.values import Branch, ResidualPlan
from lit_resinit.words import together

_OPEN_IT = (
    "make it a parameter, or load the values that it is meant to hold; where it is meant to stay zero, leave the "
    "branch out with `exclude`"
)


def shut_branches(plan: ResidualPlan, flow: Flow, resting: set[str]) -> list[GateGradient]:
    """A verdict on each branch without a gate that is zero for good, except those of frozen blocks."""
    found = (b for b in plan.active if not b.gates and b.name not in resting)
    return [verdict for branch in found if (verdict := _verdict(branch, flow)) is not None]


def hidden_gates(plan: ResidualPlan, flow: Flow) -> list[tuple[str, str]]:
    """Branches without a gate that were zero in this step because of zero parameters alone, and these parameters."""
    found: list[tuple[str, str]] = []
    for branch in (b for b in plan.active if not b.gates):
        end, explained = _end(branch, flow), flow.links.explained
        words = explained.explain(end.index) if end is not None and explained.value(end.index) == 0.0 else ()
        if all(word in flow.leaves and explained.value(flow.leaves[word]) == 0.0 for word in words):
            found += [(branch.name, word) for word in sorted(words)]
    return found


def _verdict(branch: Branch, flow: Flow) -> GateGradient | None:
    end, explained = _end(branch, flow), flow.links.explained
    if end is None or explained.value(end.index) != 0.0 or not explained.is_fixed(end.index):
        return None
    buffers = explained.buffers_behind(end.index)
    product = explained.place_of_zero(end.index)
    source = flow.seen.source(product) if product is not None else ""
    what = f"{together(buffers)} is a buffer of zeros" if buffers else "a constant makes it zero"
    cause = f"the branch can never open: {what}, which no training step changes"
    name = buffers[0] if buffers else branch.name
    return GateGradient(name, "dead", cause, source=source, branch=branch.name, role="branch", remedy=_OPEN_IT)


def _end(branch: Branch, flow: Flow) -> Node | None:
    """The value that the addition adds to its skip, in the observed forward."""
    call = flow.seen.additions.get(branch.name)
    if call is None:
        return None
    nodes, inputs = flow.graph.nodes, flow.graph.calls[call].inputs
    if branch.branch_input is not None:
        return nodes[inputs[branch.branch_input]] if branch.branch_input < len(inputs) else None
    sums = (n for n in nodes if n.call == call and n.op == "add")
    skip = inputs[branch.skip_input]
    return next((nodes[i] for n in sums for i in n.inputs if i != skip), None)
