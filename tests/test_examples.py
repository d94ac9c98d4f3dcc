import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lit_resinit import History, ResidualInit

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
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


@pytest.mark.slow
def test_plain_loop_learns_and_folds(capsys: pytest.CaptureFixture[str]) -> None:
    found = example("plain_loop").main(steps=120)
    assert found["seen"].identity.ok
    assert found["seen"].gradients.ok
    assert len(found["folded"]) == len(found["plan"]) == 8
    assert sum(found["losses"][-20:]) < 0.7 * sum(found["losses"][:20])
    assert not any("residual_gate" in name for name in found["model"].state_dict())
    assert "8 gates folded" in capsys.readouterr().out


def test_plain_loop_writes_what_is_asked_for(tmp_path: Path) -> None:
    page, picture, saved = (tmp_path / name for name in ("run.html", "run.png", "run.npz"))
    example("plain_loop").main(steps=3, page=str(page), picture=str(picture), saved=str(saved))
    assert page.read_text().startswith("<!")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(History.load(saved)) == 1


@pytest.mark.slow
def test_digits_cnn_closes_norms_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    found = example("digits_cnn").main(["--blocks", "1", "--width", "8", "--epochs", "3"])
    plan = found["callback"].plan
    assert [g.kind for g in plan.gates] == ["norm"] * 3
    assert [b.skip for b in plan.branches] == ["identity", "projection", "projection"]
    assert found["callback"].identity_report.ok
    assert found["accuracy"] > 0.5
    assert capsys.readouterr().out.count("epoch ") == 3


def test_character_model_learns_and_folds(capsys: pytest.CaptureFixture[str]) -> None:
    found = example("characters").main(["--steps", "30", "--depth", "2", "--width", "16", "--length", "16"])
    assert len(found["plan"]) == len(found["folded"]) == 4
    assert found["trial"].identity.ok
    assert found["trial"].gradients.ok
    assert found["losses"][-1] < 0.9 * found["losses"][0]
    assert len(found["text"]) == 100
    assert "step 30: loss" in capsys.readouterr().out


def test_adapters_start_as_the_frozen_network() -> None:
    found = example("adapters").main(["--steps", "40", "--depth", "2", "--width", "32"])
    assert found["same"]
    assert {b.action for b in found["plan"].branches} == {"insert", "excluded"}
    assert len(found["plan"].gates) == len(found["folded"]) == 2
    assert found["trial"].identity.ok
    assert found["trial"].gradients.ok
    assert found["losses"][-1] < found["losses"][0]
    assert found["accuracy"] > 0.5


def test_all_forms_of_the_soft_bound_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    found = example("soft_bound").main(["--steps", "60"])
    assert [v["status"] for v in found.values()] == [{"dead"}, {"nonfinite"}, {"alive"}]
    assert all(v["closed"] for v in found.values())
    dead, nonfinite, alive = (v["losses"] for v in found.values())
    assert min(dead) > 0.8 * dead[0]
    assert nonfinite[-1] != nonfinite[-1]
    assert alive[-1] < 0.8 * alive[0]
    lines = (EXAMPLES / "soft_bound.py").read_text().splitlines()
    blamed = [g.source for v in found.values() for g in v["gradients"].alarms]
    assert {lines[int(source.rpartition(":")[2]) - 1].strip() for source in blamed} <= {
        "return scale * v",
        "scale = torch.where(n > 0, B * torch.tanh(n / B) / n, torch.ones_like(n))",
    }
    assert capsys.readouterr().out.count("RI301") == 2


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # of the parser that LightningCLI uses
def test_lightning_cli_takes_the_callback_from_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = ["--model.depth=2", "--trainer.max_epochs=1", "--trainer.callbacks.log_every_n_steps=2"]
    found = example("lightning_cli").main(["fit", "--config", str(EXAMPLES / "lightning_cli.yaml"), *quick])
    (callback,) = [c for c in found.trainer.callbacks if isinstance(c, ResidualInit)]
    assert (len(callback.plan), callback.log_every_n_steps) == (2, 2)
    assert callback.identity_report.ok


@pytest.mark.slow
def test_notebook_runs() -> None:
    cells = json.loads((EXAMPLES / "blocks_switch_on.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in cells)
    names: dict[str, object] = {}
    for source in code:
        exec(compile(source, "notebook", "exec"), names)
    assert len(names["names"]) == 8
    assert sum(names["losses"][-20:]) < 0.8 * sum(names["losses"][:20])


def test_every_example_is_run_and_described() -> None:
    tests, listed = Path(__file__).read_text(), (EXAMPLES / "README.md").read_text()
    for file in EXAMPLES.iterdir():
        if file.suffix in (".py", ".ipynb"):
            assert file.stem in tests, file
            assert f"`{file.name}`" in listed, file


@pytest.mark.slow
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


@pytest.mark.slow
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
