"""Prints tables on standard output: with rich where it is installed, else as plain text."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from bucketjit._events import printable
from bucketjit._inspect.report import console_for, plain_text, rendered
from bucketjit._inspect.tables import Table


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[str] = ()
) -> None:
    """Print a table, as wide as the terminal."""
    print_tables([Table(title, columns, list(rows), tuple(numeric))])


def print_tables(tables: Iterable[Table], head: str = "") -> None:
    """Print tables, as wide as the terminal."""
    tables, console = list(tables), console_for(sys.stdout)
    if head:
        print(printable(head))
    if console is None:
        lines = list(plain_text(tables, sys.stdout))
        print("\n".join(lines if head else lines[1:]))
        return
    for table in tables:
        title, grid = rendered(table)
        console.print(title, soft_wrap=True)
        console.print(grid)
