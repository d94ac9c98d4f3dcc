"""Gates that lived and no longer do: said from the records, once, and never of a healthy run."""

import warnings
from pathlib import Path

import pytest
import torch
from networks import WIDTH, PreNorm, Scaled, data, trainer
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from lit_resinit import History, ResidualInit, ResInitWarning, make_plan
from lit_resinit.report.about import about_run
from lit_resinit.report.page import page, page_data
from lit_resinit.report.tables import history_table
from lit_resinit.watch.lapses import Lapses, gated
from lit_resinit.watch.watching import watch

NAN = float("nan")
X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))


def history_of(grads: list[list[float]], gates: list[list[float]] | None = None) -> History:
    """Records of two branches: gradients, and gates that are one unless given."""
    history = History(["a", "b"])
    for step, grad in enumerate(grads):
        gate = torch.tensor(gates[step]) if gates is not None else torch.ones(2)
        rows = torch.stack([gate, gate.abs(), torch.tensor(grad), torch.zeros(2)])
        history.append(10 * step, rows, torch.ones(2), torch.ones(2))
    return history


def test_a_gate_that_lived_and_has_no_gradient_any_more_is_silent() -> None:
    history = history_of([[1.0, 1.0]] * 5 + [[1.0, 0.0]] * 5)
    (lapse,) = history.lapses.found().values()
    assert (lapse.branch, lapse.kind, lapse.since, lapse.records) == ("b", "silent", 50, 5)
    text = history.lapses.news()
    assert "exactly none at the last 5 records in b (1 in all, since step 50)" in text
    assert history.lapses.news() == ""


@pytest.mark.parametrize(
    "grads",
    [
        [[1.0, 1.0]] * 5 + [[1.0, 0.0]] * 2,  # too few
        [[1.0, 0.0]] * 20,  # never lived: the first steps judge that
        [[1.0, 1.0], [1.0, 0.0]] * 10 + [[1.0, 0.0]] * 4,  # dropped now and then, and so now
        [[1.0, 1.0]] * 5 + [[1.0, NAN]] * 20,  # frozen, or not in the loss
        [[1.0, 1.0]] * 5 + [[float("inf"), float("inf")]] * 20,  # a scaler skips these steps
        [[1e-30, 1e-30]] * 20,  # small, and a gradient
    ],
)
def test_what_is_no_lapse(grads: list[list[float]]) -> None:
    history = history_of(grads)
    assert history.lapses.found({"a", "b"}) == {}
    assert history.lapses.news({"a", "b"}) == ""


def test_a_branch_that_did_not_run_has_not_lapsed() -> None:
    history = history_of([[1.0, 1.0]] * 5)
    for step in range(20):
        history.append(
            50 + step, torch.tensor([[1.0, 1.0]] * 2 + [[1.0, 0.0]] + [[0.0, 0.0]]), *torch.tensor([[1, NAN]] * 2)
        )
    assert history.lapses.found() == {}


@pytest.mark.slow
def test_a_layer_dropped_at_random_is_hardly_ever_called_silent() -> None:
    draws = torch.Generator().manual_seed(0)
    for chance in (0.1, 0.3, 0.5, 0.8):
        for branches in (1, 2, 12):
            grads = (torch.rand(600, branches, generator=draws) > chance).float()
            lapses, found = Lapses([str(i) for i in range(branches)]), set()
            one = torch.ones(branches)
            for step, grad in enumerate(grads):
                lapses.see(step, one, grad, one)
                found |= set(lapses.found())
            assert not found, (chance, branches)


def test_a_scheme_of_constants_has_no_gates_to_be_finite() -> None:
    net = nn.Sequential(PreNorm(), PreNorm(), nn.Linear(WIDTH, 2))
    assert gated(make_plan(net, X, scheme="sqrt_depth")) == set()
    assert len(gated(make_plan(net, X, scheme="last_layer"))) == 2


def test_a_gate_that_is_not_finite_is_said_also_where_it_never_was() -> None:
    history = history_of([[1.0, 1.0]] * 4, [[1.0, 1.0]] + [[1.0, NAN]] * 3)
    (lapse,) = history.lapses.found().values()
    assert (lapse.branch, lapse.kind, lapse.since) == ("b", "nonfinite", 10)
    without = history_of([[1.0, NAN]] * 4, [[1.0, NAN]] * 4)
    assert without.lapses.found() == without.lapses.found({"a"}) == {}  # a branch without a gate
    assert set(without.lapses.found({"a", "b"})) == {"b"}


def test_what_was_counted_outlives_a_checkpoint() -> None:
    history = history_of([[1.0, 1.0]] * 5 + [[1.0, 0.0]] * 5)
    assert History.from_dict(history.to_dict()).lapses.found() == history.lapses.found() != {}


def test_table_and_page_say_it() -> None:
    net = nn.Sequential(Scaled(), Scaled(), nn.Linear(WIDTH, 2))
    plan = make_plan(net, X, scheme="observe")
    history = History([b.name for b in plan.branches])
    history.lapses, history._records = (old := history_of([[1.0, 1.0]] * 5 + [[1.0, 0.0]] * 5)).lapses, old._records
    history.lapses._branches = history.branches
    table = history_table(plan, history)
    console = Console(width=200)
    with console.capture() as out:
        console.print(table)
    assert table.title.endswith(", 1 without a gradient")
    assert "no gradient since step 50" in out.get()
    data_ = page_data(history, about_run(plan))
    assert dict(data_["verdicts"])["Gates during the training"].startswith("looked at the gates of 2 branches")
    assert [b["status"] for b in data_["branches"]] == ["", "no gradient since step 50"]
    assert ["gates", "1 in trouble, of 1"] in data_["tiles"]
    assert "<title>2 residual branches switching on, 1 in trouble" in page(history, about_run(plan))


class Dies(Scaled):
    """A scale before a ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.scale - x.detach().abs() * 0.0) * self.f(x)


def test_a_plain_loop_says_what_dies_later() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Dies(value=0.3), Scaled(value=0.0), nn.Linear(WIDTH, 2))
    plan = make_plan(net, X, scheme="observe")
    history = History([b.name for b in plan.branches])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(12):
            net.zero_grad()
            with watch(net, plan, history, step):
                mse_loss(net(X), torch.ones(len(X), 2)).backward()
            with torch.no_grad():
                net[0].scale -= 0.12
    (text,) = [str(w.message) for w in said if issubclass(w.category, ResInitWarning)]
    assert "in 0 (1 in all, since step 3)" in text


class Explodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Scaled(value=0.0), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


@pytest.mark.parametrize("every", [1, 3, 50])
def test_a_training_whose_gates_become_nan_does_not_pass_without_a_word(tmp_path: Path, every: int) -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Explodes()

        def training_step(self, batch: list[Tensor], i: int) -> Tensor:
            loss = mse_loss(self.net(batch[0]), torch.ones(len(batch[0]), 2))
            return loss * (NAN if self.global_step > 4 else 1.0)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    callback = ResidualInit(log_every_n_steps=every, report=str(tmp_path / "run.html"))
    with pytest.warns(ResInitWarning, match="expected finite values, found NaN or inf in net.block"):
        trainer(tmp_path, callback, max_steps=9).fit(Module(), data(WIDTH))
