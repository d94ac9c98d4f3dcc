"""What closes a branch: every kind of gate, with its closing value, shown by closing it."""

from collections.abc import Callable

import pytest
import torch
from networks import WIDTH, NormLast, Plain, PreNorm, RootMeanSquare, Scaled, mlp
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lit_resinit import Gate, apply_, check_identity, make_plan, observe
from lit_resinit.errors import GateError
from lit_resinit.find.gates import holds

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Ending(nn.Module):
    """``x + end(f(x))`` for any end."""

    def __init__(self, *end: nn.Module) -> None:
        super().__init__()
        self.f, self.end = mlp(), nn.Sequential(*end)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.end(self.f(x))


class OnePlus(Scaled):
    """Multiplies by ``1 + w``."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x) * (1 + self.scale)


class Tanh(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.scale) * self.f(x)


class Halved(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * (self.scale * 0.25) * self.f(x)


class Shifted(Scaled):
    """Multiplies by ``2 * w + 3``."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (2 * self.scale + 3) * self.f(x)


class OneVector(nn.Module):
    """One parameter holds the scalars of all blocks."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp() for _ in range(depth))
        self.alpha = nn.Parameter(torch.ones(depth))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = x + self.alpha[i] * block(x)
        return x


class SharedScale(nn.Module):
    """One scalar for two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = mlp(), mlp()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.a(x)
        return x + self.scale * self.b(x)


class Bare(Plain):
    """Raw parameters, no module computes the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x) @ self.w


def weight_normed() -> nn.Module:
    block = Plain()
    parametrizations.weight_norm(block.f[2])
    return block


# model, scheme, then kind, parameter, closing value, biases of the only gate
GATES: dict[str, tuple[Callable[[], nn.Module], str, str, str, float, tuple[str, ...]]] = {
    "trailing_norm": (NormLast, "zero", "norm", "norm.weight", 0.0, ("norm.bias",)),
    "trailing_batch_norm": (
        lambda: Ending(nn.BatchNorm1d(WIDTH)),
        *("zero", "norm", "end.0.weight", 0.0, ("end.0.bias",)),
    ),
    "trailing_rms_norm": (lambda: Ending(nn.RMSNorm(WIDTH)), "zero", "norm", "end.0.weight", 0.0, ()),
    "norm_in_python": (lambda: Ending(RootMeanSquare()), "zero", "norm", "end.0.weight", 0.0, ()),
    "scalar": (Scaled, "zero", "scale", "scale", 0.0, ()),
    "layer_scale": (lambda: Scaled(size=WIDTH), "zero", "scale", "scale", 0.0, ()),
    "one_plus": (OnePlus, "zero", "scale", "scale", -1.0, ()),
    "tanh": (Tanh, "zero", "scale", "scale", 0.0, ()),
    "constant_factors": (Halved, "zero", "scale", "scale", 0.0, ()),
    "affine_of_the_scale": (Shifted, "zero", "scale", "scale", -1.5, ()),
    "last_linear": (Plain, "last_layer", "layer", "f.2.weight", 0.0, ("f.2.bias",)),
    "last_linear_before_dropout": (
        lambda: Ending(nn.Dropout(0.5)),
        *("last_layer", "layer", "f.2.weight", 0.0, ("f.2.bias",)),
    ),
    "last_linear_before_gelu": (
        lambda: Ending(nn.GELU()),
        *("last_layer", "layer", "f.2.weight", 0.0, ("f.2.bias",)),
    ),
    "last_linear_before_leaky_relu": (
        lambda: Ending(nn.LeakyReLU()),
        *("last_layer", "layer", "f.2.weight", 0.0, ("f.2.bias",)),
    ),
    "weight_norm": (
        weight_normed,
        *("last_layer", "layer", "f.2.parametrizations.weight.original0", 0.0, ("f.2.bias",)),
    ),
    "inserted": (Plain, "insert", "inserted", "f.residual_gate", 0.0, ()),
    "inserted_after_relu": (
        lambda: Ending(nn.ReLU()),
        *("auto", "inserted", "end.residual_gate", 0.0, ()),
    ),
    "inserted_after_norm_and_relu": (
        lambda: Ending(nn.LayerNorm(WIDTH), nn.ReLU()),
        *("auto", "inserted", "end.residual_gate", 0.0, ()),
    ),
    "inserted_after_relu6": (lambda: Ending(nn.ReLU6()), "auto", "inserted", "end.residual_gate", 0.0, ()),
    "inserted_after_sigmoid": (lambda: Ending(nn.Sigmoid()), "auto", "inserted", "end.residual_gate", 0.0, ()),
    "inserted_after_bare_norm": (
        lambda: Ending(nn.LayerNorm(WIDTH, elementwise_affine=False)),
        *("auto", "inserted", "end.residual_gate", 0.0, ()),
    ),
    "auto_prefers_the_norm": (NormLast, "auto", "norm", "norm.weight", 0.0, ("norm.bias",)),
    "auto_inserts_at_a_module": (PreNorm, "auto", "inserted", "f.residual_gate", 0.0, ()),
    "auto_zeroes_raw_parameters": (Bare, "auto", "layer", "w", 0.0, ()),
}


@pytest.mark.parametrize("name", GATES)
def test_gate_closes_its_branch_and_can_open_again(name: str) -> None:
    build, scheme, kind, parameter, value, biases = GATES[name]
    torch.manual_seed(0)
    model = build()
    plan = make_plan(model, X, scheme=scheme)
    (gate,) = plan.gates
    assert (gate.kind, gate.parameter, gate.value, gate.biases) == (kind, parameter, value, biases)
    apply_(model, plan)
    assert holds(model.get_parameter(parameter), value)
    assert check_identity(model, plan, X).ok
    model(X).square().sum().backward()
    assert bool(model.get_parameter(parameter).grad.any())


@pytest.mark.parametrize("name", GATES)
def test_nothing_but_the_gate_is_changed(name: str) -> None:
    build, scheme, _, parameter, _, biases = GATES[name]
    torch.manual_seed(0)
    model = build()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    apply_(model, make_plan(model, X, scheme=scheme))
    changed = {n for n, p in model.named_parameters() if n not in before or not torch.equal(before[n], p)}
    assert parameter in changed
    assert changed <= {parameter, *biases}


def test_one_parameter_with_an_element_for_each_block() -> None:
    model = OneVector()
    plan = make_plan(model, X, include=["(root):2", "(root):4"])
    assert [(g.parameter, g.index) for g in plan.gates] == [("alpha", 1), ("alpha", 3)]
    apply_(model, plan)
    assert model.alpha.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert check_identity(model, plan, X).ok


def test_a_scale_shared_by_two_branches_is_one_gate() -> None:
    model = SharedScale()
    plan = make_plan(model, X)
    assert [b.gates for b in plan.branches] == [(Gate("scale", "scale", folds_into=("scale",)),)] * 2
    assert len(plan.gates) == 1
    assert check_identity(apply_(model, plan), plan, X).ok


def test_squeeze_and_excite_is_passed_on_the_way_to_the_gate() -> None:
    class Excited(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.squeeze = mlp(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())

        def forward(self, x: Tensor) -> Tensor:
            out = self.f(x)
            return x + out * self.squeeze(out)

    model = Excited()
    plan = make_plan(model, X, scheme="last_layer")
    assert [g.parameter for g in plan.gates] == ["f.2.weight"]
    assert check_identity(apply_(model, plan), plan, X).ok


def test_gated_unit_closes_the_last_projection() -> None:
    class SwiGlu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.a, self.b, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            n = self.norm(x)
            return x + self.out(nn.functional.silu(self.a(n)) * self.b(n))

    plan = make_plan(SwiGlu(), X, scheme="last_layer")
    assert [g.parameter for g in plan.gates] == ["out.weight"]


def test_out_projection_of_attention_is_found_though_never_called() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    x = torch.randn(2, 3, WIDTH)
    plan = make_plan(layer, x, scheme="last_layer")
    assert [g.parameter for g in plan.gates] == ["self_attn.out_proj.weight", "linear2.weight"]
    assert check_identity(apply_(layer, plan), plan, x).ok


# -------------------------------------------------------------------- branches that arrive closed


class Root(Plain):
    """A zero projection behind a square root: closed, and deadly."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x).square().sum(-1, keepdim=True).sqrt().expand_as(x)


@pytest.mark.parametrize(
    ("build", "parameter"),
    [(Plain, "f.2.weight"), (Root, "f.2.weight"), (lambda: Ending(nn.ReLU()), "f.2.weight")],
)
def test_closed_branch_is_judged_by_the_zero_factor_nearest_its_end(
    build: Callable[[], nn.Module], parameter: str
) -> None:
    model = build()
    nn.init.zeros_(model.f[2].weight)
    nn.init.zeros_(model.f[2].bias)
    (branch,) = make_plan(model, X, scheme="observe").branches
    assert branch.action == "already_closed"
    assert [g.parameter for g in branch.gates] == [parameter]


def test_a_second_factor_is_never_closed() -> None:
    model = Scaled()
    nn.init.zeros_(model.f[2].weight)
    nn.init.zeros_(model.f[2].bias)
    plan = make_plan(model, X)
    assert [(b.action, b.gates[0].parameter) for b in plan.branches] == [("already_closed", "f.2.weight")]
    apply_(model, plan)
    assert float(model.scale.detach()) == 1.0


def test_a_norm_at_the_start_of_the_branch_is_never_closed() -> None:
    for scheme in ("auto", "insert", "last_layer"):
        plan = make_plan(PreNorm(), X, scheme=scheme)
        assert "norm.weight" not in {n for g in plan.gates for n in (g.parameter, *g.biases)}


# -------------------------------------------------------------------- two factors that are zero together


class FusedAttention(nn.Module):
    """Queries, keys and values from one layer, and no layer after them."""

    def __init__(self, fused: bool, bias: bool) -> None:
        super().__init__()
        self.fused, self.qkv = fused, nn.Linear(WIDTH, 3 * WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(0, (1, 2, -1)).chunk(3, -1)
        if self.fused:
            return nn.functional.scaled_dot_product_attention(q, k, v).flatten(0, 2)
        return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).flatten(0, 2)


class GatedUnit(nn.Module):
    """Half of a layer's output times a function of the other half."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.both, self.function = nn.Linear(WIDTH, 2 * WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.both(x).chunk(2, -1)
        return value * self.function(gate)


class TimesItself(nn.Module):
    """``y * s(y)`` with ``s(0) = 0``."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.squeeze = mlp(), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x).flip(0)
        return y * self.squeeze(y)


class Around(nn.Module):
    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


DOUBLE_ZEROS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: FusedAttention(False, False),
    "attention with biases": lambda: FusedAttention(False, True),
    "fused attention": lambda: FusedAttention(True, True),
    "silu unit": lambda: GatedUnit(nn.SiLU()),
    "relu unit": lambda: GatedUnit(nn.ReLU()),
}


@pytest.mark.parametrize("name", DOUBLE_ZEROS)
def test_a_gate_that_makes_two_factors_of_a_product_zero_is_refused(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Around(DOUBLE_ZEROS[name]()) for _ in range(2)))
    with pytest.raises(GateError, match=r"multiplies two values that are zero together \(at .*test_gates.py:\d+\)"):
        make_plan(model, X, scheme="last_layer")
    plan = make_plan(model, X)
    assert [(b.action, b.gates[0].module) for b in plan.branches] == [("insert", "0.f"), ("insert", "1.f")]
    apply_(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(3):
        optimizer.zero_grad()
        (model(X) - X.roll(1, 0)).square().mean().backward()
        optimizer.step()
    rows = [(p != before[n]).flatten(1).any(1) for n, p in model.named_parameters() if p.dim() > 1]
    assert all(r.float().mean() > 0.6 for r in rows), "every part of the layer learns, not one third of it"


def test_a_product_is_closed_through_the_factor_that_nothing_else_reads() -> None:
    model = nn.Sequential(Around(TimesItself()))
    plan = make_plan(model, X, scheme="last_layer")
    assert [g.parameter for g in plan.gates] == ["0.f.squeeze.weight"]
    apply_(model, plan)
    with observe(model, plan, X) as seen:
        model(X).square().mean().backward()
    assert seen.gradients.gates["0.f.squeeze.weight"].status == "alive"


def test_a_unit_gated_by_a_sigmoid_may_close_at_its_layer() -> None:
    model = nn.Sequential(Around(GatedUnit(nn.Sigmoid())))
    assert [g.parameter for g in make_plan(model, X, scheme="last_layer").gates] == ["0.f.both.weight"]


def test_softmax_of_zeros_is_not_zero() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
            nn.init.zeros_(self.score.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x * self.score(x).softmax(-1))

    model = nn.Sequential(Around(Pooled()))
    plan = make_plan(model, X)
    assert [b.action for b in plan.branches] == ["insert"]
    assert plan.zero_layers == ("0.f.score.weight",)


def test_a_summand_that_arrives_closed_keeps_its_gate() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.w(x) + self.b(self.a(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), Adapted())

        def forward(self, x: Tensor) -> Tensor:
            return x + self.f(x)

    model, x = nn.Sequential(Outer(), nn.Linear(WIDTH, 2)), torch.randn(8, WIDTH)
    plan = make_plan(model, x)
    apply_(model, plan)
    with observe(model, plan, x) as seen:
        model(x).square().mean().backward()
    assert seen.identity.ok
    assert seen.gradients.ok, str(seen.gradients)


def test_the_operand_of_a_merge_that_is_an_index_is_no_factor() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expert = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            chosen = (x[:, 0] > -100.0).nonzero().squeeze(-1)
            out = torch.zeros_like(x).index_add(0, chosen, self.expert(x[chosen]))
            return x + out

    model, x = nn.Sequential(Routed(), Routed()), torch.randn(5, WIDTH)
    plan = make_plan(model, x)
    assert check_identity(apply_(model, plan), plan, x).ok
