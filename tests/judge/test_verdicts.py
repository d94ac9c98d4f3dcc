"""Verdicts that were not true when they were said: kinds met in public reports and random networks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from judging import X, judged, square
from networks import WIDTH, Scaled
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lit_resinit import make_plan, observe


def zeroed(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Behind(nn.Module):
    """A zero layer with a function of its output, and of the stream, behind it."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(WIDTH, WIDTH), zeroed(nn.Linear(WIDTH, WIDTH)), function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(self.down(torch.tanh(self.up(x))), x)


LOST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill": lambda v, x: v.masked_fill(v == 0, 0.0),
    "where": lambda v, x: torch.where(v == 0, torch.zeros_like(v), v),
    "where_not": lambda v, x: torch.where(v != 0, v, torch.zeros_like(v)),
    "guarded_norm": lambda v, x: torch.where(v.square().sum(-1, keepdim=True) > 0, v.tanh(), torch.zeros_like(v)),
    "one_minus_cos": lambda v, x: (1 - v.cos()) * x,
}


@pytest.mark.parametrize("name", LOST)
def test_what_its_own_block_loses_does_not_wait_for_a_later_closed_block(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Behind(LOST[name]), Scaled(value=0.0), nn.Linear(WIDTH, 2))
    gates = judged(model).gates
    assert gates["0.down.weight"].status == "dead", gates["0.down.weight"]
    assert gates["0.down.weight"].source.rpartition(":")[0].endswith("test_verdicts.py")
    assert gates["1.scale"].status == "alive"


def test_what_the_batch_masks_does_not_wait_for_a_later_closed_block() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        Behind(lambda v, x: v.masked_fill(x.abs() < 1e9, 0.0)), Scaled(value=0.0), nn.Linear(WIDTH, 2)
    )
    verdict = judged(model).gates["0.down.weight"]
    assert (verdict.status, verdict.waits_for) == ("asleep", None)


def test_two_zeros_that_wait_for_each_other_are_dead() -> None:
    torch.manual_seed(0)
    report = judged(
        nn.Sequential(*(Behind(lambda v, x: v.sin() * (1 - v.cos())) for _ in range(2)), nn.Linear(WIDTH, 2))
    )
    assert {g.status for n, g in report.gates.items() if n != "2.weight"} == {"dead"}


@pytest.mark.parametrize(
    ("function", "value"), [(lambda a: a.clamp(0, 1), -0.2), (torch.relu, -0.5), (F.hardsigmoid, -4.0)]
)
def test_a_saturated_factor_is_neither_zero_nor_learns(function: Callable[[Tensor], Tensor], value: float) -> None:
    class Saturated(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return x + function(self.scale) * self.f(x)

    torch.manual_seed(0)
    gates = judged(nn.Sequential(Saturated(value=value), nn.Linear(WIDTH, 2))).gates
    assert gates
    assert {g.status for g in gates.values()} == {"dead"}
    assert not any("zero too" in g.cause or "learns" in g.cause for g in gates.values())


def test_a_factor_that_the_forward_counts_up_is_asleep() -> None:
    class Ramp(Scaled):
        def __init__(self) -> None:
            super().__init__(value=0.0)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            factor = (self.steps / 4).clamp(max=1.0)
            self.steps.add_(1.0)
            return x + factor * self.scale * self.f(x)

    report = judged(nn.Sequential(Ramp(), nn.Linear(WIDTH, 2)))
    assert (report.gates["0.scale"].status, report.ok) == ("asleep", True)
    assert "buffer" in report.gates["0.scale"].cause


class Fixed(Scaled):
    """The branch is multiplied by a buffer of zeros, which the forward may replace."""

    def __init__(self, value: float = 0.0, *, counts: bool = False, gated: bool = True) -> None:
        super().__init__(value=value)
        self.register_buffer("factor", torch.zeros(()))
        self.counts, self.gated = counts, gated
        if not gated:
            del self.scale

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factor
        if self.counts:
            self.factor = self.factor + 0.1
        return x + factor * (self.scale * self.f(x) if self.gated else self.f(x))  # shut here


@pytest.mark.parametrize("gated", [True, False])
def test_a_branch_behind_a_buffer_of_zeros_is_dead_and_the_buffer_named(gated: bool) -> None:
    torch.manual_seed(0)
    report = judged(nn.Sequential(Fixed(gated=gated), Scaled(value=0.0), nn.Linear(WIDTH, 2)))
    alarm = report.alarms[0]
    assert {a.branch for a in report.alarms} == {"0"}
    assert "0.factor is a buffer of zeros" in alarm.cause
    lines = Path(__file__).read_text().splitlines()
    assert "# shut here" in lines[int(alarm.source.rpartition(":")[2]) - 1]


@pytest.mark.parametrize("gated", [True, False])
def test_a_buffer_that_the_forward_replaces_is_a_counter(gated: bool) -> None:
    torch.manual_seed(0)
    report = judged(nn.Sequential(Fixed(counts=True, gated=gated), Scaled(value=0.0), nn.Linear(WIDTH, 2)))
    assert report.ok, str(report)


def test_an_open_branch_and_a_frozen_one_say_nothing_of_a_buffer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Fixed(gated=False), Fixed(gated=False), Scaled(value=0.0), nn.Linear(WIDTH, 2))
    model[0].factor.fill_(1.0)
    model[1].requires_grad_(False)
    assert judged(model).ok


def test_a_frozen_norm_of_zeros_is_named_with_and_without_a_scalar_behind_it() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.norm = nn.Linear(WIDTH, WIDTH), Frozen()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.f(x).relu())

    torch.manual_seed(0)
    for scheme in ("observe", "insert"):
        alarms = judged(nn.Sequential(Block(), nn.Linear(WIDTH, 2)), scheme=scheme).alarms
        assert {a.branch for a in alarms} == {"0"}
        assert all("0.norm.weight is a buffer of zeros" in a.cause for a in alarms)


def test_a_branch_without_a_gate_is_dead_behind_a_frozen_norm_of_zeros() -> None:
    class Frozen(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.register_buffer("weight", torch.full((WIDTH,), value))
            self.register_buffer("bias", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight + self.bias

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.first, self.two, self.second = nn.Linear(8, 8), Frozen(1.0), nn.Linear(8, 8), Frozen(0.0)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x + self.second(self.two(torch.relu(self.first(self.one(x))))))

    torch.manual_seed(0)
    assert WIDTH == 8
    alarms = judged(nn.Sequential(Block(), Block(), nn.Linear(8, 2))).alarms
    assert {a.branch for a in alarms} == {"0", "1"}
    assert all(".second.weight is a buffer of zeros" in a.cause for a in alarms)


@pytest.mark.parametrize(("function", "status"), [(torch.abs, "dead"), (lambda v: v, "alive")])
def test_a_zero_that_only_the_values_show_is_judged_too(function: Callable[[Tensor], Tensor], status: str) -> None:
    """The smaller one of zero and a size is zero, which no rule on zeros knows."""

    class Bounded(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.minimum(function(self.scale * self.f(x)), x.abs())

    torch.manual_seed(0)
    report = judged(nn.Sequential(Bounded(value=0.0), Scaled(value=0.0), nn.Linear(WIDTH, 2)))
    assert {n: g.status for n, g in report.gates.items()} == {"0.scale": status, "1.scale": "alive"}


def test_terms_that_cancel_in_one_batch_are_asleep() -> None:
    """Two towers with shared weights, on equal inputs."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.block = nn.Linear(WIDTH, WIDTH), Scaled(value=0.0)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.block(self.up(x)) - self.block(self.up(y))

    torch.manual_seed(0)
    model, other = Towers(), torch.randn(X.shape)
    plan = make_plan(model, (X, other), scheme="observe")
    found = []
    for pair in ((X, X.clone()), (X, other)):
        model.zero_grad()
        with observe(model, plan, pair) as seen:
            (model(*pair) - 1.0).square().mean().backward()
        found.append(seen.gradients.gates["block.scale"].status)
    assert found == ["asleep", "alive"]


@pytest.mark.parametrize("given", [True, False])
def test_the_batch_need_not_be_given(given: bool) -> None:
    torch.manual_seed(0)

    def bound(v: Tensor, x: Tensor) -> Tensor:
        norm = v.norm(dim=-1, keepdim=True)
        return torch.where(norm > 0, v * (2.0 / norm.clamp(min=2.0)), torch.zeros_like(v))

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Behind(bound), nn.Linear(WIDTH, 2))
    plan = make_plan(model, X, scheme="observe")
    with observe(model, plan, *((X,) if given else ())) as seen:
        square(model(X)).backward()
    assert seen.gradients.gates["1.down.weight"].status == "dead"


def test_nan_of_the_forward_is_blamed_on_what_made_it() -> None:
    class Quotient(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            quotient = self.scale / self.scale  # made here
            return x + quotient * self.f(x)

    verdict = judged(nn.Sequential(Quotient(value=0.0), nn.Linear(WIDTH, 2))).alarms[0]
    assert "the forward itself is NaN: `div`" in verdict.cause
    lines = Path(__file__).read_text().splitlines()
    assert "# made here" in lines[int(verdict.source.rpartition(":")[2]) - 1]


def test_half_precision_that_rounds_errors_to_zero_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Behind(lambda v, x: v), Scaled(value=0.0)).half()
    gates = judged(model, X.half(), lambda y: (y.float() - 1.0).square().sum() * 1e-10).gates
    assert "half precision" in gates["0.down.weight"].cause


@pytest.mark.parametrize("function", [F.softshrink, torch.round, torch.relu])
def test_a_summand_is_not_named_as_a_factor(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    verdict = judged(nn.Sequential(Behind(lambda v, x: function(v)), nn.Linear(WIDTH, 2))).gates["0.down.weight"]
    assert verdict.status == "dead"
    assert "bias" not in verdict.cause


def test_a_frozen_zero_layer_beside_a_low_rank_update_is_no_alarm() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.base = nn.Linear(WIDTH, 16), zeroed(nn.Linear(16, WIDTH)).requires_grad_(False)
            self.a, self.b = nn.Linear(16, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.up(x))
            return x + (self.base(h) + self.b(self.a(h)))

    torch.manual_seed(0)
    report = judged(nn.Sequential(Adapted(), nn.Linear(WIDTH, 2)))
    assert report.ok, str(report)
    assert "0.b.weight opens its branch" in report.gates["0.base.weight"].cause


def test_a_slope_of_a_million_explodes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Behind(lambda v, x: v / (v * v + 1e-12).sqrt()), nn.Linear(WIDTH, 2))
    assert judged(model).gates["0.down.weight"].status == "exploding"


def test_a_gate_beside_gates_whose_error_is_small_still_does_not_explode() -> None:
    """What lies behind the others has just woken: their gradient is small because their error is."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain = nn.Sequential(*(Behind(lambda v, x: v) for _ in range(3)), nn.Linear(WIDTH, 2))
            self.other = Behind(lambda v, x: v)
            with torch.no_grad():
                self.chain[3].weight *= 1e-9

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.chain(x), self.other(x)], dim=-1)

    torch.manual_seed(0)
    gates = judged(Both()).gates
    assert gates["other.down.weight"].size > 1e6 * gates["chain.0.down.weight"].size > 0
    assert not any(g.status == "exploding" for g in gates.values())
