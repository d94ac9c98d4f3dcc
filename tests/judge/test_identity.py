import copy
import weakref
from collections import OrderedDict

import pytest
import torch
from networks import WIDTH, ConvBlock, InPlace, NormLast, Plain, PostNorm, PreNorm, Scaled, mlp, stack
from torch import Tensor, nn

from lit_resinit import IdentityError, apply_, check_identity, make_plan
from lit_resinit.graph.record import Recorder
from lit_resinit.judge.identity_report import BranchIdentity, IdentityReport

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def judged(model: nn.Module, x: Tensor = X) -> IdentityReport:
    """The model as it is."""
    return check_identity(model, make_plan(model, x, scheme="observe"), x)


def only_open(report: IdentityReport) -> BranchIdentity:
    (row,) = [b for b in report.branches if b.status == "open"]
    return row


def zeros(build: type = Scaled, depth: int = 3, **options: float) -> nn.Sequential:
    torch.manual_seed(0)
    return stack(lambda: build(value=0.0, **options), depth)


# -------------------------------------------------------------------- verdicts


def test_closed_network_is_ok_and_exact() -> None:
    report = judged(zeros())
    report.raise_if_open()
    assert report.ok
    assert [b.deviation for b in report.branches] == [0.0] * 3
    (stack_,) = report.stacks
    assert (stack_.first, stack_.last, stack_.exact, stack_.deviation, stack_.growth) == ("0", "2", True, 0.0, 1.0)


def test_unzeroed_scale_is_the_culprit() -> None:
    model = zeros()
    nn.init.constant_(model[1].scale, 1e-6)
    row = only_open(judged(model))
    assert (row.name, row.cause, row.culprit) == ("1", "unzeroed scale", "1.scale")
    expected = (model[1](X) - X).abs().max()
    assert row.deviation == pytest.approx(float(expected.detach()), rel=1e-3)


def test_bias_after_the_scale_is_the_culprit() -> None:
    model = stack(NormLast)
    for block in (model[0], model[1]):
        nn.init.zeros_(block.norm.weight)
    nn.init.constant_(model[0].norm.bias, 0.25)
    row = only_open(judged(model))
    assert (row.name, row.cause, row.culprit) == ("0", "bias after scale", "0.norm.bias")
    assert row.deviation == pytest.approx(0.25)


def test_branch_without_a_gate_is_ungated() -> None:
    class Free(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.cos(self.f(x))

    row = only_open(judged(nn.Sequential(Scaled(value=0.0), Free())))
    assert (row.name, row.cause) == ("1", "ungated branch")
    assert row.culprit.startswith("1")


def test_nothing_times_infinity_names_the_first_bad_operation() -> None:
    class Overflows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(1000.0 * x.abs() + 1000.0)

    class Infinite(Scaled):
        def __init__(self) -> None:
            super().__init__(value=0.0)
            self.inner = Overflows()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.scale * self.inner(self.f(x))

    report = judged(nn.Sequential(Scaled(value=0.0), Infinite(), Scaled(value=0.0)))
    first = next(b for b in report.branches if b.status == "open")
    assert (first.name, first.cause, first.culprit) == ("1", "nonfinite branch", "1.inner")
    assert report.branches[0].status == "closed"


def test_scaled_skip_is_a_changed_stream() -> None:
    class Leaky(Scaled):
        def __init__(self) -> None:
            super().__init__(value=0.0)
            self.keep = nn.Parameter(torch.full((1,), 0.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.keep * x + self.scale * self.f(x)

    row = only_open(judged(nn.Sequential(Leaky(), Scaled(value=0.0))))
    assert (row.name, row.cause, row.culprit) == ("0", "stream changed", "0.keep")


def test_in_place_sum_does_not_hide_an_open_branch() -> None:
    report = judged(stack(InPlace))
    assert [b.status for b in report.branches] == ["open", "open"]
    assert all(b.deviation > 0 for b in report.branches)


def test_there_is_no_tolerance() -> None:
    model = zeros(depth=1)
    nn.init.constant_(model[0].scale, 1e-30)
    with torch.no_grad():
        x = torch.zeros(4, WIDTH)
    assert not judged(model, x).ok


def test_half_precision_rounding_is_closed_with_a_note() -> None:
    model = zeros(depth=1).to(torch.bfloat16)
    nn.init.constant_(model[0].scale, 1e-10)
    report = judged(model, X.bfloat16() + 10.0)
    assert report.ok
    assert "0.scale" in report.branches[0].note


def test_branch_that_is_not_run_is_judged_by_its_parameters() -> None:
    class Skips(Scaled):
        run = True

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.run else x

    model = nn.Sequential(Skips(value=0.0), Skips(value=0.0))
    plan = make_plan(model, X, scheme="observe")
    model[0].run = model[1].run = False
    nn.init.ones_(model[1].scale)
    first, second = check_identity(model, plan, X).branches
    assert (first.status, second.status, second.culprit) == ("closed", "open", "1.scale")
    nn.init.zeros_(model[1].scale)
    assert "2 of them did not run" in str(check_identity(model, plan, X))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
def test_wide_and_complex_streams_are_compared_in_their_own_precision(dtype: torch.dtype) -> None:
    model = nn.Sequential(*zeros(depth=2)[:2])
    for block in model:
        block.f = nn.Linear(WIDTH, WIDTH, dtype=dtype)  # complex numbers have no GELU
        block.scale = nn.Parameter(torch.zeros((), dtype=dtype))
    x = X.to(dtype)
    plan = make_plan(model, x, scheme="observe")
    assert check_identity(model, plan, x).ok
    nn.init.constant_(model[0].scale, 1e-12 if dtype in (torch.float64, torch.complex128) else 1e-4)
    first, second = check_identity(model, plan, x).branches
    assert (first.status, first.cause, second.status) == ("open", "unzeroed scale", "closed")
    assert first.deviation > 0


def test_growth_of_a_float64_stream_may_pass_the_range_of_float32() -> None:
    model = zeros(depth=2).double()
    (stream,) = judged(model, X.double() * 1e30).stacks
    assert stream.growth == 1.0


# -------------------------------------------------------------------- stacks


def test_what_the_stream_passes_between_blocks_is_told_not_blamed() -> None:
    model, x = nn.Sequential(ConvBlock(3, 3), ConvBlock(3, 3)), torch.randn(2, 3, 5, 5)
    plan = make_plan(model, x)
    report = check_identity(apply_(model, plan), plan, x)
    assert report.ok
    (stack_,) = report.stacks
    assert not stack_.exact
    assert (stack_.changed_by, stack_.rescaled_by) == (("relu",), ())


def test_norm_after_the_sum_is_told_by_its_name() -> None:
    model = stack(PostNorm)
    plan = make_plan(model, X, scheme="last_layer")
    report = check_identity(apply_(model, plan), plan, X)
    assert report.ok
    assert set(report.stacks[0].changed_by) == {"0.norm", "1.norm"}
    assert set(report.stacks[0].rescaled_by) == {"0.norm", "1.norm"}


def test_an_activation_after_the_sum_does_not_rescale() -> None:
    class After(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    (stack_,) = judged(stack(After)).stacks
    assert stack_.deviation > 0
    assert (stack_.changed_by, stack_.rescaled_by) == (("tanh",), ())


def test_two_streams_are_two_stacks() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = stack(Scaled), stack(Scaled)

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) * self.right(x.flip(0))

    stacks = judged(Towers()).stacks
    assert [(s.first, s.last) for s in stacks] == [("left.0", "left.1"), ("right.0", "right.1")]


def test_constant_scheme_is_judged_by_the_growth() -> None:
    class Grows(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.f, self.factor = nn.Linear(WIDTH, WIDTH, bias=False), factor
            nn.init.eye_(self.f.weight)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.f(self.factor * x)

    for factor, fine in ((1.0 / 4.0, True), (4.0, False)):
        model = nn.Sequential(*(Grows(factor) for _ in range(4)))
        plan = make_plan(model, X, scheme="downscale")
        report = check_identity(apply_(model, plan), plan, X)
        growth = (1 + factor / 2) ** 8
        assert report.stacks[0].growth == pytest.approx(growth, rel=1e-3)
        assert report.ok is fine


# -------------------------------------------------------------------- words


def test_equal_findings_are_one_line() -> None:
    text = str(judged(stack(Scaled, 12)))
    assert text.count("\n- ") == 1
    assert "12 of 12" in text


def test_raise_if_open_names_block_cause_culprit_and_line() -> None:
    model = zeros()
    nn.init.ones_(model[2].scale)
    report = judged(model)
    with pytest.raises(IdentityError, match="RI201") as caught:
        report.raise_if_open()
    assert caught.value.report is report
    for text in ("2:", "unzeroed scale", "2.scale", "networks.py:", "1 of 3"):
        assert text in str(caught.value)


# -------------------------------------------------------------------- no trace


@pytest.mark.parametrize("training", [True, False])
def test_checking_leaves_no_trace(training: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), Scaled(value=0.0), nn.Dropout(0.5), mlp()).train(training)
    plan = make_plan(model, X, scheme="observe")
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert check_identity(model, plan, X).ok
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert {m.training for m in model.modules()} == {training}
    assert all(p.grad is None for p in model.parameters())
    assert not torch.nn.modules.module._global_forward_hooks


def test_compiled_model_is_checked_uncompiled() -> None:
    torch._dynamo.reset()
    model = torch.compile(stack(Plain), backend="eager")
    plan = make_plan(stack(Plain), X, scheme="last_layer")
    apply_(model, plan)
    assert check_identity(model, plan, X).ok


# -------------------------------------------------------------------- cost


def test_nothing_is_recorded_where_every_branch_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(PreNorm(), PreNorm())
    plan = make_plan(model, X)
    apply_(model, plan)
    recorded = []
    monkeypatch.setattr(Recorder, "begin", lambda *call: recorded.append(call))
    assert check_identity(model, plan, X).ok
    assert recorded == []


def test_checking_lets_go_of_every_activation() -> None:
    model = nn.Sequential(Scaled(value=0.0), Scaled(value=0.0))
    plan = make_plan(model, X)
    kept: list[weakref.ref] = []
    handle = model[0].register_forward_hook(lambda m, a, out: kept.append(weakref.ref(out)))
    check_identity(model, plan, X)
    handle.remove()
    assert kept
    assert all(ref() is None for ref in kept)


class Mixed(nn.Module):
    """``x * (1 - g) + g * f(x)``: the identity at g = 0, where the skip's factor is one and its parameter is not."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = mlp(), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 - self.g) + self.g * self.f(x)


@pytest.mark.parametrize("below", ["", "net."])
def test_the_factor_of_a_skip_is_judged_by_its_value(below: str) -> None:
    inner, x = nn.Sequential(Mixed(), Mixed()), torch.randn(4, WIDTH)
    model = nn.Sequential(OrderedDict(net=inner)) if below else inner
    plan = make_plan(inner, x, scheme="observe").below(below[:-1])
    assert check_identity(model, plan, x).ok
    inner[1].g.data.fill_(0.5)
    row = check_identity(model, plan, x).branches[1]
    assert (row.status, row.cause, row.culprit) == ("open", "stream changed", f"{below}1.g")
