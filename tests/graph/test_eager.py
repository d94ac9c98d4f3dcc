"""The stance of the compiler and signals are as they were, whatever happens."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from networks import WIDTH, Plain, stack
from torch import Tensor, nn

from lit_resinit import ResInitWarning, make_plan, observe
from lit_resinit.graph import tensors
from lit_resinit.graph.eager import eager, signals_held
from lit_resinit.judge.observe import Observation
from lit_resinit.judge.probe import GradientProbe

X = torch.randn(4, WIDTH)


def stance() -> str:
    return str(torch._dynamo.eval_frame._stance.stance)


def test_the_last_one_out_sets_what_the_first_one_found() -> None:
    first, second = eager(), eager()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert stance() == "force_eager"
    second.__exit__(None, None, None)
    assert stance() == "default"


def test_a_stance_of_the_users_is_kept() -> None:
    with torch.compiler.set_stance("eager_on_recompile"):
        with eager(), pytest.raises(KeyError), eager():
            raise KeyError
        assert stance() == "eager_on_recompile"


def test_an_error_while_observing_starts_leaves_the_stance(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack(Plain)
    plan = make_plan(model, X)
    monkeypatch.setattr(GradientProbe, "__enter__", lambda self: 1 / 0)
    with pytest.warns(ResInitWarning, match="ZeroDivisionError"), observe(model, plan, X):
        pass
    assert stance() == "default"


def test_observations_that_overlap_leave_the_stance() -> None:
    model = stack(Plain)
    plan = make_plan(model, X)
    first, second = Observation(model, plan, X), Observation(model, plan, X)
    first.start()
    second.start()
    first.close()
    second.close()
    assert stance() == "default"
    assert torch._C._len_torch_dispatch_stack() == 0


# -------------------------------------------------------------------- signals


@pytest.fixture
def alarms() -> Iterator[list[int]]:
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGALRM, before)


class Interrupted(nn.Module):
    """Is interrupted in its forward, once."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.net, self.number, self.reached = stack(Plain), number, []

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[0](x)
        os.kill(os.getpid(), self.number)
        x = self.net[2](self.net[1](x))
        REACHED.append(type(x).__name__)
        return x


REACHED: list[str] = []


def test_ctrl_c_waits_until_the_fake_trace_is_over() -> None:
    REACHED.clear()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        make_plan(Interrupted(signal.SIGINT), X)
    assert REACHED == ["FakeTensor"]
    assert signal.getsignal(signal.SIGINT) is handler
    assert torch._C._len_torch_dispatch_stack() == 0
    assert stance() == "default"
    assert len(make_plan(stack(Plain), X)) == 2


def test_other_signals_arrive_late_and_in_order(alarms: list[int]) -> None:
    with signals_held():
        os.kill(os.getpid(), signal.SIGALRM)
        os.kill(os.getpid(), signal.SIGALRM)
        assert alarms == []
    assert alarms == [signal.SIGALRM] * 2


def test_who_insists_is_heard() -> None:
    def endless() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("a loop without an end can be left")

    with pytest.raises(KeyboardInterrupt), signals_held():
        endless()


def test_other_threads_have_nothing_to_hold() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(len(make_plan(stack(Plain), X))))
    thread.start()
    thread.join()
    assert found == [2]


def test_a_measurement_that_was_cut_off_does_not_blind_what_follows() -> None:
    cut = tensors.measuring()
    cut.__enter__()
    assert not torch.is_grad_enabled()
    assert len(make_plan(stack(Plain), X)) == 2
    assert torch.is_grad_enabled()
    assert not tensors._measuring.active
