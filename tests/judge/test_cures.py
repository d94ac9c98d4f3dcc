"""For every kind of verdict what the message says next, done to the letter: the network trains and is judged alive."""

from collections.abc import Callable

import pytest
import torch
from networks import WIDTH, Scaled
from test_trial import Finding, Loop, X
from torch import Tensor, nn

from lit_resinit import ResidualInit, ScalarGate, make_plan, observe

Function = Callable[[Tensor], Tensor]


class Branch(nn.Module):
    """``x + function(down(tanh(up(x))))``, with a zero layer; or, cured, with a ``ScalarGate`` behind the function."""

    def __init__(self, function: Function, *, gate: bool = False, scale: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), function
        self.gate = ScalarGate() if gate else nn.Identity()
        self.scale = nn.Parameter(torch.zeros(1)) if scale else 1.0
        self.register_buffer("factor", torch.ones(WIDTH))
        if not gate:
            nn.init.zeros_(self.down.weight)
            nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        v = self.scale * self.down(torch.tanh(self.up(x)))
        return x + self.gate(self.factor * self.function(v))


class _Forgets(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        return v.clone()

    @staticmethod
    def backward(ctx, error):
        return torch.zeros(error.shape)


class _Remembers(_Forgets):
    @staticmethod
    def backward(ctx, error):
        return error


def norm(v: Tensor) -> Tensor:
    return v.norm(dim=-1, keepdim=True)


def loop(*blocks: nn.Module, prepare: Callable[[nn.Sequential], object] | None = None) -> Loop:
    torch.manual_seed(0)
    net = nn.Sequential(*blocks, nn.Linear(WIDTH, 2))
    if prepare is not None:
        prepare(net)
    return Loop(net, scheme="observe", patience=2)


def said(training: Loop, x: Tensor = X) -> list[Finding]:
    return [finding for _ in range(6) for finding in training.step(x)]


def hooked(hook: Callable[[Tensor], Tensor] | None) -> Callable[[nn.Sequential], object]:
    return lambda net: net[0].down.weight.register_hook(hook) if hook is not None else None


def two_zeros(net: nn.Sequential) -> None:
    nn.init.zeros_(net[0].down.weight)


def frozen(net: nn.Sequential) -> None:
    nn.init.zeros_(net[-1].weight).requires_grad_(False)


def fixed(net: nn.Sequential) -> None:
    net[0].factor.zero_()


class Shut(Scaled):
    """A scale before a ReLU, or behind it."""

    def __init__(self, *, behind: bool) -> None:
        super().__init__(value=0.0)
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        v = self.f(x)
        return x + (self.scale * torch.relu(v) if self.behind else torch.relu(self.scale * v))


SCALAR = "self.gate = lit_resinit.ScalarGate()"
CURES: dict[str, tuple[Callable[[], Loop], str, Callable[[], Loop]]] = {
    "ReLU": (lambda: loop(Branch(torch.relu)), SCALAR, lambda: loop(Branch(torch.relu, gate=True))),
    "a scale before a ReLU": (
        lambda: loop(Shut(behind=False)),
        "multiply by 0.scale behind that operation",
        lambda: loop(Shut(behind=True)),
    ),
    "square": (lambda: loop(Branch(torch.square)), SCALAR, lambda: loop(Branch(torch.square, gate=True))),
    "clamp": (
        lambda: loop(Branch(lambda v: v.clamp(0, 1))),
        SCALAR,
        lambda: loop(Branch(lambda v: v.clamp(0, 1), gate=True)),
    ),
    "root": (
        lambda: loop(Branch(lambda v: v.square().sum(-1, keepdim=True).sqrt() * v)),
        SCALAR,
        lambda: loop(Branch(lambda v: v.square().sum(-1, keepdim=True).sqrt() * v, gate=True)),
    ),
    "guarded quotient": (
        lambda: loop(Branch(lambda v: torch.where(norm(v) > 0, v / norm(v), 0.0))),
        "`v / torch.where(norm > 0, norm, 1.0)`, with no other `where` around it",
        lambda: loop(Branch(lambda v: v / torch.where(norm(v) > 0, norm(v), 1.0))),
    ),
    "guarded quotient, with a gate behind it": (
        lambda: loop(Branch(lambda v: torch.where(norm(v) > 0, v / norm(v), 0.0))),
        SCALAR,
        lambda: loop(Branch(lambda v: torch.where(norm(v) > 0, v / norm(v), 0.0), gate=True)),
    ),
    "two zeros in a row": (
        lambda: loop(Branch(torch.tanh, scale=True)),
        "initialise 0.",
        lambda: loop(Branch(torch.tanh, scale=True), prepare=lambda net: nn.init.normal_(net[0].down.weight)),
    ),
    "a frozen head": (
        lambda: loop(Branch(torch.tanh), prepare=frozen),
        "unfreeze 1.weight",
        lambda: loop(Branch(torch.tanh), prepare=lambda net: (frozen(net), net[-1].weight.requires_grad_(True))),
    ),
    "a buffer of zeros": (
        lambda: loop(Branch(torch.tanh), prepare=fixed),
        "give 0.factor other values than zero",
        lambda: loop(Branch(torch.tanh)),
    ),
    "a hook": (
        lambda: loop(Branch(torch.tanh), prepare=hooked(lambda g: g * 0.0)),
        "remove it",
        lambda: loop(Branch(torch.tanh), prepare=hooked(None)),
    ),
    "a hook on it": (
        lambda: loop(Branch(torch.tanh), prepare=hooked(lambda g: g * float("inf"))),
        "let that hook pass the gradient on as it is",
        lambda: loop(Branch(torch.tanh), prepare=hooked(lambda g: g)),
    ),
    "a backward of one's own": (
        lambda: loop(Branch(_Forgets.apply)),
        "return the true gradient there",
        lambda: loop(Branch(_Remembers.apply)),
    ),
    "detached": (
        lambda: loop(Branch(lambda v: v.detach() * 2)),
        "let the gate take part in the loss",
        lambda: loop(Branch(lambda v: v * 2)),
    ),
    "behind the block": (
        lambda: loop(Branch(torch.tanh), nn.Hardtanh(50.0, 51.0)),
        "let that operation pass an error on",
        lambda: loop(Branch(torch.tanh), nn.Hardtanh(-51.0, 51.0)),
    ),
}


@pytest.mark.parametrize("name", CURES)
def test_the_remedy_cures(name: str) -> None:
    broken, words, cured = CURES[name]
    findings = said(broken())
    errors = [f.message for f in findings if f.level == "error"]
    assert len(errors) == 1, errors
    assert words in errors[0], errors[0]
    training = cured()
    before = {n: p.detach().clone() for n, p in training.net.named_parameters()}
    assert [f.message for f in said(training) if f.level == "error"] == []
    assert {g.status for g in training.trial.gradients.gates.values()} == {"alive"}
    moved = {n for n, p in training.net.named_parameters() if not torch.equal(p, before[n])}
    assert {n for n in training.trial.gradients.gates if training.trial.gradients.gates[n].role == "gate"} <= moved


def test_what_no_optimizer_moves_is_cured_by_moving_it() -> None:
    class Head(nn.Sequential):
        pass

    for moves in (False, True):
        training = loop(Branch(torch.tanh), prepare=lambda net: nn.init.zeros_(net[-1].weight))
        if not moves:
            training.optimizer = torch.optim.SGD(training.net[0].parameters(), lr=0.1)
        errors = [f.message for f in said(training) if f.level == "error"]
        assert len(errors) == (not moves)
        assert moves or "see that an optimizer moves 1.weight" in errors[0]


def test_one_error_and_one_edit_for_a_relu_behind_a_zero_layer() -> None:
    """What the error says is the edit that the plan would ask for two errors later."""
    (error,) = [f.message for f in said(loop(Branch(torch.relu))) if f.level == "error"]
    assert "start 0.down.weight as any other layer" in error
    net = nn.Sequential(Branch(torch.relu, gate=True), nn.Linear(WIDTH, 2))
    plan = make_plan(net, X)
    assert [b.action for b in plan.branches] == ["already_closed"]


def test_a_trained_network_that_is_observed_is_not_told_to_close_its_branches() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True) for _ in range(2)))
    x = torch.randn(2, 3, 8)
    for trained in (False, True):
        if trained:
            with torch.no_grad():
                for name, parameter in net.named_parameters():
                    if "norm" in name:
                        parameter += 0.1 * torch.randn(parameter.shape)
        plan = make_plan(net, x, scheme="observe")
        with observe(net, plan, x) as seen:
            net(x).square().mean().backward()
        text = str(seen.identity)
        assert ("scheme='" in text) is not trained, text
        assert ("leave it open and pass identity='ignore'" in text) is trained
        assert ("looks trained (" in text) is trained
    assert ResidualInit(scheme="observe", identity="ignore").identity == "ignore"


def test_scaled_is_told_how_to_close_it_where_nothing_is_trained() -> None:
    text = said(Loop(nn.Sequential(Scaled(), nn.Linear(WIDTH, 2)), scheme="observe"))[0].message
    assert "set it to its closing value" in text
    assert "trained" not in text
