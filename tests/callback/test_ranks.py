"""Several processes: the same start, the same verdict, the same numbers, and never one that waits for another."""

from pathlib import Path
from typing import Any

import pytest
import torch
from networks import WIDTH, data, trainer

from lit_resinit import ResidualInit

SCRIPT = "two_ranks.py"
pytestmark = pytest.mark.ranks


def ranks(root: Path) -> list[dict[str, Any]]:
    files = [root / f"rank{r}.pt" for r in range(2)]
    parent = root / "parent.txt"
    assert all(f.exists() for f in files), parent.read_text()[-3000:] if parent.exists() else "no file"
    return [torch.load(f, weights_only=True) for f in files]


@pytest.mark.parametrize("block", ["Plain", "Scaled"], ids=["insert", "zero"])
def test_two_ranks_equal_one_rank_on_the_joined_batch(block: str, runs: Path, tmp_path: Path) -> None:
    import two_ranks

    module, ours = two_ranks.joined(getattr(two_ranks, block)), ResidualInit()
    trainer(tmp_path, ours).fit(module, data(WIDTH, rows=24, batch=8))
    left, right = ranks(runs / ("joined_insert" if block == "Plain" else "joined_zero"))
    trained = {**dict(module.named_parameters()), **dict(module.named_buffers())}  # its state dict is folded by now
    assert trained.keys() == left["state"].keys()
    for name, value in trained.items():
        assert torch.equal(left["state"][name], right["state"][name])
        assert torch.allclose(left["state"][name], value, atol=1e-6)
    for quantity in ("gate", "gate_grad", "var_stream", "var_branch", "variance_ratio", "saliency"):
        assert torch.equal(left[quantity], right[quantity]), quantity
        assert torch.allclose(left[quantity], getattr(ours.history, quantity), rtol=1e-4, atol=1e-9), quantity
    assert left["identity"]
    assert right["identity"]
    assert left["statuses"] == right["statuses"] == ["alive", "alive"]


def test_what_one_rank_finds_every_rank_raises(runs: Path) -> None:
    left, right = ranks(runs / "open_on_one")
    assert (left["identity"], right["identity"]) == (True, False)
    for found in (left, right):
        assert "IdentityError: RI201" in found["error"]
        assert "net.0.scale" in found["error"]
    assert "rank 1" in left["error"]


def test_a_dead_gate_stops_both_ranks(runs: Path) -> None:
    for found in ranks(runs / "dead"):
        assert "GradientError: RI301" in found["error"]
        assert "net.0.scale" in found["error"]
        assert "on rank" not in found["error"]


def test_a_rank_that_runs_no_block_does_not_hang_the_others(runs: Path) -> None:
    left, right = ranks(runs / "uneven")
    assert left["steps"].tolist() == right["steps"].tolist() == [0, 1, 2]
    for quantity in ("gate", "var_stream", "variance_ratio"):
        assert torch.equal(left[quantity], right[quantity]), quantity
    assert bool((left["var_stream"] > 0).all())
    assert "error" not in left


def test_sleepers_are_waited_for_on_both_ranks(runs: Path) -> None:
    assert [set(found["statuses"]) for found in ranks(runs / "asleep")] == [{"alive"}, {"alive"}]


def test_patience_ends_on_both_ranks(runs: Path) -> None:
    for found in ranks(runs / "patience"):
        assert "slept through 3 optimizer steps" in found["error"]


def test_a_scaler_is_waited_for_on_both_ranks(runs: Path) -> None:
    for found in ranks(runs / "scaler"):
        assert found["identity"]
        assert set(found["statuses"]) == {"alive"}


def test_usefulness_is_that_of_the_data_of_both_ranks(runs: Path) -> None:
    left, right = ranks(runs / "useful")
    assert left["usefulness"] == right["usefulness"]
    assert set(left["usefulness"]) == {"net.0", "net.1"}
    assert left["attribution_steps"].tolist() == [1, 6, 11, 12]
    for quantity in ("attribution_values", "attribution_loss", "attribution_joint"):
        assert torch.equal(left[quantity], right[quantity])
    torch.testing.assert_close(left["attribution_values"].sum(1), left["attribution_joint"], rtol=0.1, atol=1e-6)
    assert all(torch.equal(left["state"][name], value) for name, value in right["state"].items())


def test_usefulness_that_one_rank_cannot_measure_stops_none(runs: Path) -> None:
    for found in ranks(runs / "useless"):
        assert found["usefulness"] is None
        assert len(found["attribution_steps"]) == 0
        assert len(found["steps"]) == 12
        assert "error" not in found
