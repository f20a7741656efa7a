"""Prints tables on standard output with rich."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from bucketjit._cli.command import CommandError
from bucketjit._inspect.report import console_for, rendered
from bucketjit._inspect.tables import Table
from bucketjit.errors import MissingExtraError


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[str] = ()
) -> None:
    """Print a table, as wide as the terminal.

    Args:
        title: The text above the rows.
        columns: The headings.
        rows: The cells, as text.
        numeric: Headings of the columns to align to the right.

    Raises:
        CommandError: If rich is not installed.
    """
    print_tables([Table(title, columns, list(rows), tuple(numeric))])


def console_or_error() -> Any:
    """The console that tables are printed on. Call it before long work, to fail early.

    Returns:
        The console of rich.

    Raises:
        CommandError: If rich is not installed.
    """
    try:
        return console_for(sys.stdout)
    except MissingExtraError as error:
        raise CommandError(str(error)) from None


def print_tables(tables: Iterable[Table]) -> None:
    """Print tables, as wide as the terminal.

    Args:
        tables: The tables.

    Raises:
        CommandError: If rich is not installed.
    """
    console = console_or_error()
    for table in tables:
        title, grid = rendered(table)
        console.print(title, soft_wrap=True)
        console.print(grid)
