"""A trial in loops without Lightning: what each call says, when, and in which phase that leaves the trial."""

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import WIDTH, Plain, PostNorm, Scaled, stack
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from lit_resinit import GradientError, IdentityError, ResInitWarning, Trial, apply_, make_plan
from lit_resinit.judge.trial import SCALER_WAIT, Finding, Phase, act, any_rank

X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))


class Shut(Scaled):
    """A zero scale before a ReLU: dead."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.scale * self.f(x))


class Masked(Scaled):
    """The branch is multiplied by the last feature."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.f(x) * x[..., -1:]


class Loop:
    """A loop of one's own, with its four calls; ``said`` are the findings of each step."""

    def __init__(self, net: nn.Module, scheme: str = "auto", lr: float = 0.1, **options: Any) -> None:
        self.net, self.plan = net, make_plan(net, X, scheme=scheme)
        apply_(net, self.plan)
        self.trial = Trial(net, self.plan, **options)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        self.phases: list[str] = []

    def step(self, x: Tensor = X, skipped: bool | None = None, scaled: bool = False) -> list[Finding]:
        self.optimizer.zero_grad()
        self.trial.before_forward(x)
        self.phases = [self.trial.phase.name]
        loss = mse_loss(self.net(x), torch.ones(len(x), 2))
        said = self.trial.after_forward(loss)
        self.phases.append(self.trial.phase.name)
        loss.backward()
        said += [] if scaled else self.trial.after_backward()
        self.phases.append(self.trial.phase.name)
        said += self.trial.before_step(self.optimizer, skipped)
        self.phases.append(self.trial.phase.name)
        if not skipped:
            self.optimizer.step()
        return said


def zero_head(net: nn.Sequential) -> nn.Sequential:
    nn.init.zeros_(net[-1].weight)
    return net


def test_a_healthy_network_goes_through_the_phases_without_a_word() -> None:
    loop = Loop(stack(Plain))
    assert loop.step() == []
    assert loop.phases == ["FORWARD", "BACKWARD", "JUDGED", "AWAKE"]
    assert loop.trial.identity.ok
    assert loop.trial.gradients.ok
    assert loop.step() == []
    assert loop.phases == ["AWAKE"] * 4


def test_later_steps_have_no_mode() -> None:
    loop = Loop(stack(Plain))
    loop.step()
    loop.trial.before_forward(X)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_sleeper_is_waited_for_and_wakes() -> None:
    loop = Loop(zero_head(stack(Scaled)))
    assert loop.step() == []
    assert loop.phases[-1] == "ASLEEP"
    assert loop.step() == []
    assert loop.phases[-1] == "AWAKE"
    assert loop.trial.woke == {"0.scale": 1, "1.scale": 1}


def test_patience_ends_in_one_finding() -> None:
    x = X.clone()
    x[:, -1] = 0.0
    loop = Loop(nn.Sequential(Masked(value=0.0), nn.Linear(WIDTH, 2)), scheme="observe", patience=2)
    said = [loop.step(x) for _ in range(5)]
    assert [len(s) for s in said] == [0, 0, 1, 0, 0]
    assert said[2][0].about == "gradient"
    assert isinstance(said[2][0].error, GradientError)
    assert "slept through 2 optimizer steps" in said[2][0].message


def line_of(finding: Finding) -> str:
    """The code that a finding blames."""
    source = finding.error.report.alarms[0].source
    path, _, number = source.rpartition(":")
    return Path(path).read_text().splitlines()[int(number) - 1]


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_the_step_at_which_patience_ends_is_observed_and_says_the_line(patience: int) -> None:
    """Behind a zero head nothing is known at first; once it has learned, the ReLU is to blame."""
    loop = Loop(zero_head(stack(lambda: Shut(value=0.0), 1)), scheme="observe", patience=patience)
    said = [loop.step() for _ in range(patience + 2)]
    assert [len(s) for s in said] == [0] * patience + [1, 0]
    assert "torch.relu" in line_of(said[patience][0])
    assert "`relu` has slope zero" in said[patience][0].message
    assert "1.weight is zero" not in said[patience][0].message


def test_what_nobody_moves_is_said_with_the_step_of_the_end() -> None:
    loop = Loop(zero_head(stack(lambda: Scaled(value=0.0), 1)), scheme="observe", patience=2)
    loop.optimizer = torch.optim.SGD([loop.net[1].bias], lr=0.1)
    (finding,) = [finding for _ in range(4) for finding in loop.step()]
    assert "at the last one no error arrives while 1.weight is zero" in finding.message
    assert "see that an optimizer moves 1.weight" in finding.message


def test_observing_the_end_changes_nothing_and_leaves_nothing() -> None:
    loops = [Loop(zero_head(stack(lambda: Shut(value=0.0), 1)), scheme="observe", patience=p) for p in (2, 9)]
    loops[1].net.load_state_dict(loops[0].net.state_dict())
    for _ in range(4):
        for loop in loops:
            loop.step()
    assert all(torch.equal(a, b) for a, b in zip(*(loop.net.parameters() for loop in loops), strict=True))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not loops[0].trial.observes


def test_a_scaler_that_skips_the_last_step_puts_the_end_off() -> None:
    loop = Loop(zero_head(stack(lambda: Shut(value=0.0), 1)), scheme="observe", patience=1)
    said = [loop.step(skipped=skip, scaled=True) for skip in (False, True, True, False, False)]
    assert [len(s) for s in said] == [0, 0, 0, 1, 0]


def test_a_gate_of_the_second_optimizer_gets_its_line() -> None:
    torch.manual_seed(0)
    net = nn.ModuleList([stack(Scaled, 1), stack(lambda: Shut(value=0.0), 1)])
    net.forward = lambda x: net[0](x) + net[1](x)
    plan = make_plan(net, X, scheme="observe")
    trial = Trial(net, plan, patience=2, fresh=False)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in net]
    held = [{n for n, _ in net.named_parameters() if n.startswith(str(i))} for i in range(2)]
    said: list[Finding] = []
    for _ in range(4):
        trial.before_forward(X)
        for part, optimizer, names in zip(net, optimizers, held, strict=True):
            net.zero_grad()
            loss = mse_loss(part(X), torch.ones(len(X), 2))
            said += trial.after_forward(loss, more=True)
            loss.backward()
            said += trial.before_step(optimizer, held=names)
            optimizer.step()
        trial.end_batch()
    (finding,) = said
    assert "torch.relu" in line_of(finding)


def test_steps_at_a_rate_of_zero_use_no_patience() -> None:
    x = X.clone()
    x[:, -1] = 0.0
    net = nn.Sequential(Masked(value=0.0), nn.Linear(WIDTH, 2))
    loop = Loop(net, scheme="observe", patience=1, lr=0.0)
    assert [loop.step(x) for _ in range(4)] == [[]] * 4
    assert loop.phases[-1] == "ASLEEP"


def test_an_open_branch_is_said_once_before_the_backward() -> None:
    loop = Loop(stack(Scaled), scheme="observe")
    (finding,) = loop.step()
    assert (finding.about, finding.level) == ("identity", "error")
    assert isinstance(finding.error, IdentityError)
    assert finding.error.report is loop.trial.identity
    assert loop.step() == []


def test_a_dead_gate_is_said_after_the_backward() -> None:
    loop = Loop(stack(lambda: Shut(value=0.0)), scheme="observe")
    (finding,) = loop.step()
    assert isinstance(finding.error, GradientError)
    assert {g.parameter for g in loop.trial.gradients.alarms} == {"0.scale", "1.scale"}


def test_what_stands_on_the_stream_is_advice() -> None:
    (finding,) = Loop(stack(PostNorm)).step()
    assert (finding.about, finding.level, finding.error) == ("advice", "warning", None)
    with pytest.warns(ResInitWarning, match="the stream from"):
        act([finding])


def test_an_error_is_raised_before_later_advice_is_told() -> None:
    findings = [Finding("gradient", "bad", GradientError("bad")), Finding("advice", "also")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(GradientError, match="bad"):
            act(findings)


def test_a_scaler_is_waited_for_but_not_for_ever() -> None:
    loop = Loop(stack(Plain))
    for _ in range(SCALER_WAIT):
        assert loop.step(skipped=True, scaled=True) == []
        assert loop.phases == ["FORWARD", "BACKWARD", "BACKWARD", "DUE"]
    loop.step(skipped=True, scaled=True)
    assert loop.trial.gradients is not None


def test_a_scaler_that_accepts_a_step_is_judged_at_it() -> None:
    loop = Loop(stack(Plain))
    loop.step(skipped=True, scaled=True)
    assert loop.trial.gradients is None
    loop.step(skipped=False, scaled=True)
    assert loop.trial.gradients.ok
    assert loop.phases[-1] == "AWAKE"


def test_gates_of_another_optimizer_are_waited_for() -> None:
    loop = Loop(stack(Scaled))
    for scale in (loop.net[0].scale, loop.net[1].scale):
        scale.grad = None
    loop.trial.before_forward(X)
    loss = mse_loss(loop.net[-1](loop.net[:-1](X).detach()), torch.ones(len(X), 2))
    loop.trial.after_forward(loss, more=True)
    loss.backward()
    head = {"2.weight", "2.bias"}
    assert loop.trial.before_step(loop.optimizer, held=head) == []
    assert {g.status for g in loop.trial.gradients.gates.values()} == {"asleep"}
    assert loop.step() == []
    assert {g.status for g in loop.trial.gradients.gates.values()} == {"alive"}


def test_a_batch_without_a_loss_is_tried_again() -> None:
    loop = Loop(stack(Plain))
    loop.trial.before_forward(X)
    loop.net(X)
    loop.trial.end_batch()
    assert loop.trial.phase is Phase.DUE
    assert loop.step() == []
    assert loop.trial.identity.ok


def test_accumulated_batches_keep_what_was_observed() -> None:
    loop = Loop(stack(Plain))
    loop.trial.before_forward(X)
    loss = mse_loss(loop.net(X), torch.ones(len(X), 2))
    loop.trial.after_forward(loss)
    loss.backward()
    loop.trial.end_batch(accumulates=True)
    assert loop.step(scaled=True) == []
    assert loop.phases == ["BACKWARD", "BACKWARD", "BACKWARD", "AWAKE"]
    assert loop.trial.gradients.ok


def test_a_resumed_trial_goes_on_with_the_patience_used() -> None:
    x = X.clone()
    x[:, -1] = 0.0
    net = nn.Sequential(Masked(value=0.0), nn.Linear(WIDTH, 2))
    first = Loop(net, scheme="observe", patience=3)
    assert [first.step(x) for _ in range(2)] == [[], []]
    state = first.trial.state()
    assert state == {"slept": {"0.scale": 1}}
    second = Loop(net, scheme="observe", patience=3, fresh=False)
    second.trial.resume(state)
    assert second.trial.state() == state
    assert [len(second.step(x)) for _ in range(2)] == [0, 1]
    assert second.trial.identity is None


def test_what_stays_frozen_is_said_at_the_end() -> None:
    net = stack(lambda: Scaled(value=0.0))
    net[0].scale.requires_grad_(False)
    loop = Loop(net, scheme="observe", patience=1, unfreezes=True)
    assert [loop.step() for _ in range(3)] == [[]] * 3
    (finding,) = loop.trial.end()
    assert "1 gates are still frozen at the end (0.scale)" in finding.message


def test_what_another_rank_found_is_raised_here_too() -> None:
    loop = Loop(stack(Plain), agree=lambda found: True)
    said = loop.step()
    assert [f.about for f in said] == ["identity", "gradient"]
    assert all("on another rank" in f.message for f in said)


def test_a_single_process_is_a_rank() -> None:
    assert any_rank(True)
    assert not any_rank(False)


def test_the_context_manager_is_a_loop_in_one_line() -> None:
    net = zero_head(stack(Plain))
    plan = make_plan(net, X, scheme="insert")
    optimizer = torch.optim.SGD(apply_(net, plan).parameters(), lr=0.1)
    trial = Trial(net, plan)
    phases = []
    for _ in range(3):
        with trial.step(optimizer, X):
            mse_loss(net(X), torch.ones(len(X), 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
        phases.append(trial.phase)
    assert phases == [Phase.ASLEEP, Phase.AWAKE, Phase.AWAKE]


def test_the_context_manager_raises_and_leaves_nothing_behind() -> None:
    net = stack(Scaled)
    trial = Trial(net, make_plan(net, X, scheme="observe"))
    with pytest.raises(IdentityError), trial.step(torch.optim.SGD(net.parameters(), lr=0.1), X):
        net(X).square().mean().backward()
    assert not trial.observes
    with pytest.raises(KeyError), trial.step(torch.optim.SGD(net.parameters(), lr=0.1), X):
        raise KeyError("mine")
    assert not trial.observes
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_trial_does_not_keep_the_model_alive() -> None:
    loop = Loop(stack(Plain))
    loop.step()
    trial, model = loop.trial, weakref.ref(loop.net)
    trial.close()
    del loop
    gc.collect()
    assert model() is None
    assert trial.gradients.ok
