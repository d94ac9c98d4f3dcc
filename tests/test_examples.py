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
