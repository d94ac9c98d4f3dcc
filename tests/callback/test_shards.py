"""Sharded parameters: a rank that holds nothing of a gate sees it all the same; what hides it is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from networks import WIDTH, Classifier, Plain, data, stack, trainer

from lit_resinit import ResidualInit, ResInitError

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


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy"])
def test_strategies_that_hide_parameters_are_refused_in_setup(name: str, tmp_path: Path) -> None:
    strategy: Any = type(name, (SingleDeviceStrategy,), {})("cpu")
    module = Classifier(stack(Plain))
    before = list(module.state_dict())
    with pytest.raises(ResInitError, match=rf"{name}.*ModelParallelStrategy"):
        trainer(tmp_path, ResidualInit(), strategy=strategy, accelerator="auto").fit(module, data(WIDTH))
    assert list(module.state_dict()) == before
    trainer(tmp_path, ResidualInit(), strategy=strategy, accelerator="auto").validate(
        module, data(WIDTH), verbose=False
    )
