"""Shows a snapshot of the counters as tables in terminals, files and notebooks.

`bucketjit._stages.tables` makes the tables. Here they become text and HTML.
"""

from __future__ import annotations

import html
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bucketjit._events import printable
from bucketjit._runtime.summary import summary_of
from bucketjit._stages.tables import Table, tables_of

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


_WIDTH_OF_A_FILE = 120  # characters of a line in output that is no terminal
_NARROWEST = 40


class Report:
    """The counters of a bucketed function, as tables; the first line says what was saved.

    ``print`` it, as wide as the terminal. In a notebook it is HTML.

    Args:
        title: The text above the tables.
        stats: ``dataclasses.asdict`` of a `bucketjit.types.Stats`, or the same read from JSON.

    Attributes:
        title: The text above the tables.
        summary: What bucketing has saved, in one line; see `bucketjit.types.Stats.summary`.
        tables: The tables.
    """

    def __init__(self, title: str, stats: Mapping[str, Any]) -> None:
        self.title = title
        self.summary = summary_of(stats) or ""
        self.tables = tuple(tables_of(stats))

    @property
    def _heads(self) -> list[str]:
        return [printable(text) for text in (self.summary, self.title) if text]

    def __str__(self) -> str:
        return "\n".join([*self._heads, *text_of(self.tables)])

    def __repr__(self) -> str:
        return f"<Report of {printable(self.title) or 'a snapshot'}>"

    def _repr_html_(self) -> str:
        return as_html(self._heads, self.tables)


def text_of(tables: Sequence[Table]) -> Iterator[str]:
    """The lines of tables, as wide as standard output, each table after an empty line."""
    width = _WIDTH_OF_A_FILE
    if "COLUMNS" in os.environ or (sys.stdout is not None and sys.stdout.isatty()):
        width = max(shutil.get_terminal_size().columns, _NARROWEST)
    for table in tables:
        yield ""
        yield from plain_lines(table, width)


def as_html(heads: Sequence[str], tables: Sequence[Table]) -> str:
    """Tables as HTML, after some lines. All their texts are escaped."""
    parts = [f"<p><code>{_escaped(text)}</code></p>" for text in heads]
    for table in tables:
        align = ["right" if c in table.numeric else "left" for c in table.columns]
        head = _cells("th", table.columns, align)
        body = "".join(f"<tr>{_cells('td', row, align)}</tr>" for row in table.rows)
        parts.append(
            f"<details open><summary><b>{_escaped(table.title)}</b></summary>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></details>"
        )
    return f'<div class="bucketjit">{"".join(parts)}</div>'


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def _cells(tag: str, texts: Sequence[str], align: Sequence[str]) -> str:
    return "".join(
        f'<{tag} style="text-align: {where}; white-space: pre-wrap">{_escaped(text)}</{tag}>'
        for text, where in zip(texts, align, strict=True)
    )
