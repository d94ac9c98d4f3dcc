"""Runs of two processes, each started once for the tests of a module."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which every run of the module's ``SCRIPT`` wrote what its two ranks found."""
    root = tmp_path_factory.mktemp("ranks")
    paths = (HERE.parent.parent, HERE.parent, HERE)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    script = [sys.executable, str(HERE / request.module.SCRIPT), str(root)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return root
