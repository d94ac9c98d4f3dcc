import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_digits_example_runs_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = example("digits_200_blocks").main(["--blocks", "6", "--epochs", "3", "--out", str(tmp_path)])
    assert found["branches"] == 6
    assert found["identity"]
    assert found["gradients"]
    assert (found["exact"], found["growth"]) == (True, 1.0)
    assert len(set(found["order"])) == len(found["order"]) > 0
    assert found["losses"][-1] < found["losses"][0]
    assert found["accuracy"] > 0.5
    assert found["picture"].read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for word in ("6 residual branches", "Validation accuracy", "the same network without it"):
        assert word in printed


def test_plain_loop_learns_and_folds(capsys: pytest.CaptureFixture[str]) -> None:
    found = example("plain_loop").main(steps=120)
    assert found["seen"].identity.ok
    assert found["seen"].gradients.ok
    assert len(found["folded"]) == len(found["plan"]) == 8
    assert sum(found["losses"][-20:]) < 0.7 * sum(found["losses"][:20])
    assert not any("residual_gate" in name for name in found["model"].state_dict())
    assert "8 gates folded" in capsys.readouterr().out


def test_fabric_loop_learns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    found = example("fabric_loop").main(["--steps", "120"])
    assert found["seen"].identity.ok
    assert found["seen"].gradients.ok
    assert sum(found["losses"][-20:]) < 0.7 * sum(found["losses"][:20])
    assert [len(r) for r in found["ratios"]] == [8, 8]
    assert bool((found["ratios"][1] > 0).all())


@pytest.mark.ranks
def test_fabric_loop_on_two_ranks_prints_one_number_for_both(tmp_path: Path) -> None:
    script = [sys.executable, str(EXAMPLES / "fabric_loop.py"), "--devices", "2", "--steps", "52"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("variance ratio of each branch:") == 1


def test_usefulness_example_runs_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = example("order_of_usefulness").main(["--small", "--out", str(tmp_path)])
    assert {name: len(rows) for name, rows in found["correlations"].items()} == {"SGD": 1, "AdamW": 1}
    for rows in found["usefulness"].values():
        assert len(rows[0]) == 4
        assert any(rows[0].values())
    assert [len(rows[0]) for rows in found["paths"].values()] == [4, 4]
    assert found["carried"].read_bytes().startswith(b"\x89PNG")
    assert found["losses"]["AdamW"][0] < 2.3
    assert found["picture"].read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for word in ("SGD, seed 0", "AdamW, seed 0", "early switching on", "first-order estimate"):
        assert word in printed
