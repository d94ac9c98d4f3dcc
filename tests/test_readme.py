"""Every block of Python in the README runs, in order, in a folder of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_every_python_block_runs(tmp_path: Path) -> None:
    code = blocks(README.read_text())
    assert code
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path), "MPLBACKEND": "agg"}
    for number, source in enumerate(code, 1):
        done = subprocess.run(
            [sys.executable, "-c", source], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"block {number}:\n{source}\n{done.stderr}"


def test_links_into_the_repository_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", README.read_text())
    assert [t for t in targets if not (ROOT / t).exists()] == []


def test_blocks_are_found_in_a_text() -> None:
    assert blocks("a\n```python\nx = 1\n```\n```bash\nls\n```\n```python\ny\n```\n") == ["x = 1\n", "y\n"]
