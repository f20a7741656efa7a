"""Shows a snapshot of the counters as tables in terminals, files and notebooks.

`bucketjit._inspect.tables` makes the tables; here they become rich renderables and HTML.
"""

from __future__ import annotations

import html
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from bucketjit._events import printable
from bucketjit._extras import Extra
from bucketjit._inspect.tables import Table, tables_of

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

WIDTH_OF_A_FILE = 120  # characters of a line in output that is no terminal
_NARROWEST = 40  # characters; below that, rich leaves out columns of a table


class Report:
    """The counters of an executor, as tables.

    ``print`` it: in colour and as wide as the terminal, or plain text if the output is a file. It
    is a rich renderable too, and HTML in a notebook.

    Args:
        title: The text above the tables.
        stats: ``dataclasses.asdict`` of a `bucketjit.types.Stats`.

    Attributes:
        title: The text above the tables.
        tables: The tables.

    Raises:
        MissingExtraError: rich is not installed.
    """

    def __init__(self, title: str, stats: Mapping[str, Any]) -> None:
        console_for(sys.stdout)
        self.title = title
        self.tables = tuple(tables_of(stats))

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        from rich.text import Text

        if self.title:
            yield Text(printable(self.title))
        for table in self.tables:
            yield from rendered(table)

    def __str__(self) -> str:
        buffer = io.StringIO()
        console_for(sys.stdout, buffer).print(self)
        return buffer.getvalue().rstrip("\n")

    def __repr__(self) -> str:
        return f"<Report of {printable(self.title) or 'a snapshot'}>"

    def _repr_html_(self) -> str:
        return as_html(self.title, self.tables)


def console_for(stream: TextIO, file: TextIO | None = None) -> Console:
    """A rich console whose width and colours suit a stream.

    Args:
        stream: A terminal or a file.
        file: What to print to; the stream itself by default.

    Returns:
        The console.

    Raises:
        MissingExtraError: rich is not installed.
    """
    with Extra("tables", "rich", "cli"):
        from rich.console import Console
    is_terminal = stream.isatty()
    if is_terminal or "COLUMNS" in os.environ:
        width = Console(file=stream).width
    else:
        width = WIDTH_OF_A_FILE
    width = max(width, _NARROWEST)
    return Console(file=file or stream, width=width, force_terminal=is_terminal)


def rendered(table: Table) -> Iterator[RenderableType]:
    """A table as rich renderables: its title, then its rows."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = RichTable(box=box.SIMPLE, pad_edge=False)
    for column in table.columns:
        grid.add_column(
            Text(printable(column)),
            justify="right" if column in table.numeric else "left",
            overflow="fold",  # wrap long cells; an ellipsis would hide their end
        )
    for row in table.rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    yield Text(printable(table.title), style="bold")
    yield grid


def as_html(title: str, tables: Sequence[Table]) -> str:
    """Tables as HTML. All their texts are escaped."""
    parts = [f"<p><code>{_escaped(title)}</code></p>"]
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
