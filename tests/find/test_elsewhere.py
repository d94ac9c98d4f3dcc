"""What a gate must not be: a weight that the network reads elsewhere too."""

import copy
from collections.abc import Callable

import pytest
import torch
from networks import WIDTH, Plain, Scaled, mlp
from torch import Tensor, nn
from torch.nn import functional

from lit_resinit import apply_, check_identity, make_plan, observe
from lit_resinit.errors import GateError

X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))


# -------------------------------------------------------------------- weights read elsewhere


class OneScale(nn.Module):
    """The scale of the branch also multiplies the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.scale = mlp(), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return x + self.scale * self.f(x)


class OneNorm(nn.Module):
    """The norm at the branch's end is the final norm too."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.norm = mlp(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.norm(self.f(x)))


class TiedStem(nn.Module):
    """The last layer of the branch is the stem too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.first = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x + self.layer(functional.gelu(self.first(x)))


class TiedLayers(nn.Module):
    """Both layers of the branch share one weight: closing it makes two zeros in series."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.gelu(x @ self.weight) @ self.weight.t()


class StemInBranch(Plain):
    """The last layer of the branch is the stem too, and the branch ends with the module that holds it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.f[2](x))


class TwiceScaled(Scaled):
    """The square of a scale, as two products."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * (self.scale * self.f(x))


ELSEWHERE: dict[Callable[[], nn.Module], tuple[str, str]] = {  # the weight, and where it is read too
    OneScale: ("scale", "in the top module"),
    OneNorm: (r"norm\.weight", "in norm"),
    TiedStem: (r"layer\.weight", "in layer"),
    TiedLayers: ("weight", "in the top module"),
    TwiceScaled: ("scale", "in the top module"),
}


LOOKED_FOR = {"auto": "a module whose output is the end of the branch", "last_layer": "a last layer to zero"}


@pytest.mark.parametrize("build", ELSEWHERE)
@pytest.mark.parametrize("scheme", LOOKED_FOR)
def test_a_weight_read_elsewhere_is_never_closed(build: Callable[[], nn.Module], scheme: str) -> None:
    torch.manual_seed(0)
    weight, where = ELSEWHERE[build]
    why = rf"found none: {weight} is used elsewhere too \(at .*test_\w+\.py:\d+\), {where}\."
    with pytest.raises(GateError, match=f"scheme '{scheme}' on .root.: expected {LOOKED_FOR[scheme]}; {why}"):
        make_plan(build(), X, scheme=scheme)


def test_a_gate_is_inserted_where_the_last_layer_is_read_elsewhere() -> None:
    torch.manual_seed(0)
    model = StemInBranch()
    before, spread = copy.deepcopy(model.state_dict()), model(X).std(0).max()
    with pytest.raises(GateError, match=r"f\.2\.weight is used elsewhere too \(at .*test_\w+\.py:\d+\), in f\.2"):
        make_plan(model, X, scheme="last_layer")
    plan = make_plan(model, X)
    apply_(model, plan)
    assert [(b.action, g.parameter) for b in plan.branches for g in b.gates] == [("insert", "f.residual_gate")]
    assert check_identity(model, plan, X).ok
    assert all(torch.equal(model.state_dict()[n], v) for n, v in before.items())
    assert model(X).std(0).max() > 0.1 * spread


def test_a_scale_shared_by_branches_alone_is_their_gate() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.scale = mlp(), mlp(), nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.scale * self.a(x)
            return x + self.scale * self.b(x)

    plan = make_plan(Shared(), X)
    assert [g.parameter for g in plan.gates] == ["scale"]
    with pytest.raises(GateError, match="scale is used elsewhere too"):
        make_plan(Shared(), X, scheme="zero", exclude="(root):2")


# -------------------------------------------------------------------- values read elsewhere


class Returned(Plain):
    """What is added is also returned."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.f(x)
        return x + y, y


class TwoHeads(Plain):
    """What is added is also read by a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.f(x)
        return x + y, self.head(y)


@pytest.mark.parametrize("build", [Returned, TwoHeads])
@pytest.mark.parametrize("scheme", ["auto", "insert", "last_layer"])
def test_a_value_read_elsewhere_is_never_closed(build: Callable[[], nn.Module], scheme: str) -> None:
    why = r"what f\.2\.weight closes is read elsewhere too, or returned \(at .*test_\w+\.py:\d+\)"
    with pytest.raises(GateError, match=why):
        make_plan(build(), X, scheme=scheme)


def test_a_value_that_a_submodule_returns_and_nobody_reads_is_no_output() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Returned()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x)[0]

    assert [g.parameter for g in make_plan(First(), X).gates] == ["block.f.residual_gate"]


def test_a_weight_penalty_in_the_loss_is_no_other_use() -> None:
    class WithLoss(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean() + 1e-4 * self.scale.square().sum()

    plan = make_plan(nn.Sequential(Scaled(), WithLoss()), X)
    assert [g.parameter for g in plan.gates] == ["0.scale", "1.scale"]


class Telling(nn.Module):
    """Returns what its branch added, besides the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.f = mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        added = self.f(x)
        return x + added, added


def test_a_scalar_goes_where_the_addition_reads_it() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = Telling(), Telling(), nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            x, _ = self.first(x)
            x, _ = self.second(x)
            return self.head(x)

    model = Net()
    plan = make_plan(model, X, scheme="insert")
    assert [g.module for g in plan.gates] == ["first.f", "second.f"]
    apply_(model, plan)
    assert check_identity(model, plan, X).ok


class RungeKutta(nn.Module):
    """Four evaluations of one function in a step: stages inside a branch that share its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.f = mlp()

    def forward(self, x: Tensor) -> Tensor:
        one = self.f(x)
        two = self.f(x + 0.5 * one)
        three = self.f(x + 0.5 * two)
        four = self.f(x + three)
        return x + (one + 2 * two + 2 * three + four) / 6


def test_stages_of_one_step_are_closed_once() -> None:
    torch.manual_seed(0)
    model = RungeKutta()
    plan = make_plan(model, X)
    apply_(model, plan)
    assert check_identity(model, plan, X).ok
    with observe(model, plan, X) as seen:
        model(X).square().mean().backward()
    assert {g.status for g in seen.gradients.gates.values()} == {"alive"}
