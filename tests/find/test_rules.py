"""Every rule and stage of the finder decides on its example, and leaves its neighbour alone."""

import pytest
from find.rule_networks import NETWORKS
from torch import nn

from lit_resinit.find import branches, rules
from lit_resinit.find.branches import find
from lit_resinit.graph.trace import trace
from lit_resinit.graph.values import Graph

RULES, STAGES = rules.RULES, branches.STAGES


def stage_name(stage: branches.Stage) -> str:
    return stage.__name__.strip("_").replace("_", " ")


NAMES = [rule.name for rule in RULES] + [stage_name(stage) for stage in STAGES if stage_name(stage) != "alone"]


def traced(network: nn.Module) -> Graph:
    return trace(network, (network.data(),))


def count(graph: Graph, monkeypatch: pytest.MonkeyPatch, without: str = "") -> int:
    with monkeypatch.context() as patch:
        patch.setattr(rules, "RULES", tuple(rule for rule in RULES if rule.name != without))
        patch.setattr(branches, "STAGES", tuple(stage for stage in STAGES if stage_name(stage) != without))
        return len(find(graph).streams)


def test_every_rule_has_its_networks() -> None:
    assert sorted(NAMES) == sorted(NETWORKS)


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_decides_on_its_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = NETWORKS[name][0]()
    graph = traced(network)
    assert count(graph, monkeypatch) == network.additions
    assert count(graph, monkeypatch, without=name) != network.additions


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_leaves_its_neighbour_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = NETWORKS[name][1]()
    graph = traced(network)
    assert count(graph, monkeypatch) == network.additions
    assert count(graph, monkeypatch, without=name) == network.additions


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_a_sum_is_told_by_which_rule_it_is_no_branch(name: str) -> None:
    refused = find(traced(NETWORKS[name][0]())).refused
    assert any(name in names for names in refused.values())
