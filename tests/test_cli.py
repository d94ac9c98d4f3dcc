"""``python -m lit_resinit``: what it prints, and its exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import WIDTH, Classifier, Scaled, data, stack, trainer
from torch import nn

from lit_resinit import History, ResidualInit
from lit_resinit.arguments import Input, as_input, in_flags
from lit_resinit.cli import main

MODELS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width=8, relu=False):
        super().__init__()
        self.f, self.scale, self.relu = nn.Linear(width, width), nn.Parameter(torch.ones(1)), relu

    def forward(self, x):
        out = self.scale * self.f(x)
        return x + (out.relu() if self.relu else out)

def net(width=8, depth=3):
    return nn.Sequential(*(Block(width) for _ in range(depth)), nn.Linear(width, 2))

class ZeroHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(20, 8), net(), nn.Linear(2, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids):
        return {"logits": self.head(self.blocks(self.embedding(ids)))}

def shut():
    model = nn.Sequential(Block(relu=True), nn.Linear(8, 2))
    nn.init.zeros_(model[0].scale)
    return model

class Centred(nn.Module):
    def forward(self, x):
        return x + x.mean(-1, keepdim=True).expand_as(x)

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(1000, 8), net()

    def forward(self, input_ids, attention_mask=None):
        assert attention_mask.dtype == torch.int64
        return self.blocks(self.embedding(input_ids) * attention_mask.unsqueeze(-1))

def late():
    return nn.Sequential(Block(), nn.LayerNorm(8))

def mixed():
    return nn.Sequential(Block(), Centred(), nn.Linear(8, 2))

plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
number = lambda: 3
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "some_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "some_models", raising=False)
    return "some_models"


def as_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


# -------------------------------------------------------------------- inspect


def test_inspect_prints_the_plan_and_both_verdicts(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{models}:net", "--input", "2,8"]) == 0
    printed = capsys.readouterr().out
    for text in ("3 residual branches", "each contributes exactly nothing", "3 alive"):
        assert text in printed


def test_inspect_as_json(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--input", "2,4", "--arguments", '{"width": 4, "depth": 2}', "--exclude", "1", "--json"]
    assert main(["inspect", f"{models}:net", *arguments]) == 0
    found = as_json(capsys)
    assert found["ok"]
    assert [b["action"] for b in found["plan"]["branches"]] == ["zero", "excluded"]
    assert found["identity"]["branches"][0]["status"] == "closed"
    assert {g["status"] for g in found["gradients"]["gates"].values()} == {"alive"}


def test_a_zero_head_sleeps_and_is_no_fault(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{models}:ZeroHead", "--input", "2,5:int"]) == 0
    assert "asleep" in capsys.readouterr().out


def test_a_gate_that_cannot_learn_is_exit_code_one(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{models}:shut", "--input", "2,8", "--scheme", "observe", "--json"]) == 1
    found = as_json(capsys)
    assert not found["ok"]
    assert found["identity"]["ok"]
    assert [g["status"] for n, g in found["gradients"]["gates"].items() if "scale" in n] == ["dead"]


def test_an_open_network_is_exit_code_one(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{models}:net", "--input", "2,8", "--scheme", "observe"]) == 1
    assert "unzeroed scale" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "shape", "told"),
    [
        ("some_models:plain", "2,8", "RI101"),
        ("some_models:net", "2,9", "RI102"),
        ("some_models:number", "2,8", "to return a torch.nn.Module, found int"),
        ("some_models:missing", "2,8", "missing"),
        ("no_such_module:net", "2,8", "no_such_module"),
        ("some_models", "2,8", "expected pkg.module:callable"),
    ],
)
def test_what_cannot_be_inspected_is_exit_code_two(
    model: str, shape: str, told: str, models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", model, "--input", shape]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert told in printed.err
    assert "Traceback" not in printed.err
    assert main(["inspect", model, "--input", shape, "--json"]) == 2
    assert told in as_json(capsys)["error"]


@pytest.mark.parametrize("shape", ["", "a", "2,-3", "2,0", "2,3:long", "2,,3", "=2,3", "2,3:ones:0-1", "2:int:5-1"])
def test_wrong_shapes_are_named(shape: str, models: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", f"{models}:net", f"--input={shape}"])
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert "expected positive sizes" in told or "expected a range for float or int" in told


def test_inputs_by_name_with_a_range_and_a_mask(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--input", "attention_mask=2,16:ones", "--input", "input_ids=2,16:int:0-999"]
    assert main(["inspect", f"{models}:Words", *given]) == 0
    assert "3 alive" in capsys.readouterr().out
    assert main(["inspect", f"{models}:Words", *given, "--sums"]) == 0


def test_kinds_of_input() -> None:
    torch.manual_seed(0)
    assert as_input("2,3") == Input((2, 3))
    assert as_input("x=2,3:int:-5--2").bounds == (-5, -2)
    drawn = as_input("200:int:7-9").draw()
    assert (drawn.min(), drawn.max(), drawn.dtype) == (7, 9, torch.int64)
    drawn = as_input("200:float:0.5-1").draw()
    assert 0.5 <= drawn.min() < 0.6 < 0.9 < drawn.max() <= 1
    assert as_input("200:bool").draw().unique().tolist() == [False, True]
    assert as_input("4:mask").draw().tolist() == [True] * 4


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"state_dict": {f"net.{k}": v for k, v in s.items()}}])
def test_weights_of_a_state_dict_or_a_checkpoint(
    wrap: Any, models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import some_models

    model = some_models.late()
    nn.init.zeros_(model[0].scale)
    torch.save(wrap(model.state_dict()), tmp_path / "weights.pt")
    arguments = ["--input", "2,8", "--scheme", "observe"]
    assert main(["inspect", f"{models}:late", *arguments]) == 1
    assert main(["inspect", f"{models}:late", *arguments, "--weights", str(tmp_path / "weights.pt")]) == 0
    capsys.readouterr()
    assert main(["inspect", f"{models}:net", *arguments, "--weights", str(tmp_path / "weights.pt")]) == 2
    assert "missing (1.scale" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"text", {"a": 1}, None])
def test_other_weights_are_refused(
    content: Any, models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    assert main(["inspect", f"{models}:net", "--input", "2,8", "--weights", str(path)]) == 2
    assert ("no such file" if content is None else "expected a state dict") in capsys.readouterr().err


def test_messages_speak_of_flags(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import some_models

    trained = some_models.late()
    nn.init.uniform_(trained[0].scale), nn.init.uniform_(trained[1].weight)
    torch.save(trained.state_dict(), tmp_path / "trained.pt")
    main(["inspect", f"{models}:late", "--input", "2,8", "--weights", str(tmp_path / "trained.pt")])
    main(["inspect", f"{models}:net", "--input", "2,9"])
    main(["inspect", f"{models}:plain", "--input", "2,8"])
    main(["inspect", f"{models}:net", "--input", "2,8", "--scheme", "observe"])
    told = "".join(capsys.readouterr())
    for flag in ("--input", "--scheme auto", "--exclude"):
        assert f"`{flag}`" in told
    for python in ("make_plan(", "ResidualInit(", "scheme=", "=True", "example_inputs", "identity='"):
        assert python not in told


def test_flags_for_every_argument_that_a_message_names() -> None:
    text = "Pass `include`, scheme='observe' or `overwrite_trained=True`; or other `example_inputs`."
    assert in_flags(text) == "Pass `--include`, `--scheme observe` or `--overwrite-trained`; or other `--input`."


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("lit-resinit ")


@pytest.mark.slow
def test_a_missing_file_is_said_before_anything_slow_is_imported(tmp_path: Path) -> None:
    slow = "{'lightning', 'torchmetrics', 'matplotlib', 'plotly', 'torchvision', 'pandas'}"
    check = (
        "import sys; from lit_resinit.cli import main; code = main(['report', 'missing.npz']); "
        f"assert not {slow} & set(sys.modules); sys.exit(code)"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", check]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert (done.returncode, done.stderr) == (2, "report: FileNotFoundError: missing.npz: no such file\n")


@pytest.mark.slow
def test_inspect_runs_as_a_module_and_without_lightning(models: str, tmp_path: Path) -> None:
    check = (
        "import atexit, runpy, sys; "
        "atexit.register(lambda: print(sorted({'lightning', 'pytorch_lightning'} & set(sys.modules)))); "
        "runpy.run_module('lit_resinit', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", check, "inspect", f"{models}:net", "--input", "2,8"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 residual branches" in done.stdout
    assert done.stdout.endswith("[]\n")


# -------------------------------------------------------------------- report


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    runner = trainer(tmp_path, ResidualInit(on_ratio=1e-9))
    runner.fit(Classifier(stack(Scaled)), data(WIDTH))
    runner.save_checkpoint(tmp_path / "run.ckpt")
    return tmp_path / "run.ckpt"


def test_report_of_a_checkpoint_has_plan_and_verdicts(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["report", str(checkpoint), "-o", str(tmp_path / "run.html")]) == 0
    assert "of 2 branches switched on, 3 records" in capsys.readouterr().out
    text = (tmp_path / "run.html").read_text()
    assert "each contributes exactly nothing" in text
    assert "net.#.scale" in text


def test_report_of_a_history_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = History(["a", "b"])
    history.append(0, torch.zeros(4, 2), torch.ones(2), torch.tensor([0.0, 0.5]))
    history.save(tmp_path / "history.npz")
    for name in ("run.html", "run.png"):
        assert main(["report", str(tmp_path / "history.npz"), "-o", str(tmp_path / name), "--json"]) == 0
        assert as_json(capsys) == {
            "written": str(tmp_path / name),
            "records": 1,
            "switched_on": {"a": None, "b": 0},
            "order": ["b"],
        }
        assert (tmp_path / name).stat().st_size > 1000


def test_report_without_a_file_prints_the_summary(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", str(checkpoint)]) == 0
    printed = capsys.readouterr().out
    for text in ("2 residual branches", "each contributes exactly nothing", "2 alive", "switched on", "variance ratio"):
        assert text in printed
    assert sorted(tmp_path.rglob("*")) == before
    assert main(["report", str(checkpoint), "--json"]) == 0
    assert set(as_json(capsys)) == {"records", "switched_on", "order", "plan", "verdicts"}


def test_report_makes_no_folder(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(checkpoint), "-o", str(tmp_path / "new" / "run.html")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("content", "name", "told"),
    [
        (None, "run.ckpt", "no such file"),
        (b"text", "run.ckpt", "another kind of file"),
        (b"text", "history.npz", "another kind of file"),
        ({"callbacks": {"Other": {}}}, "run.ckpt", "found callbacks ['Other']"),
        ({"state_dict": {}}, "run.ckpt", "found callbacks none"),
    ],
)
def test_other_files_are_refused(
    content: Any, name: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / name)
    assert main(["report", str(tmp_path / name), "-o", str(tmp_path / "run.html")]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run.html").exists()


def test_a_resumed_run_keeps_the_verdicts_of_its_beginning(checkpoint: Path, tmp_path: Path) -> None:
    again = ResidualInit(report=str(tmp_path / "again.html"))
    runner = trainer(tmp_path, again, max_steps=5, max_epochs=-1)
    runner.fit(Classifier(stack(Scaled)), data(WIDTH), ckpt_path=checkpoint)
    assert again.identity_report is None
    text = (tmp_path / "again.html").read_text()
    assert "each contributes exactly nothing" in text
    assert '["identity at the start","proven"]' in text


def test_sums_are_listed_with_the_rule_that_says_branch_or_none(
    models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", f"{models}:mixed", "--input", "2,8", "--sums"]) == 0
    first, header, *rows = capsys.readouterr().out.splitlines()
    assert first == "2 sums, 1 residual branches"
    assert header.split() == ["line", "block", "shape", "is"]
    assert "some_models.py:" in rows[0]
    assert "a branch, identity skip" in rows[0]
    assert "no branch: nothing learned" in rows[1]


def test_sums_as_json(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{models}:mixed", "--input", "2,8", "--sums", "--json"]) == 0
    residual, arithmetic = as_json(capsys)["sums"]
    assert (residual["block"], residual["skip"], residual["rules"]) == ("0", "identity", [])
    assert (arithmetic["skip"], arithmetic["rules"][0]) == (None, "nothing learned")
    assert arithmetic["shape"] == [2, 8]
