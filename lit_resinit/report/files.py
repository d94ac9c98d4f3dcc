"""Files of a report: whether one can be written, and writing it so that it is complete at every moment."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lit_resinit.errors import ResInitError

PAGES = (".html", ".htm")
PICTURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp", ".eps", ".ps", ".tif", ".tiff")


def is_page(path: str | os.PathLike[str]) -> bool:
    """Whether the path asks for the HTML page, and not for a picture."""
    return Path(path).suffix.lower() in PAGES


def check_report(path: str | os.PathLike[str]) -> None:
    """Find out before a run whether its report can be written at the end.

    Args:
        path: The page (``.html``) or the picture (``.png``, ``.pdf``, ``.svg``, ...).

    Raises:
        ResInitError: If the ending is unknown, the folder cannot be written to, or the package that draws is missing.

    Note:
        Missing folders are created.

    Example:
        >>> check_report(Path(tempfile.mkdtemp()) / "figures" / "run.png")
    """
    suffix = Path(path).suffix.lower()
    endings = (*PAGES, *PICTURES)
    if suffix not in endings:
        raise ResInitError(
            f"checking the report's path: expected an ending of {', '.join(endings)}, found {suffix or 'none'!r} in "
            f"{str(path)!r}. Name a page (run.html) or a picture (run.png). Nothing was changed."
        )
    if is_page(path):
        from lit_resinit.report.page import packed_plotly

        packed_plotly()
    else:
        from lit_resinit.report.figures import need_matplotlib

        need_matplotlib()
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError("it is a folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise ResInitError(
            f"checking the report's path: expected a file that can be written, found that {str(path)!r} cannot "
            f"({type(error).__name__}: {error}). Name another path. Nothing was changed."
        ) from error


def replace_file(path: str | os.PathLike[str], write: Callable[[Path], Any]) -> None:
    """Write a file beside the target and move it there: a reader, or a killed run, finds the old one or the new one.

    Args:
        path: The target.
        write: Writes the content to the path that it is given (with the target's ending).

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> replace_file(folder / "a.txt", lambda temporary: temporary.write_text("whole"))
        >>> [f.name for f in folder.iterdir()]
        ['a.txt']
    """
    target = Path(path)
    temporary = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        write(temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
