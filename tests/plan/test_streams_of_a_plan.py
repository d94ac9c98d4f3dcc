"""A plan as a value: its streams, and names in pickles that outlive a move of files."""

import json
import pickle
import pickletools
from collections.abc import Callable

import pytest
import torch
from networks import WIDTH, NormLast, Plain, Scaled, stack
from torch import Tensor, nn

import lit_resinit
from lit_resinit import ResidualPlan, ScalarGate, apply_, make_plan
from lit_resinit.find.gates import Gate
from lit_resinit.plan.values import Stream

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Parting(nn.Module):
    """One stream that two others go on from."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = (nn.Sequential(*(Scaled() for _ in range(n))) for n in (2, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return torch.cat([self.left(x), self.right(x)], -1)


def test_a_plan_keeps_its_streams() -> None:
    plan = make_plan(stack(Scaled, 3), X)
    assert plan.streams == (Stream(("0", "1", "2"), ((), (), ())),)


def test_where_a_stream_parts_the_second_way_on_is_a_stream_of_its_own() -> None:
    plan = make_plan(Parting(), X)
    assert [s.branches for s in plan.streams] == [("trunk.0", "trunk.1", "left.0", "left.1"), ("right.0",)]
    assert [s.parts_from for s in plan.streams] == [None, "trunk.1"]


@pytest.mark.parametrize("build", [Parting, lambda: stack(NormLast, 3), lambda: stack(Plain, 2)])
def test_streams_say_what_the_branches_say(build: Callable[[], nn.Module]) -> None:
    plan = make_plan(build(), X)
    previous = {b: p for s in plan.streams for p, b in zip((s.parts_from, *s.branches), s.branches, strict=False)}
    between = {b: passed for s in plan.streams for b, passed in zip(s.branches, s.between, strict=True)}
    assert previous == {b.name: b.previous for b in plan.branches}
    assert between == {b.name: b.between for b in plan.branches}
    assert plan.after_last == {s.branches[-1]: s.after for s in plan.streams}


def test_streams_are_seen_from_a_parent_and_go_through_json() -> None:
    plan = make_plan(Parting(), X).below("net")
    assert [s.parts_from for s in plan.streams] == [None, "net.trunk.1"]
    assert plan.streams[1].branches == ("net.right.0",)
    assert json.loads(json.dumps(plan.to_dict())) == plan.to_dict()
    assert plan.to_dict()["streams"][1]["branches"] == ["net.right.0"]


# -------------------------------------------------------------------- pickles


def modules_in(pickled: bytes) -> set[str]:
    """The modules of this package that a pickle names."""
    texts = [arg for _, arg, _ in pickletools.genops(pickled) if isinstance(arg, str)]
    return {t for t in texts if t.startswith("lit_resinit")}


@pytest.mark.parametrize("scheme", ["insert", "sqrt_depth"])
def test_a_pickled_model_names_no_room(scheme: str) -> None:
    model = stack(Plain, 2)
    apply_(model, make_plan(model, X, scheme=scheme))
    pickled = pickle.dumps(model)
    assert modules_in(pickled) == {"lit_resinit"}
    assert torch.equal(pickle.loads(pickled)(X), model(X))


def test_a_pickled_plan_names_no_room_and_comes_back_equal() -> None:
    plan = make_plan(stack(Scaled, 2), X)
    pickled = pickle.dumps(plan)
    assert modules_in(pickled) == {"lit_resinit"}
    assert pickle.loads(pickled) == plan
    assert modules_in(pickle.dumps(ScalarGate())) == {"lit_resinit"}


PICKLED = ["GateHook", "ConstantHook", "LoadHook", "Applied", "ScalarGate"]
PICKLED += ["ResidualPlan", "Branch", "Gate", "Stream", "Address"]


@pytest.mark.parametrize("name", PICKLED)
def test_what_is_pickled_is_found_at_the_top(name: str) -> None:
    found = getattr(lit_resinit, name)
    assert (found.__module__, found.__qualname__) == ("lit_resinit", name)


# -------------------------------------------------------------------- gates


def test_a_gate_is_its_parameter_or_one_element_and_closes_itself() -> None:
    parameters = {"w": torch.ones(3), "b": torch.ones(2)}
    whole, one = Gate("scale", "w", biases=("b",)), Gate("scale", "w", -1.0, 1)
    assert whole.of(parameters) is parameters["w"]
    assert one.of(parameters).shape == ()
    one.close_(parameters)
    assert parameters["w"].tolist() == [1.0, -1.0, 1.0]
    assert parameters["b"].tolist() == [1.0, 1.0]
    whole.close_(parameters)
    assert not parameters["w"].any()
    assert not parameters["b"].any()


def test_a_plan_without_streams_is_still_a_plan() -> None:
    assert ResidualPlan("auto", ()).after_last == {}
