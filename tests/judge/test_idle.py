"""Branches at rest: batches that select nothing, experts without a row, frozen copies."""

import copy
from typing import Any

import pytest
import torch
from networks import WIDTH, Plain, Scaled, stack
from torch import Tensor, nn

from lit_resinit import apply_, check_gradients, check_identity, make_plan, observe
from lit_resinit.judge import optimizers, step
from lit_resinit.judge.sizes import frozen_branches

X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))


# -------------------------------------------------------------------- idle, empty and frozen


class Selected(Scaled):
    """Updates some rows only, which may be none."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, 0] > 0
        y = x.clone()
        y[rows] = x[rows] + self.scale * self.f(x[rows])
        return y


def test_a_batch_that_selects_nothing_is_no_error() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Selected(value=0.0), nn.Linear(WIDTH, 2))
    plan, empty = make_plan(model, X, scheme="observe"), -X.abs()
    assert len(plan) == 1
    assert check_identity(model, plan, empty).ok
    with observe(model, plan, empty) as seen:
        model(empty).square().mean().backward()
    assert seen.identity.ok
    assert seen.gradients.gates["0.scale"].status == "asleep"


class Experts(nn.Module):
    """Every expert runs on its own tokens, which may be none; the last layers start at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Plain().f for _ in range(3))
        for expert in self.experts:
            nn.init.zeros_(expert[2].weight)
            nn.init.zeros_(expert[2].bias)

    def forward(self, x: Tensor) -> Tensor:
        index = (x[:, 0] > 0).long() + (x[:, 0] > 5).long()
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (index == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]))
        return x + out


def test_an_expert_without_tokens_sleeps_with_its_bias() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Experts(), nn.Linear(WIDTH, 2))
    plan = make_plan(model, X, scheme="observe")
    with observe(model, plan, X) as seen:
        model(X).square().mean().backward()
    assert seen.gradients.ok, str(seen.gradients)
    idle = [g.status for n, g in seen.gradients.gates.items() if n.startswith("0.experts.2.")]
    assert set(idle) <= {"asleep"}


def test_a_frozen_copy_stays_frozen_and_is_no_alarm() -> None:
    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(Plain(), Plain())
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.student(x) - self.teacher(x + 0.1)).square()

    torch.manual_seed(0)
    for scheme in ("auto", "last_layer"):
        model = Student()
        plan = make_plan(model, X, scheme=scheme)
        assert len(plan) == 4
        apply_(model, plan)
        assert not any(p.requires_grad for n, p in model.teacher.named_parameters() if "residual_gate" not in n)
        with observe(model, plan, X) as seen:
            model(X).mean().backward()
        assert seen.gradients.ok, str(seen.gradients)


class Walked(dict):
    """Parameters that count how often something goes through them."""

    walks = 0

    def items(self) -> Any:
        Walked.walks += 1
        return super().items()


@pytest.mark.parametrize("depth", [2, 12])
def test_parameters_are_walked_once_to_find_the_frozen_blocks(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = stack(Plain, depth)[:-1].requires_grad_(False)
    model = nn.Sequential(frozen, nn.Linear(WIDTH, 2))
    plan = make_plan(model, X, scheme="insert")
    apply_(model, plan).requires_grad_(False)[1].requires_grad_(True)
    monkeypatch.setattr(step, "frozen_branches", lambda b, p: frozen_branches(b, Walked(p)))
    monkeypatch.setattr(optimizers, "frozen_branches", lambda b, p: frozen_branches(b, Walked(p)))
    monkeypatch.setattr(Walked, "walks", 0)
    model(X).square().mean().backward()
    statuses = [g.status for g in check_gradients(model, plan).gates.values()]
    assert (statuses, Walked.walks) == (["asleep"] * depth, 1)
    for gate in plan.gates:
        model.get_parameter(gate.parameter).requires_grad_(True)
    optimizers.check_optimizers([torch.optim.SGD(model[1].parameters())], model, plan)
    assert Walked.walks == 2


def test_a_block_is_frozen_where_nothing_below_it_is_trained_but_what_was_inserted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Plain(), nn.Sequential(Plain(), Plain()))
    plan = make_plan(model, X, scheme="insert")
    apply_(model, plan)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("residual_gate" in name)
    parameters = dict(model.named_parameters())
    assert frozen_branches(plan.branches, parameters) == {"0", "1.0", "1.1"}
    model[1][1].f[0].bias.requires_grad_(True)
    assert frozen_branches(plan.branches, parameters) == {"0", "1.0"}
    root = make_plan(Plain(), X)
    assert root.branches[0].block == ""
    assert frozen_branches(root.branches, {"f.0.weight": nn.Parameter(X, False)}) == {"f"}
    assert frozen_branches(root.branches, {"f.0.weight": nn.Parameter(X)}) == set()
