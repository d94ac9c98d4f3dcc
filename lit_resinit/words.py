"""Many names in few words: what is equal is said once; and objects that show themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


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


class Shown:
    """What shows itself: short as a ``repr``, and as a table in a rich terminal and in a notebook.

    A subclass has ``_title``, one line, and ``_cells``, of which the first is the header.
    """

    __slots__ = ()

    def _title(self) -> str:
        raise NotImplementedError

    def _cells(self) -> list[tuple[str, ...]]:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._title()}>"

    def __rich__(self) -> Table:
        """A table for ``rich.print``."""
        from rich.table import Table
        from rich.text import Text

        header, *rows = self._cells()
        table = Table(*header, title=Text(self._title()))
        for row in some_of(rows):
            table.add_row(*map(Text, row))
        return table

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        header, *rows = self._cells()
        head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
        body = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>" for row in some_of(rows))
        caption = f"<caption>{escape(self._title())}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def some_of(rows: Sequence[tuple[str, ...]], most: int = 40) -> list[tuple[str, ...]]:
    """The first and the last rows of a long table, with a row between them that counts the others."""
    if len(rows) <= most:
        return list(rows)
    half, empty = most // 2, ("",) * (len(rows[0]) - 1)
    return [*rows[:half], (f"... {len(rows) - 2 * half:,} more", *empty), *rows[-half:]]
