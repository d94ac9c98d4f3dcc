"""Many names in few words: what is equal is said once."""

from __future__ import annotations

import re
from collections.abc import Sequence


def without_numbers(text: str) -> str:
    """A text with its numbers taken out, which groups equal findings of equal blocks."""
    return re.sub(r"\d+", "#", text)


def in_common(texts: Sequence[str]) -> str:
    """Texts that differ in numbers only as one, with ``#`` for the numbers that differ."""
    pieces = zip(*(re.split(r"(\d+)", text) for text in texts), strict=True)
    return "".join(piece[0] if len(set(piece)) == 1 else "#" for piece in pieces)


def together(names: Sequence[str], shown: int = 3) -> str:
    """Several names in one short text: the first few, or a range where only one number differs."""
    return ", ".join(names) if len(names) <= shown else f"{names[0]} .. {names[-1]}"


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
