"""What counts as a residual branch: true counts on blocks of every kind, and the sums that are none."""

from collections.abc import Callable

import pytest
import torch
import torchvision
from networks import (
    WIDTH,
    ConvBlock,
    InPlace,
    NormLast,
    Plain,
    PostNorm,
    PreActivation,
    PreNorm,
    Scaled,
    encoder,
    mlp,
    stack,
)
from torch import Tensor, nn
from torch.nn import functional

from lit_resinit import apply_, check_identity, make_plan, observe
from lit_resinit.find.branches import find_additions
from lit_resinit.graph.trace import trace
from lit_resinit.plan.values import ResidualPlan

VECTOR, TOKENS, IMAGE = (4, WIDTH), (2, 5, WIDTH), (2, 4, 8, 8)


def additions(model: nn.Module, *shape: int) -> list:
    return find_additions(trace(model, (torch.randn(shape),)))


def planned(model: nn.Module, *shape: int) -> ResidualPlan:
    return make_plan(model, torch.randn(shape), scheme="observe")


# -------------------------------------------------------------------- branches


class Mirrored(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.f(x) + x


class Subtracted(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x - self.f(x)


class Fused(Plain):
    """``addcmul`` with a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(x, self.scale, self.f(x))


class Functional(Plain):
    """Everything inside one forward, through ``addmm``."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(x, functional.gelu(self.f[0](x)), self.f[2].weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = nn.MultiheadAttention(WIDTH, 2, batch_first=True), mlp()

    def mix(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


class Parallel(Attention):
    """``(attn(n) + mlp(n)) + x``: one branch with two gates."""

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm1(x)
        return (self.mix(n) + self.mlp(n)) + x


class Chained(Attention):
    """``x + attn(n) + mlp(n)``: two branches of one input."""

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm1(x)
        return x + self.mix(n) + self.mlp(n)


class Serial(Attention):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Recurrent(nn.Module):
    """A recurrent layer inside a branch: its own cell updates are none."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.rnn = nn.LayerNorm(WIDTH), kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rnn(self.norm(x))[0]


class PositionBias(nn.Module):
    """One relative position bias, made once and added to the attention scores of every layer."""

    def __init__(self, of_data: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))
        self.table, self.edges = nn.Parameter(torch.randn(5, 5)), nn.Linear(WIDTH, WIDTH)
        self.of_data = of_data

    def forward(self, x: Tensor) -> Tensor:
        shared = torch.cdist(self.edges(x), self.edges(x)) if self.of_data else self.table.expand(len(x), 5, 5)
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, dim=-1)
            x = x + torch.softmax(q @ k.mT + shared, dim=-1) @ v
        return x


class Widening(nn.Module):
    """The skip is padded with zero channels where the width grows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn = nn.Conv2d(4, 8, 3, 2, 1), nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        return skip + self.conv2(functional.relu(self.bn(self.conv1(x))))


class OnSomeRows(nn.Module):
    """Adds a branch of some rows to those rows of the stream, written in one of the ways there are."""

    def __init__(self, add: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.f, self.add = mlp(), add

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(0, len(x), 2)
        return self.add(x, rows, self.f(x[rows]))


def _assigned(x: Tensor, rows: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[rows] = x[rows] + y
    return x


ON_SOME_ROWS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda x, rows, y: x.index_add(0, rows, y),
    "index_add_in_place": lambda x, rows, y: x.clone().index_add_(0, rows, y, alpha=0.5),
    "scatter_add": lambda x, rows, y: x.scatter_add(0, rows[:, None].expand_as(y), y),
    "scatter_reduce": lambda x, rows, y: x.scatter_reduce(0, rows[:, None].expand_as(y), y, "sum"),
    "index_put": lambda x, rows, y: x.index_put((rows,), y, accumulate=True),
    "assigned": _assigned,
}


@pytest.mark.parametrize("name", ON_SOME_ROWS)
def test_a_branch_of_some_rows_is_closed_and_alive(name: str) -> None:
    torch.manual_seed(0)
    model, x = stack(lambda: OnSomeRows(ON_SOME_ROWS[name])), torch.randn(VECTOR)
    plan = make_plan(model, x)
    assert [b.gates[0].module for b in plan.branches] == ["0.f", "1.f"]
    apply_(model, plan)
    assert check_identity(model, plan, x).ok
    with observe(model, plan, x) as seen:
        model(x).square().mean().backward()
    assert {g.status for g in seen.gradients.gates.values()} == {"alive"}


class Context(nn.Module):
    """One value for the whole batch, added to every row."""

    def __init__(self) -> None:
        super().__init__()
        self.f = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x.mean(0))


COUNTED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "pre_norm": (lambda: stack(PreNorm), VECTOR, 2),
    "post_norm": (lambda: stack(PostNorm), VECTOR, 2),
    "norm_last": (lambda: stack(NormLast), VECTOR, 2),
    "resnet_block": (lambda: ConvBlock(4, 4), IMAGE, 1),
    "resnet_block_with_projection": (lambda: ConvBlock(4, 8, 2), IMAGE, 1),
    "padded_skip": (Widening, IMAGE, 1),
    "in_place": (lambda: stack(InPlace), VECTOR, 2),
    "mirrored": (lambda: stack(Mirrored), VECTOR, 2),
    "subtracted": (lambda: stack(Subtracted), VECTOR, 2),
    "addcmul": (lambda: stack(Fused), VECTOR, 2),
    "addmm": (lambda: stack(Functional), VECTOR, 2),
    "broadcast": (lambda: stack(Context), VECTOR, 2),
    "layer_scale": (lambda: stack(lambda: Scaled(size=WIDTH)), VECTOR, 2),
    "parallel_summands": (Parallel, TOKENS, 1),
    "chained_summands": (Chained, TOKENS, 2),
    "serial": (Serial, TOKENS, 2),
    "lstm_inside": (lambda: Recurrent(nn.LSTM), TOKENS, 1),
    "gru_inside": (lambda: Recurrent(nn.GRU), TOKENS, 1),
    "shared_position_bias": (lambda: PositionBias(of_data=False), TOKENS, 3),
    "shared_bias_from_the_data": (lambda: PositionBias(of_data=True), TOKENS, 3),
    "encoder_norm_first": (encoder, TOKENS, 4),
    "encoder_norm_last": (lambda: encoder(norm_first=False), TOKENS, 4),
    "resnet18": (lambda: torchvision.models.resnet18(), (2, 3, 32, 32), 8),
    "convnext_tiny": (lambda: torchvision.models.convnext_tiny(), (1, 3, 32, 32), 18),
    "swin_t": (lambda: torchvision.models.swin_t(), (1, 3, 32, 32), 24),
}


LARGE = {"convnext_tiny", "swin_t"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in COUNTED])
def test_every_residual_addition_is_found_once(name: str) -> None:
    build, shape, count = COUNTED[name]
    assert len(additions(build(), *shape)) == count


@pytest.mark.parametrize(
    ("model", "shape", "skips"),
    [
        (ConvBlock(4, 4), IMAGE, ["identity"]),
        (ConvBlock(4, 8, 2), IMAGE, ["projection"]),
        (Widening(), IMAGE, ["identity"]),
        (Serial(), TOKENS, ["identity", "identity"]),
    ],
)
def test_skip_is_told_apart_from_a_projection(model: nn.Module, shape: tuple[int, ...], skips: list[str]) -> None:
    assert [b.skip for b in planned(model, *shape).branches] == skips


def test_summed_sub_branches_are_one_branch_with_two_gates() -> None:
    (branch,) = planned(Parallel(), *TOKENS).branches
    assert {g.parameter for g in branch.gates} == {"attn.out_proj.weight", "mlp.2.weight"}


def test_chained_sub_branches_have_a_gate_each() -> None:
    first, second = planned(Chained(), *TOKENS).branches
    assert [g.parameter for g in first.gates] == ["attn.out_proj.weight"]
    assert [g.parameter for g in second.gates] == ["mlp.2.weight"]


def test_names_are_the_block_or_the_sub_module() -> None:
    assert [b.name for b in planned(stack(PreNorm), *VECTOR).branches] == ["0", "1"]
    assert [b.name for b in planned(nn.Sequential(Serial()), *TOKENS).branches] == ["0.attn", "0.mlp"]


class Inline(nn.Module):
    """The top module adds what no one sub-module computes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.eye(WIDTH)), nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + functional.gelu(x @ self.a)
        return x + functional.gelu(x @ self.b)


def test_names_of_inline_branches_are_numbered() -> None:
    assert [b.name for b in planned(Inline(), *VECTOR).branches] == ["(root)", "(root):2"]


def test_names_of_a_block_run_several_times_are_unique() -> None:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Plain()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.block(x)
            return x

    plan = planned(Repeated(), *VECTOR)
    assert len({b.name for b in plan.branches}) == len(plan) == 3
    assert len(plan.gates) == 1


def test_streams_are_chained_in_order() -> None:
    plan = planned(stack(PreNorm, 3), *VECTOR)
    assert [b.previous for b in plan.branches] == [None, "0", "1"]


# -------------------------------------------------------------------- sums that are none


class ParallelKernels(nn.Module):
    """A sum of convolutions that could be one: RepVGG."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.bn1 = nn.Conv2d(4, 4, 3, 1, 1), nn.BatchNorm2d(4)
        self.small, self.bn2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.bn3 = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.bn1(self.wide(x)) + self.bn2(self.small(x)) + self.bn3(x))


class AdditiveUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(4, 4, 3, 2, 1) for _ in range(2))
        self.up = nn.ModuleList(nn.ConvTranspose2d(4, 4, 2, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for down in self.down:
            kept.append(x)
            x = functional.relu(down(x))
        for up in self.up:
            x = functional.relu(up(x) + kept.pop())
        return x


class Pyramid(nn.Module):
    """Top-down sums of lateral convolutions: FPN."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.ModuleList(nn.Conv2d(4, 4, 3, 2, 1) for _ in range(3))
        self.lateral = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        levels = []
        for stem in self.stem:
            x = functional.relu(stem(x))
            levels.append(x)
        out = [self.lateral[2](levels[2])]
        for i in (1, 0):
            out.append(self.lateral[i](levels[i]) + functional.interpolate(out[-1], size=levels[i].shape[-2:]))
        return out


class Autoencoder(nn.Module):
    """``mean + noise * std``."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 2 * WIDTH), mlp()

    def forward(self, x: Tensor) -> Tensor:
        mean, log_var = self.encode(functional.gelu(x)).chunk(2, dim=-1)
        return self.decode(mean + torch.randn_like(mean) * torch.exp(0.5 * log_var))


class Highway(nn.Module):
    """``t * f(x) + (1 - t) * x``."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.t = mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.sigmoid(self.t(x))
        return t * self.f(x) + (1 - t) * x


class TwoStreams(nn.Module):
    """A sum of two independent layers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x) + self.b(x))


class Embedding(nn.Module):
    """Token plus position embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(5, WIDTH))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x) + self.position)


NONE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "plain_stack": (mlp, VECTOR),
    "parallel_kernels": (lambda: nn.Sequential(ParallelKernels(), ParallelKernels()), IMAGE),
    "additive_u_net": (AdditiveUNet, IMAGE),
    "feature_pyramid": (Pyramid, IMAGE),
    "reparametrisation": (Autoencoder, VECTOR),
    "highway": (lambda: nn.Sequential(Highway(), Highway()), VECTOR),
    "two_layers_of_one_input": (TwoStreams, VECTOR),
    "position_embedding": (Embedding, TOKENS),
    "lstm_alone": (lambda: nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), TOKENS),
    "gru_alone": (lambda: nn.GRU(WIDTH, WIDTH, 2, batch_first=True), TOKENS),
}


@pytest.mark.parametrize("name", NONE)
def test_other_sums_are_no_branches(name: str) -> None:
    build, shape = NONE[name]
    assert additions(build(), *shape) == []


class AfterBlock(nn.Module):
    """Two residual blocks with other sums between them; what is asked of each is in ``inner``."""

    def __init__(self, inner: nn.Module, channels: int = 4) -> None:
        super().__init__()
        self.first, self.inner, self.last = PreActivation(channels), inner, PreActivation(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


class Lerp(nn.Module):
    """One residual addition, written as an interpolation with a learned weight."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.alpha = nn.Conv2d(4, 4, 3, 1, 1), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(x, self.f(x), self.alpha.sigmoid())


class PoolMixer(nn.Module):
    """``x + scale * (pool(x) - x)``: one branch with a scale, whatever lies before it on the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.scale = nn.AvgPool2d(3, 1, 1), nn.Parameter(torch.full((4, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * (self.pool(x) - x)


class Kernels(ParallelKernels):
    """Parallel kernels with a bare identity, right after a residual addition."""

    def forward(self, x: Tensor) -> Tensor:
        return self.bn3(self.bn1(self.wide(x)) + self.small(x) + x)


class PooledQuery(nn.Module):
    """``conv(x) + pool(x)`` is one linear kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.local, self.pool, self.out = nn.Conv2d(4, 4, 3, 2, 1), nn.AvgPool2d(2), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.local(x) + self.pool(x))


class Cascade(nn.Module):
    """Every head's output is added to the next head's channels, cut from a copy of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Conv2d(2, 2, 3, 1, 1), nn.GELU(), nn.Conv2d(2, 2, 1)) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).chunk(2, 1)
        first = self.heads[0](first)
        return torch.cat([first, self.heads[1](first + second)], 1)


class ResponseNorm(nn.Module):
    """Global response normalisation inside a branch: ``x + scale * (x * n(x))`` there is arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1), nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.gelu(self.a(x))
        y = y + self.scale * (y * y.norm(dim=(2, 3), keepdim=True))
        return x + self.b(y)


class StraightThrough(nn.Module):
    """A vector quantiser: the value of the nearest code, the gradient of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1)
        code = self.codes(torch.cdist(rows.flatten(0, 2), self.codes.weight).argmin(1)).view_as(rows)
        return (rows + (code - rows).detach()).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("build", "count"),
    [(StraightThrough, 0), (Lerp, 1), (PoolMixer, 1), (Kernels, 0), (PooledQuery, 0), (Cascade, 0), (ResponseNorm, 1)],
)
def test_sums_between_two_blocks(build: Callable[[], nn.Module], count: int) -> None:
    found = additions(AfterBlock(build()), *IMAGE)
    assert [a.block for a in found] == ["first", *["inner"] * count, "last"]


def test_a_scale_after_pooling_is_the_gate() -> None:
    model = AfterBlock(PoolMixer())
    assert make_plan(model, torch.randn(IMAGE)).branches[1].gates[0].parameter == "inner.scale"


class WaveNet(nn.Module):
    """Residual layers whose second outputs are summed up separately."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Conv1d(4, 8, 3, padding=1) for _ in range(depth))
        self.outs = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(depth))
        self.skips = nn.ModuleList(nn.Conv1d(4, 6, 1) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for gate, out, skip in zip(self.gates, self.outs, self.skips, strict=True):
            a, b = gate(x).chunk(2, dim=1)
            h = torch.tanh(a) * torch.sigmoid(b)
            total = total + skip(h)
            x = x + out(h)
        return torch.relu(total)


def test_sum_of_skip_outputs_is_no_stream() -> None:
    plan = planned(WaveNet(), 2, 4, 9)
    assert {g.parameter for b in plan.branches for g in b.gates} <= {f"outs.{i}.weight" for i in range(3)}


class Arithmetic(nn.Module):
    """A block and a loss: sums of numbers are no stream."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.critic = Plain(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        fake = self.block(x)
        return self.critic(fake).mean() - self.critic(x).mean()


def test_difference_of_two_losses_is_no_branch() -> None:
    assert [b.name for b in planned(Arithmetic(), *VECTOR).branches] == ["block"]


class ZeroOutput(nn.Module):
    """A zero output layer, and a target that the loss subtracts."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.out = Plain(), nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.out(self.block(x)) - y).square().mean()


def test_target_minus_a_zero_output_is_no_branch() -> None:
    plan = make_plan(ZeroOutput(), (torch.randn(VECTOR), torch.randn(VECTOR)), scheme="observe")
    assert [b.name for b in plan.branches] == ["block"]
    assert "out.weight" in plan.zero_layers


def test_ten_times_the_depth_costs_ten_times_the_nodes() -> None:
    small, large = (
        trace(nn.Sequential(*(PreActivation(2) for _ in range(n))), (torch.randn(2, 2, 4, 4),)) for n in (10, 100)
    )
    assert len(large.nodes) == pytest.approx(10 * len(small.nodes), rel=0.1)
    assert len(find_additions(large)) == 100


X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))


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
