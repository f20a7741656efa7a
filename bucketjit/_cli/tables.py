"""Tables on standard output, by rich."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from bucketjit._cli.command import CommandError

_WIDTH_OF_A_FILE = 120


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[str] = ()
) -> None:
    """Print a table, as wide as the terminal.

    Args:
        title: What stands above it.
        columns: The headings.
        rows: The cells, as text.
        numeric: Headings of the columns to align to the right.

    Raises:
        CommandError: If rich is not installed.
    """
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:
        raise CommandError(
            "tables need rich; install it with: pip install 'bucketjit[cli]'"
        ) from None
    table = Table(box=box.SIMPLE, pad_edge=False)
    right = set(numeric)
    for column in columns:
        table.add_column(Text(column), justify="right" if column in right else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    fixed = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if fixed else _WIDTH_OF_A_FILE)
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(table)
