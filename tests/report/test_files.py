"""Files that are replaced whole, and paths that are checked before anything changes."""

import os
import shutil
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from networks import WIDTH, Classifier, Scaled, data, stack, trainer

from lit_resinit import ResidualInit, ResInitError, ResInitWarning
from lit_resinit.report.files import check_report, replace_file

# -------------------------------------------------------------------- writing it


def test_a_failed_writing_leaves_the_last_complete_file(tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    path.write_text("complete")

    def half(temporary: Path) -> None:
        temporary.write_text("hal")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_file(path, half)
    assert path.read_text() == "complete"
    assert os.listdir(tmp_path) == ["run.html"]


@pytest.mark.parametrize("name", ["file/run.html", "file/run.png", "folder.html", "run.doc", "run"])
def test_a_path_that_cannot_be_written_is_found_before_anything_changes(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file, and no folder")
    (tmp_path / "folder.html").mkdir()
    module = Classifier(stack(Scaled))
    before = {n: v.clone() for n, v in module.state_dict().items()}
    with pytest.raises(ResInitError, match="report's path"):
        trainer(tmp_path, ResidualInit(report=str(tmp_path / name))).fit(module, data(WIDTH))
    assert all(torch.equal(v, before[n]) for n, v in module.state_dict().items())


@pytest.mark.parametrize(("package", "ending"), [("plotly.offline", "html"), ("matplotlib.figure", "png")])
def test_a_missing_package_is_found_at_setup(
    package: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ResInitError, match=r"lit-resinit\[report\]"):
        trainer(tmp_path, ResidualInit(report=str(tmp_path / f"run.{ending}"))).fit(
            Classifier(stack(Scaled)), data(WIDTH)
        )


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_pictures_are_still_written(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / f"run.{ending}"
    trainer(tmp_path, ResidualInit(report=str(path))).fit(Classifier(stack(Scaled)), data(WIDTH))
    assert path.read_bytes()[:4] in (b"\x89PNG", b"%PDF", b"<?xm")


def test_a_good_path_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    path.write_text("older run")
    check_report(path)
    assert path.read_text() == "older run"


# -------------------------------------------------------------------- a picture that cannot be written at the end


class Fails(pl.Callback):
    """Takes the folder of the report away, or puts a file in its place, while the training runs."""

    def __init__(self, folder: Path, occupied: bool) -> None:
        self.folder, self.occupied, self.ended = folder, occupied, False

    def on_train_batch_start(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.occupied and not self.folder.exists():
            self.folder.write_text("a file")

    def on_train_end(self, *_: object) -> None:
        self.ended = True


@pytest.mark.parametrize("occupied", [False, True])
@pytest.mark.parametrize("ending", ["png", "pdf"])
def test_a_picture_that_cannot_be_written_is_a_warning(ending: str, occupied: bool, tmp_path: Path) -> None:
    fails = Fails(tmp_path / "gone", occupied)
    ours = ResidualInit(report=str(tmp_path / "gone" / f"run.{ending}"))
    with pytest.warns(ResInitWarning, match="picture .*could not be written.*the training is kept"):
        trainer(tmp_path, ours, fails).fit(Classifier(stack(Scaled)), data(WIDTH))
    assert fails.ended
    assert len(ours.history)
