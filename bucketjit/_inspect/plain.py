"""Writes tables as plain text, where rich is not installed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from bucketjit._events import printable
from bucketjit._inspect.tables import Table

_GAP = "  "  # between two columns


def plain_lines(table: Table, width: int) -> Iterator[str]:
    r"""The lines of a table: its title, its headings, its rows.

    Long cells are continued in further lines, so nothing is left out.

    Args:
        table: The table.
        width: The characters of a line, if the columns fit.

    Examples:
        >>> table = Table("Sizes", ("name", "n"), [("batch", "4"), ("s", "128")], ("n",))
        >>> print("\n".join(plain_lines(table, 80)))
        Sizes
        name     n
        ----------
        batch    4
        s      128
    """
    rows = [[printable(cell).split("\n") for cell in row] for row in (table.columns, *table.rows)]
    widths = _widths(rows, width - len(_GAP) * (len(table.columns) - 1))
    is_right = [column in table.numeric for column in table.columns]
    yield printable(table.title)
    for number, row in enumerate(rows):
        yield from _row(row, widths, is_right)
        if number == 0:
            yield "-" * (sum(widths) + len(_GAP) * (len(widths) - 1))


def _widths(rows: Sequence[Sequence[Sequence[str]]], room: int) -> list[int]:
    """The width of each column: that of its longest line, or less if there is no room for all."""
    columns = zip(*rows, strict=True)
    widths = [max(1, *(len(line) for cell in column for line in cell)) for column in columns]
    most = max(widths)
    while most > 1 and sum(min(n, most) for n in widths) > room:
        most -= 1
    return [min(n, most) for n in widths]


def _row(
    row: Sequence[Sequence[str]], widths: Sequence[int], is_right: Sequence[bool]
) -> Iterator[str]:
    """The lines of a row, whose cells are lines of any length."""
    cells = [
        [piece for line in cell for piece in textwrap.wrap(line, width) or [""]]
        for cell, width in zip(row, widths, strict=True)
    ]
    for i in range(max(map(len, cells))):
        parts = [
            text.rjust(width) if right else text.ljust(width)
            for cell, width, right in zip(cells, widths, is_right, strict=True)
            for text in [cell[i] if i < len(cell) else ""]
        ]
        yield _GAP.join(parts).rstrip()
