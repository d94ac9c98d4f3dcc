"""Marked lines of test files, which a message has to name."""

from pathlib import Path


def line_of(file: str, mark: str) -> str:
    """``file:line`` of the line that ends in the comment ``mark``."""
    lines = Path(file).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return f"{Path(file).name}:{number}"
