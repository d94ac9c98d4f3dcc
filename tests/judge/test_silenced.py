"""Outputs that the closed branches leave constant are named: a check on the closed network, and not on the plan."""

import dataclasses
from typing import Any

import pytest
import torch
from networks import WIDTH, Plain
from torch import Tensor, nn

from lit_resinit import apply_, check_identity, make_plan

X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))


@dataclasses.dataclass
class Result:
    answer: Tensor
    pooled: Tensor


class Queries(nn.Module):
    """Learned queries that only the branches tell of the input."""

    def __init__(self, result: str) -> None:
        super().__init__()
        self.result = result
        self.queries = nn.Parameter(torch.randn(1, WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.queries.expand(len(x), -1)
        for block in self.blocks:
            y = y + block(torch.cat((y, x), -1))
        answer, pooled = self.head(y), x.mean(1)
        return {
            "tensor": answer,
            "tuple": (pooled, answer),
            "dict": {"pooled": pooled, "answer": answer},
            "object": Result(answer, pooled),
        }[self.result]


@pytest.mark.parametrize("size", [6, 1])
@pytest.mark.parametrize(
    ("result", "name"), [("tensor", "the output"), ("tuple", "[1]"), ("dict", "['answer']"), ("object", ".answer")]
)
def test_an_output_that_only_closed_branches_lead_to_is_named(result: str, name: str, size: int) -> None:
    model = Queries(result)
    plan = make_plan(model, X)
    assert check_identity(model, plan, X[:size]).silenced == ()
    apply_(model, plan)
    report = check_identity(model, plan, X[:size])
    assert report.ok
    assert report.silenced == (name,)
    assert f"the same for every batch: {name}. Nothing but these branches leads there" in str(report)


class ZeroHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Plain(), nn.Linear(WIDTH, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(x))
        return out


@pytest.mark.parametrize("size", [6, 1])
@pytest.mark.parametrize("build", [ZeroHead, lambda: nn.Sequential(Plain(), Plain())])
def test_an_output_that_was_constant_before_or_still_moves_is_not(build: Any, size: int) -> None:
    model = build()
    plan = make_plan(model, X)
    apply_(model, plan)
    report = check_identity(model, plan, X[:size])
    assert report.silenced == ()
    assert "same for every batch" not in str(report)
