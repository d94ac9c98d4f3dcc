"""What the package says about some 1,000 frozen graphs is what it said when they were frozen.

After an intended change of a verdict: ``python -m benchmarks.freeze --diff`` shows it, ``--accept`` freezes it.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from frozen_graphs import Frozen, differences, judge, parts, read_answers, read_part

SHOWN = 12


@pytest.mark.parametrize("part", parts())
def test_frozen_graphs_keep_their_additions_and_plans(part: str) -> None:
    frozen, expected = read_part(part)
    assert {f.name for f in frozen} == set(expected)
    changed = [f"{f.name}: {line}" for f in frozen for line in first_difference(expected[f.name], f)]
    assert not changed, "\n".join([f"{len(changed)} of {len(frozen)} networks differ", *changed[:SHOWN]])


def first_difference(expected: dict[str, Any], frozen: Frozen) -> list[str]:
    return list(differences(expected, judge(frozen.graph, frozen.model)))[:1]


def test_there_are_frozen_graphs_with_and_without_branches() -> None:
    answers = {name: answer for part in parts() for name, answer in read_answers(part).items()}
    assert len(answers) > 900
    assert len({bool(answer["additions"]) for answer in answers.values()}) == 2


@pytest.fixture(scope="module")
def network() -> tuple[Frozen, dict[str, Any]]:
    """One frozen network with branches, and its answer."""
    frozen, expected = read_part("torchvision_00")
    return next((f, expected[f.name]) for f in frozen if expected[f.name]["additions"])


def lose(answer: dict[str, Any]) -> None:
    answer["additions"].pop()


def move(answer: dict[str, Any]) -> None:
    answer["additions"][-1]["stream"] += 1


def rename(answer: dict[str, Any]) -> None:
    answer["auto"]["branches"][0]["name"] = "another"


@pytest.mark.parametrize(
    ("change", "where"), [(lose, "lost none; new node"), (move, "stream: expected"), (rename, "branches[0].name")]
)
def test_every_difference_is_seen_and_said(
    network: tuple[Frozen, dict[str, Any]], change: Callable[[dict[str, Any]], None], where: str
) -> None:
    frozen, expected = network
    answer = copy.deepcopy(expected)
    change(answer)
    (line,) = first_difference(answer, frozen)
    assert where in line


RESIDUAL = ("Plain", "InPlace", "Scaled", "PreNorm", "PostNorm", "NormLast")  # of tests/networks.py


def test_random_stacks_have_an_addition_for_each_residual_block() -> None:
    frozen, expected = read_part("random_00")
    found = {f.name: len(expected[f.name]["additions"]) for f in frozen}
    assert found == {f.name: sum(type(m).__name__ in RESIDUAL for m in f.model.modules()) for f in frozen}
