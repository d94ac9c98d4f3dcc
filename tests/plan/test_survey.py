"""What is known before anything is decided, and the decisions of every scheme."""

import dataclasses
from typing import get_args

import pytest
import torch
from networks import WIDTH, NormLast, Plain, Scaled, stack
from torch import nn

from lit_resinit.graph.trace import trace
from lit_resinit.plan.decide import SCHEMES, decide
from lit_resinit.plan.survey import Survey, survey
from lit_resinit.plan.values import Scheme

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def look_at(model: nn.Module) -> Survey:
    return survey(model, trace(model, (X,)))


def test_a_survey_names_everything_by_its_addition() -> None:
    known = look_at(stack(Scaled, 3))
    nodes = [a.node for a in known.additions]
    assert nodes == sorted(known.tails) == sorted(known.closed) == sorted(known.names)
    assert [known.names[n] for n in nodes] == ["0", "1", "2"]
    assert [known.link(a).previous for a in known.additions] == [None, *nodes[:-1]]
    assert not any(known.closed.values())


def test_a_survey_is_not_changed_by_deciding() -> None:
    known = look_at(stack(NormLast, 3))
    before = dict(known.tails)
    nodes = {a.node for a in known.additions}
    for scheme in get_args(Scheme):
        decide(known, scheme, nodes)
        decide(known, scheme, set())
    assert known.tails == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        known.tails = {}  # type: ignore[misc]


def test_every_scheme_is_in_the_table() -> None:
    assert set(SCHEMES) == set(get_args(Scheme))


@pytest.mark.parametrize(
    ("block", "scheme", "kinds"),
    [
        (Scaled, "auto", ["scale"]),
        (Plain, "auto", ["inserted"]),
        (Plain, "zero", []),
        (Plain, "last_layer", ["layer"]),
        (NormLast, "sqrt_depth", ["inserted"]),
        (NormLast, "downscale", ["norm"]),
        (Plain, "observe", ["layer"]),
    ],
)
def test_a_decision_holds_the_gates_of_its_scheme(block: type[nn.Module], scheme: Scheme, kinds: list[str]) -> None:
    known = look_at(stack(block, 2))
    decisions = decide(known, scheme, {a.node for a in known.additions})
    assert [[g.kind for g in d.gates] for d in decisions.values()] == [kinds, kinds]


def test_what_is_not_chosen_is_excluded() -> None:
    known = look_at(stack(Scaled, 2))
    first, second = (a.node for a in known.additions)
    decisions = decide(known, "auto", {second})
    assert [decisions[first].action, decisions[second].action] == ["excluded", "zero"]
    assert [g.parameter for g in decisions[second].gates] == ["1.scale"]


def test_a_branch_that_arrives_closed_stays_as_it_is() -> None:
    model = stack(Scaled, 2)
    nn.init.zeros_(model[1].scale)
    known = look_at(model)
    decisions = decide(known, "auto", {a.node for a in known.additions})
    assert [d.action for d in decisions.values()] == ["zero", "already_closed"]
