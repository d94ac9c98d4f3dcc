"""Whatever our own measuring raises is said once, and the training is what it is without us."""

import importlib
import warnings
from typing import Any

import pytest
import torch
from networks import WIDTH, Scaled
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from lit_resinit import History, ResInitWarning, Trial, make_plan, observe
from lit_resinit.judge.trial import act
from lit_resinit.plan.values import ResidualPlan
from lit_resinit.watch.watching import Watching

X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))
STAGES = (  # where the fault is put
    "graph.record.Recorder.begin",
    "graph.record.Recorder._finish",
    "graph.record.lower",
    "graph.record.locate",
    "graph.memory.Memory.place",
    "judge.backward.Errors.before",
    "judge.backward.Errors.after",
    "judge.backward.Errors.link",
    "judge.backward.Errors._note_arriving",
    "judge.backward.Errors._note_sent",
    "judge.backward.Errors.run_again",
    "judge.backward.Errors.numbers",
    "judge.backward.Errors.release",
    "judge.hooked.HookedParameters.watch",
    "judge.hooked.HookedParameters.numbers",
    "judge.backward._Window.__init__",
    "judge.backward._Window._note_makers",
    "judge.backward.peak_of",
    "judge.compare.Peaks.after",
    "judge.compare.Comparison.before",
    "judge.compare.Comparison.after",
    "judge.compare.AtAdditions.begin",
    "judge.identity.IdentityProbe.identity",
    "judge.probe.GradientProbe.__init__",
    "judge.probe.GradientProbe.__enter__",
    "judge.probe.Flow.__init__",
    "judge.links.Links.reasons",
    "judge.observe.judge_step",
    "judge.trial.not_moved",
    "judge.waking.Waking.before_backward",
    "judge.waking.Waking.step",
    "judge.waking.Waking.ends",
    "judge.waking.gradient_sizes",
    "watch.measure.Measured.before",
    "watch.measure.Measured.moments",
    "judge.tap.locate",
    "watch.watching.Watcher.__enter__",
    "watch.watching.gate_statistics",
    "watch.watching.record",
)


class Checkpointed(Scaled):
    """A branch whose forward is run again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * checkpoint(self.f, x, use_reentrant=True)


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance  # the only place where torch keeps it


def network() -> nn.Sequential:
    """Asleep for one step behind its zero head; a hook of the user's is on one gate."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Checkpointed(value=0.0), Scaled(value=0.0), nn.Linear(WIDTH, 2))
    nn.init.zeros_(net[3].weight)
    net[2].scale.register_hook(lambda grad: grad * 1.0)
    return net


def train(net: nn.Sequential, plan: ResidualPlan, *, looks_on: bool) -> list[Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trial = Trial(net, plan, patience=2)
    watching = Watching(net, plan, History([b.name for b in plan.branches]))
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        if looks_on:
            trial.before_forward(X, watching.readers() if step == 0 else ())
            if step:
                watching.before_forward()
        loss = mse_loss(net(X), torch.ones(len(X), 2))
        if looks_on:
            watching.after_forward()
            act(trial.after_forward(loss))
        loss.backward()
        if looks_on:
            act(trial.after_backward())
            act(trial.before_step(optimizer))
            watching.before_step(step)
            watching.end()
            trial.end_batch()
        optimizer.step()
        losses.append(loss.detach())
    trial.close()
    return [*losses, *net.state_dict().values(), torch.rand(1)]


def put_fault(monkeypatch: pytest.MonkeyPatch, stage: str) -> list[str]:
    """The stage raises; returns where it notes that it did."""
    room, file, *path = stage.split(".")
    owner = importlib.import_module(f"lit_resinit.{room}.{file}")
    for name in path[:-1]:
        owner = getattr(owner, name)
    met = []

    def fault(*args: Any, **kwargs: Any) -> None:
        met.append(stage)
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(owner, path[-1], fault)
    return met


@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_of_ours_is_said_once_and_changes_nothing(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    plan = make_plan(network(), X, scheme="observe")
    expected = train(network(), plan, looks_on=False)
    met = put_fault(monkeypatch, stage)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ResInitWarning)
        found = train(network(), plan, looks_on=True)
    assert met, "the stage was not reached"
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    texts = [str(w.message) for w in said if issubclass(w.category, ResInitWarning)]
    assert texts
    assert all("ZeroDivisionError: ours" in t and "Please report" in t for t in texts)
    assert len(set(texts)) == len(texts)  # judging and recording stop on their own
    assert torch._C._len_torch_dispatch_stack() == 0
    assert stance() == "default"


def test_without_a_fault_nothing_is_said() -> None:
    plan = make_plan(network(), X, scheme="observe")
    expected = train(network(), plan, looks_on=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResInitWarning)
        found = train(network(), plan, looks_on=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_plain_observation_goes_on_and_its_reports_say_what_stopped_it(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    plan = make_plan(net, X, scheme="observe")
    put_fault(monkeypatch, "judge.compare.Peaks.after")
    with pytest.warns(ResInitWarning, match="Please report"), observe(net, plan, X) as seen:
        net(X).square().mean().backward()
    assert net[3].weight.grad is not None
    for report in ("identity", "gradients"):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            getattr(seen, report)
