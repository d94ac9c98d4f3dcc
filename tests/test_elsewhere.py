"""What a gate must not be: a weight that the network reads elsewhere; and networks that rest, idle or stay frozen."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import WIDTH, Plain, RootMeanSquare, Scaled, mlp, stack
from torch import Tensor, nn
from torch.nn import functional

from lit_resinit import TrainedWeightsError, apply_, check_identity, make_plan, observe
from lit_resinit.errors import GateError
from lit_resinit.judge import gradients, optimizers
from lit_resinit.judge.gradients import frozen_branches
from lit_resinit.judge.waking import UNSEEN, Waking

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
    why = rf"found none: {weight} is used elsewhere too \(at .*test_elsewhere\.py:\d+\), {where}\."
    with pytest.raises(GateError, match=f"scheme '{scheme}' on .root.: expected {LOOKED_FOR[scheme]}; {why}"):
        make_plan(build(), X, scheme=scheme)


def test_a_gate_is_inserted_where_the_last_layer_is_read_elsewhere() -> None:
    torch.manual_seed(0)
    model = StemInBranch()
    before, spread = copy.deepcopy(model.state_dict()), model(X).std(0).max()
    with pytest.raises(GateError, match=r"f\.2\.weight is used elsewhere too \(at .*test_elsewhere\.py:\d+\), in f\.2"):
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


# -------------------------------------------------------------------- evidence of training


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.f = norm, mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.norm(x))


@pytest.mark.parametrize("norm", [lambda: nn.RMSNorm(WIDTH), RootMeanSquare, lambda: nn.LayerNorm(WIDTH)])
@pytest.mark.parametrize("inline", [False, True])
def test_any_trained_norm_is_evidence(norm: Callable[[], nn.Module], inline: bool) -> None:
    torch.manual_seed(0)
    model = Normed(norm()) if inline else nn.Sequential(Normed(norm()), Normed(norm()))
    make_plan(model, X)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Normed):
                module.norm.weight.add_(0.1 * torch.randn(WIDTH))
    plan = make_plan(model, X)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TrainedWeightsError, match=r"norm\.weight"):
        apply_(model, plan)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


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


def test_steps_that_do_not_run_a_branch_do_not_use_up_its_patience() -> None:
    class Rare(Scaled):
        run = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.run else x

    torch.manual_seed(0)
    model = nn.Sequential(Scaled(value=0.0), Rare(value=0.0), nn.Linear(WIDTH, 2))
    model[1].run = True
    plan = make_plan(model, X, scheme="observe")
    model[1].run = False

    def backward() -> None:
        model.zero_grad(set_to_none=True)
        model(X).square().mean().backward()

    with observe(model, plan, X) as seen:
        backward()
    waking = Waking(seen.gradients, patience=3)
    for _ in range(10):
        backward()
        assert waking.step(model).gates["1.scale"].status == "asleep"
    model[1].run = True
    backward()
    assert waking.step(model).gates["1.scale"].status == "alive"

    model[1].run = False
    waking = Waking(seen.gradients, patience=3)
    for _ in range(UNSEEN):
        backward()
        waking.step(model)
    assert waking.report.gates["1.scale"].status == "missing"


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
    monkeypatch.setattr(gradients, "frozen_branches", lambda b, p: frozen_branches(b, Walked(p)))
    monkeypatch.setattr(optimizers, "frozen_branches", lambda b, p: frozen_branches(b, Walked(p)))
    monkeypatch.setattr(Walked, "walks", 0)
    model(X).square().mean().backward()
    statuses = [g.status for g in gradients.check_gradients(model, plan).gates.values()]
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


# -------------------------------------------------------------------- other additions


class Modulated(nn.Module):
    """``x + gate * f(norm(x) * (1 + scale) + shift)``, all three from one zero layer, in two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(WIDTH, elementwise_affine=False), mlp()
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(functional.silu(x)).chunk(3, dim=-1)
        return x + gate * self.f(self.norm(x) * (1 + scale) + shift)


def test_a_zero_shift_is_no_branch() -> None:
    plan = make_plan(nn.Sequential(Modulated(), Modulated()), X, scheme="observe")
    assert [b.name for b in plan.branches] == ["0", "1"]


def test_one_layer_of_a_pooled_stream_is_a_branch() -> None:
    class Context(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layer(x.mean(0))

    assert len(make_plan(nn.Sequential(Context(), Context()), X)) == 2


def test_a_healthy_gate_beside_a_quiet_one_does_not_explode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(value=0.0), Scaled(value=0.0), nn.Linear(WIDTH, 2))
    with torch.no_grad():
        for parameter in model[1].f.parameters():
            parameter.mul_(1e-8)
    plan = make_plan(model, X, scheme="observe")
    with observe(model, plan, X) as seen:
        model(X).square().mean().backward()
    assert {g.status for g in seen.gradients.gates.values()} == {"alive"}
