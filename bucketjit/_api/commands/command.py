"""The record that describes a command, its errors, and what several commands do alike."""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bucketjit._events import printable
from bucketjit._stages.report import Table, text_of


class CommandError(Exception):
    """The work failed; the message is one line for the user. Exit code 1."""


class UsageError(Exception):
    """The options make no sense together; the message is one line. Exit code 2."""


Argument = tuple[Sequence[str], dict[str, Any]]


def argument(*names: str, **options: Any) -> Argument:
    """An argument of a command, as ``argparse`` takes it."""
    return names, options


class Command(NamedTuple):
    """One command; `app` lists it."""

    name: str
    summary: str
    arguments: Sequence[Argument]
    run: Callable[[argparse.Namespace], None]

    @property
    def description(self) -> str:
        """What its help says first: the docstring of the function that runs it."""
        return inspect.getdoc(self.run) or ""


def command(
    name: str, summary: str, *arguments: Argument
) -> Callable[[Callable[[argparse.Namespace], None]], Command]:
    """Make a command of the function that runs it."""
    return functools.partial(Command, name, summary, arguments)


def positive_int(text: str) -> int:
    """Parse an int of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"expected a positive int, got {text!r}")
    return int(text)


def named(text: str) -> str:
    """Parse the name of a file or a directory."""
    if not text:
        raise argparse.ArgumentTypeError("expected a name, got an empty text")
    return text


JSON = argument("--json", action="store_true", help="print JSON in place of a table")


def read_text(name: str) -> str:
    """Read a file of text, or standard input for ``-``, without the mark of spreadsheets."""
    if name == "-" and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("name a file, or pipe one in")
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise CommandError(f"{shown_name(name)} is not text") from None


def shown_name(name: str) -> str:
    """The name of a file in messages."""
    return "standard input" if name == "-" else " ".join(name.split())


def print_tables(tables: Iterable[Table], head: str = "") -> None:
    """Print tables, as wide as the terminal."""
    lines = list(text_of(list(tables)))
    print("\n".join([printable(head), *lines] if head else lines[1:]))
