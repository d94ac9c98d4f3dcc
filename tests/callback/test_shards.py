"""Sharded parameters: a rank that holds nothing of a gate sees it all the same; what hides it is refused."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from networks import WIDTH, Classifier, Plain, Scaled, data, stack, trainer
from torch import nn

from lit_resinit import GradientError, ResidualInit, ResInitError, ResInitWarning

SCRIPT = "two_shards.py"


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10),
    reason="torch 2.7 sums sharded gradients over gloo instead of averaging them",
)
@pytest.mark.parametrize("kind", ["insert", "zero"])
@pytest.mark.ranks
def test_two_shards_equal_one_process(kind: str, runs: Path, tmp_path: Path) -> None:
    import two_shards

    left, right = (torch.load(runs / kind / f"rank{r}.pt", weights_only=False) for r in range(2))
    ours = ResidualInit()
    trainer(tmp_path, ours).fit(two_shards.Sliced(two_shards.network(kind), lr=0.1), data(WIDTH, rows=24, batch=8))
    for quantity in ("gate", "gate_max", "gate_grad", "var_stream", "var_branch", "variance_ratio", "saliency"):
        assert torch.equal(left[quantity], right[quantity]), quantity
        assert torch.allclose(left[quantity], getattr(ours.history, quantity), rtol=1e-4, atol=1e-9), quantity
    assert left["identity"]
    assert right["identity"]
    assert set(left["statuses"]) == set(right["statuses"]) == {"alive"}
    if kind == "insert":
        shards = [found["state"]["net.0.f.residual_gate"].to_local().numel() for found in (left, right)]
        assert shards == [1, 0]


@pytest.mark.ranks
def test_a_dead_gate_is_named_on_the_rank_that_holds_nothing_of_it(runs: Path) -> None:
    for found in (torch.load(runs / "dead" / f"rank{r}.pt") for r in range(2)):
        assert "net.0.scale" in found["error"]
        assert "slope zero at zero" in found["error"]


@pytest.mark.ranks
def test_a_network_that_is_sharded_already_is_refused_with_the_way_out(runs: Path) -> None:
    text = (runs / "late.txt").read_text()
    for part in ("net.0.scale", "fully_shard", "apply_(self.net, make_plan(self.net, ...))"):
        assert part in text


def packing(name: str) -> Any:
    """A strategy that is taken for one whose engine hides parameters."""
    return type(name, (SingleDeviceStrategy,), {})("cpu")


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy"])
@pytest.mark.parametrize("block", [Plain, Scaled])
def test_what_an_engine_hides_is_judged_before_it_is_built(block: Any, name: str, tmp_path: Path) -> None:
    module, ours = Classifier(stack(block)), ResidualInit()
    runner = trainer(tmp_path, ours, strategy=packing(name), accelerator="auto")
    with pytest.warns(ResInitWarning, match=rf"under {name} the gates were closed and judged on one batch"):
        runner.fit(module, data(WIDTH))
    assert ours.identity_report.ok
    assert {g.status for g in ours.gradient_report.gates.values()} == {"alive"}
    assert len(ours.history) == 0
    runner.save_checkpoint(tmp_path / "run.ckpt")
    stored = torch.load(tmp_path / "run.ckpt", weights_only=True)["state_dict"]
    assert list(stored) == list(module.state_dict())


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy"])
def test_judging_before_an_engine_leaves_no_trace(name: str, tmp_path: Path) -> None:
    ends = []
    for ours in ([], [ResidualInit("observe", identity="ignore")]):
        torch.manual_seed(0)
        module = Classifier(stack(lambda: nn.Sequential(Plain(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1))))
        runner = trainer(tmp_path, *ours, strategy=packing(name), accelerator="auto")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runner.fit(module, data(WIDTH))
        ends.append(module.state_dict())
        ends[-1]["random"] = torch.get_rng_state()
    assert all(torch.equal(ends[0][n], v) for n, v in ends[1].items())


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy"])
def test_a_dead_gate_stops_before_the_engine_is_built(name: str, tmp_path: Path) -> None:
    class Shut(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.relu(self.scale * self.f(x))

    module = Classifier(stack(lambda: Shut(value=0.0)))
    with pytest.raises(GradientError, match="slope zero at zero"):
        trainer(tmp_path, ResidualInit("observe"), strategy=packing(name), accelerator="auto").fit(module, data(WIDTH))


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy"])
def test_a_step_that_does_not_run_before_the_engine_is_told(name: str, tmp_path: Path) -> None:
    class Late(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            fake = isinstance(loss, torch._subclasses.FakeTensor)
            if not fake and self.trainer.optimizers[0].param_groups[0]["lr"] == 0.0:
                raise RuntimeError("no engine yet")
            return loss

    with pytest.warns(ResInitWarning, match=r"could be judged: tried one step .*no engine yet"):
        trainer(tmp_path, ResidualInit(), strategy=packing(name), accelerator="auto").fit(
            Late(stack(Plain)), data(WIDTH)
        )


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy"])
def test_a_network_that_comes_after_the_engine_is_refused_with_what_was_tried(name: str, tmp_path: Path) -> None:
    class Built(Classifier):
        def configure_model(self) -> None:
            self.net = stack(Scaled)

    with pytest.raises(ResInitError, match=rf"under {name}.*Tried in `setup`"):
        trainer(tmp_path, ResidualInit(), strategy=packing(name), accelerator="auto").fit(
            Built(nn.Identity()), data(WIDTH)
        )
