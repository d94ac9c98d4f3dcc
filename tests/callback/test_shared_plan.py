"""Ranks that would plan differently have the plan of rank 0, or stop together."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    paths = os.pathsep.join(map(str, (HERE.parent.parent, HERE.parent)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
    script = [sys.executable, str(HERE / "two_plans.py"), str(folder)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def both(root: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(root / f"{name}{rank}.pt", weights_only=True) for rank in range(2)]


def test_the_plan_of_rank_0_is_everybodys(root: Path) -> None:
    left, right = both(root, "shared")
    assert left == right == {"branches": ["net.0", "net.1"], "records": 3}


def test_a_rank_whose_data_reach_no_branch_takes_part(root: Path) -> None:
    left, right = both(root, "nothing_on_1")
    assert left == right
    assert left["branches"] == ["net.1"]


def test_what_fails_on_rank_0_stops_every_rank(root: Path) -> None:
    left, right = both(root, "nothing_on_0")
    assert left["error"].startswith("NoBranchError: RI101: looked for residual additions")
    assert right["error"] == left["error"]


def test_another_network_on_a_rank_stops_all_with_one_message(root: Path) -> None:
    left, right = both(root, "different")
    assert left["error"] == right["error"]
    assert "on rank 1: net.1.f" in left["error"]
    assert ": none instead of a module" in left["error"]
    assert "Nothing was changed" in left["error"]
