"""Watching in a loop of one's own: what a record holds, and what stays behind."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from networks import WIDTH, Plain, Scaled, data, stack, trainer
from networks import Classifier as Module
from torch import nn

import lit_resinit
from lit_resinit import History, ResidualInit, Trial, apply_, make_plan, watch
from lit_resinit.report.about import about_run
from lit_resinit.report.page import write_page
from lit_resinit.watch import Moments, Watcher, metrics
from lit_resinit.watch.history import QUANTITIES
from lit_resinit.watch.watching import Watching

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def started(depth: int = 2) -> tuple[nn.Sequential, lit_resinit.ResidualPlan, History]:
    net = stack(lambda: Scaled(value=0.5), depth)
    plan = make_plan(net, X, scheme="observe")
    return net, plan, History([b.name for b in plan.branches])


def test_a_record_is_of_the_step_inside() -> None:
    net, plan, history = started()
    with watch(net, plan, history, step=7):
        net(X).square().mean().backward()
    assert history.steps.tolist() == [7]
    stream, branch = X, (net[0].f(X) * 0.5).detach()
    assert float(history.var_stream[0, 0]) == pytest.approx(float(stream.var(correction=0)), rel=1e-5)
    assert float(history.var_branch[0, 0]) == pytest.approx(float(branch.var(correction=0)), rel=1e-4)
    assert history.gate.tolist() == [[0.5, 0.5]]
    wanted = [float(0.5 * net[i].scale.grad) for i in range(2)]
    assert history.saliency[0].tolist() == pytest.approx(wanted, rel=1e-5)


def test_of_several_forwards_the_first_is_measured() -> None:
    net, plan, history = started(1)
    with watch(net, plan, history, step=0):
        for x in (X, 3.0 * X + 1.0):
            net(x).square().mean().backward()
    assert len(history) == 1
    assert float(history.var_stream[0, 0]) == pytest.approx(float(X.var(correction=0)), rel=1e-5)


def test_several_batches_of_one_step_are_one_record_over_all_their_elements() -> None:
    net, plan, history = started(1)
    watching, other = Watching(net, plan, history), 3.0 * X + 1.0
    for x in (X, other):
        watching.before_forward()
        loss = net(x).square().mean()
        watching.after_forward()
        loss.backward()
    watching.before_step(3)
    assert history.steps.tolist() == [3]
    assert float(history.var_stream[0, 0]) == pytest.approx(float(torch.cat([X, other]).var(correction=0)), rel=1e-5)


def test_no_branch_run_is_no_record() -> None:
    net, plan, history = started()
    with watch(net, plan, history, step=0):
        net[-1](X).sum().backward()
    assert len(history) == 0


def test_an_error_inside_leaves_no_mode_and_no_record() -> None:
    net, plan, history = started()
    with pytest.raises(KeyError), watch(net, plan, history, step=0):
        {}["mine after", net(X)]
    assert len(history) == 0
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_numbers_are_those_of_the_trainer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, ours = Module(stack(Plain)), ResidualInit(log_every_n_steps=1)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    trainer(tmp_path, ours).fit(module, data(WIDTH))

    net = stack(Plain)
    net.load_state_dict({n.removeprefix("net."): v for n, v in before.items()})
    batches = list(data(WIDTH))
    plan = make_plan(net, batches[0][0])
    optimizer = torch.optim.SGD(apply_(net, plan).parameters(), lr=0.01)
    trial, history = Trial(net, plan), History([b.name for b in plan.branches])
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        with trial.step(optimizer, x), watch(net, plan, history, step):
            nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    assert torch.equal(history.steps, ours.history.steps)
    for quantity in QUANTITIES:
        torch.testing.assert_close(getattr(history, quantity), getattr(ours.history, quantity), rtol=1e-4, atol=1e-10)


def test_an_observed_step_is_measured_by_the_mode_that_observes() -> None:
    net, plan, history = started()
    watching, trial = Watching(net, plan, history), Trial(net, plan, fresh=False)
    trial.before_forward(X, watching.readers())
    assert torch._C._len_torch_dispatch_stack() == 1
    loss = net(X).square().mean()
    trial.after_forward(loss)
    loss.backward()
    watching.before_step(0)
    alone = History(history.branches)
    net.zero_grad()
    with watch(net, plan, alone, step=0):
        net(X).square().mean().backward()
    assert all(torch.equal(getattr(history, q), getattr(alone, q)) for q in QUANTITIES)
    trial.close()


def test_history_table_and_page_need_no_lightning(tmp_path: Path) -> None:
    net, plan, history = started()
    for step in range(3):
        with watch(net, plan, history, step):
            net(X).square().mean().backward()
    history.save(tmp_path / "history.npz")
    again = History.load(tmp_path / "history.npz")
    write_page(tmp_path / "run.html", again, about_run(plan))
    assert metrics(again) == metrics(history)
    assert "2 residual branches" in (tmp_path / "run.html").read_text()


ORDERS = [
    "from lit_resinit import watch\nfrom lit_resinit.watch import Moments, Watcher, metrics, History",
    "from lit_resinit.watch import Moments, Watcher, metrics, History\nfrom lit_resinit import watch",
    "import lit_resinit.watch.usefulness, lit_resinit.watch.logs\nfrom lit_resinit import watch\n"
    "from lit_resinit.watch.moments import Moments",
    "from lit_resinit import ResidualInit\nfrom lit_resinit.watch import Moments\nfrom lit_resinit import watch",
]


IN_ANY_ORDER = f"""
import sys
import torch, torchmetrics, lightning.pytorch  # once for all
for order in {ORDERS!r}:
    for name in [n for n in sys.modules if n.partition(".")[0] == "lit_resinit"]:
        del sys.modules[name]
    exec(order)
    assert callable(watch) and watch.__name__ == "watch", order
    assert Moments.__name__ == "Moments", order
"""


@pytest.mark.slow
def test_the_function_and_the_package_have_one_name_in_any_order() -> None:
    script = [sys.executable, "-W", "ignore", "-c", IN_ANY_ORDER]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_keeps_its_names() -> None:
    assert callable(watch)
    assert {Moments.__name__, Watcher.__name__, metrics.__name__} == {"Moments", "Watcher", "metrics"}
