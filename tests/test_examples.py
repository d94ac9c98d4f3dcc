import importlib.util
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


def test_usefulness_example_runs_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = example("order_of_usefulness").main(["--small", "--out", str(tmp_path)])
    assert {name: len(rows) for name, rows in found["correlations"].items()} == {"SGD": 1, "AdamW": 1}
    for rows in found["usefulness"].values():
        assert len(rows[0]) == 4
        assert any(rows[0].values())
    assert found["losses"]["AdamW"][0] < 2.3
    assert found["picture"].read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for word in ("SGD, seed 0", "AdamW, seed 0", "early switching on", "first-order estimate"):
        assert word in printed
