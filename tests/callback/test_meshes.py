"""Sharded and tensor parallel trainings are what they are without the callback; their checkpoints are plain."""

from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from networks import WIDTH, Classifier, NormLast, Plain, stack
from torch import Tensor

SCRIPT = "two_meshes.py"
BLOCKS = {"insert": Plain, "zero": NormLast}
NEW_ENOUGH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not NEW_ENOUGH, reason="torch 2.7 sums sharded gradients over gloo instead of averaging them"),
]


def weights(runs: Path, name: str, moment: str = "end") -> dict[str, Tensor]:
    return torch.load(runs / name / f"{moment}.pt")


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    return [n for n in {*left, *right} if n not in left or n not in right or not torch.equal(left[n], right[n])]


@pytest.mark.parametrize("kind", ["insert", "zero", "insert tensor", "scale tensor"])
def test_ten_steps_end_in_the_same_weights(kind: str, runs: Path) -> None:
    assert not differing(weights(runs, f"{kind} plain"), weights(runs, f"{kind} watched"))


@pytest.mark.parametrize("kind", ["insert tensor", "scale tensor"])
def test_tensor_parallel_networks_are_proven_judged_and_watched(kind: str, runs: Path) -> None:
    left, right = (torch.load(runs / f"{kind} watched" / f"rank{r}.pt", weights_only=False) for r in range(2))
    assert left["identity"]
    assert right["identity"]
    assert set(left["statuses"]) == {"alive"}
    assert left["steps"].tolist() == list(range(10))
    for quantity in ("gate", "var_stream", "var_branch"):
        assert torch.equal(left[quantity], right[quantity])
        assert bool(left[quantity].isfinite().all())


@pytest.mark.parametrize("way", ["shards", "whole"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_resume_meets_what_was_trained_bit_for_bit(kind: str, way: str, runs: Path) -> None:
    name = f"{kind} {way}"
    assert not differing(weights(runs, f"{name} first"), weights(runs, f"{name} resumed", "start"))
    if kind == "zero":  # without inserted scalars the same file resumes without the callback
        assert not differing(weights(runs, f"{name} resumed without"), weights(runs, f"{name} resumed"))


@pytest.mark.parametrize("way", ["shards", "whole"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_one_process_loads_the_plain_network(kind: str, way: str, runs: Path) -> None:
    path = runs / f"{kind} {way}.ckpt"
    found = _load_distributed_checkpoint(path) if path.is_dir() else torch.load(path, weights_only=True)
    plain, trained = Classifier(stack(BLOCKS[kind])), Classifier(stack(BLOCKS[kind]))
    plain.load_state_dict(found["state_dict"], strict=True)
    end, x = weights(runs, f"{kind} {way} first"), torch.randn(5, WIDTH)
    gates = [end.pop(n) for n in list(end) if n.endswith("residual_gate")]
    trained.load_state_dict(end)
    with torch.no_grad():
        wanted = x
        for position, block in enumerate(trained.net[:-1]):
            wanted = wanted + (gates[position] * block.f(wanted) if gates else block(wanted) - wanted)
        torch.testing.assert_close(plain(x), trained.net[-1](wanted), rtol=1e-5, atol=1e-6)
