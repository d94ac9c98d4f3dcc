"""``python -m lit_resinit fold``: files that earlier versions wrote, with the scalars in the state dict."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import WIDTH, Classifier, Plain, data, mlp, stack, trainer
from torch import nn

from lit_resinit import ResidualInit
from lit_resinit.cli import main

GATES = ["net.0.f.residual_gate", "net.1.f.residual_gate"]


class Squashed(Plain):
    """A branch whose end is not linear: its scalar does not fold."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(mlp(), nn.ReLU())


class Named(Classifier):
    """One network under two names."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net, lr=0.1)
        self.alias = net


def old_file(root: Path, module: Classifier) -> Path:
    """A checkpoint as it was written before scalars were folded."""
    runner = trainer(root, ResidualInit(), max_steps=6, max_epochs=-1)
    runner.fit(module, data(WIDTH))
    runner.save_checkpoint(root / "in.ckpt")
    found = torch.load(root / "in.ckpt", weights_only=True)
    found["state_dict"] = {n: p.detach() for n, p in module.named_parameters(remove_duplicate=False)}
    found["callbacks"]["ResidualInit"].pop("before_folding")
    torch.save(found, root / "in.ckpt")
    return root / "in.ckpt"


def fold(source: Path, *options: str) -> tuple[int, Path]:
    out = source.with_name("out.ckpt")
    return main(["fold", str(source), "-o", str(out), *options]), out


@pytest.mark.parametrize("build", [lambda: Classifier(stack(Plain), lr=0.1), lambda: Named(stack(Plain))])
def test_the_file_becomes_the_plain_networks_and_still_resumes(build: Any, tmp_path: Path, capsys: Any) -> None:
    module = build()
    path = old_file(tmp_path, module)
    code, out = fold(path, "--json")
    assert code == 0
    assert GATES[0] in json.loads(capsys.readouterr().out.splitlines()[-1])["folded"]
    plain, x = build(), torch.randn(3, WIDTH)
    plain.load_state_dict(torch.load(out, weights_only=True)["state_dict"], strict=True)
    torch.testing.assert_close(plain(x), module(x), rtol=1e-5, atol=1e-6)
    ends = []
    for file in (path, out):
        resumed = build()
        trainer(tmp_path, ResidualInit(), max_steps=8, max_epochs=-1).fit(resumed, data(WIDTH), ckpt_path=file)
        ends.append(resumed.state_dict())
    assert all(torch.equal(ends[0][n], v) for n, v in ends[1].items())


def test_what_does_not_fold_is_named_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = old_file(tmp_path, Classifier(nn.Sequential(Plain(), Squashed(), nn.Linear(WIDTH, 2))))
    code, out = fold(path)
    assert code == 1
    assert "1 do not fold and keep their keys: net.1.f.residual_gate" in capsys.readouterr().out
    kept = torch.load(out, weights_only=True)["state_dict"]
    assert [n for n in kept if "residual_gate" in n] == ["net.1.f.residual_gate"]


def test_a_plain_file_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner = trainer(tmp_path, ResidualInit())
    runner.fit(Classifier(stack(Plain)), data(WIDTH))
    runner.save_checkpoint(tmp_path / "in.ckpt")
    code, out = fold(tmp_path / "in.ckpt")
    assert code == 0
    assert "nothing to fold" in capsys.readouterr().out
    assert list(torch.load(out)["state_dict"]) == list(Classifier(stack(Plain)).state_dict())


def test_a_file_of_weights_only_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = old_file(tmp_path, Classifier(stack(Plain)))
    torch.save({"state_dict": torch.load(path, weights_only=True)["state_dict"]}, path)
    code, out = fold(path)
    assert (code, out.exists()) == (2, False)
    assert "RI105" in (text := capsys.readouterr().err)
    assert GATES[0] in text


@pytest.mark.parametrize(
    ("content", "says"), [({"model": 1}, "state_dict"), ([1], "state_dict"), (None, "no such file")]
)
def test_what_is_no_checkpoint_is_told(content: Any, says: str, tmp_path: Path, capsys: Any) -> None:
    if content is not None:
        torch.save(content, tmp_path / "in.ckpt")
    assert fold(tmp_path / "in.ckpt")[0] == 2
    assert says in capsys.readouterr().err
    (tmp_path / "folder").mkdir()
    assert fold(tmp_path / "folder")[0] == 2
    assert "consolidate_checkpoint" in capsys.readouterr().err
