"""What every benchmark prints: where it ran, with which versions, and rows as aligned text."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

Row = dict[str, str | float]
RESULTS = Path(__file__).parent / "results"


def origin(*packages: str) -> str:
    """Date, machine and versions, in one line."""
    versions = [f"{name} {version(name)}" for name in ("torch", *packages)]
    machine = f"{os.cpu_count()} cores {platform.machine().replace('_', '-')}"
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    python = f"Python {platform.python_version()}"
    return f"{datetime.date.today().isoformat()}; machine = {machine}, {threads}; {', '.join([*versions, python])}"


def version(package: str) -> str:
    """Installed version of a package, or that it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def table(rows: Sequence[Row], digits: int = 4) -> str:
    """Rows as aligned text, numbers to so many significant digits."""
    header = list(rows[0])
    cells = [header, *([_cell(row[h], digits) for h in header] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def _cell(value: str | float, digits: int) -> str:
    return value if isinstance(value, str) else f"{value:.{digits}g}"


def publish(text: str, path: Path | None) -> None:
    """Print the text, and write it where a path is given."""
    print(text)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip() + "\n")
