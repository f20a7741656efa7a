"""The record that describes a command, its errors, and what several commands do alike."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bucketjit._artifact.archive import Archive
from bucketjit._events import printable
from bucketjit._stages.report import Table, text_of


class CommandError(Exception):
    """The work failed; the message is one line for the user. Exit code 1."""


class UsageError(Exception):
    """The options make no sense together; the message is one line. Exit code 2."""


class Command(NamedTuple):
    """One command. Its module defines it as ``COMMAND``, and `app` lists it.

    Attributes:
        name: The word on the command line.
        summary: One line for the list of commands.
        description: What it does, for its own help.
        add_arguments: Adds its arguments to its parser.
        run: Does the work and prints the result. Raises `CommandError` if the work fails, and
            `UsageError` if the options contradict each other.
    """

    name: str
    summary: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def positive_int(text: str) -> int:
    """Parse an int of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"expected a positive int, got {text!r}")
    return int(text)


_MARK = "\ufeff"  # the byte order mark, which spreadsheets write in front of UTF-8


def read_text(name: str) -> str:
    """Read a file, or standard input for ``-``."""
    try:
        if name == "-":
            if sys.stdin is None or sys.stdin.isatty():
                raise UsageError("name a file, or pipe one in")
            return sys.stdin.read().removeprefix(_MARK)
        return Path(name).read_text(encoding="utf-8").removeprefix(_MARK)
    except UnicodeDecodeError:
        raise CommandError(f"{shown_name(name)} is not text") from None
    except OSError as error:
        shown = shown_name(name) or "a file whose name is empty"
        raise CommandError(f"cannot read {shown}: {error.strerror or error}") from None


def shown_name(name: str) -> str:
    """The name of a file in messages."""
    return "standard input" if name == "-" else " ".join(name.split())


def add_key(parser: argparse.ArgumentParser) -> None:
    """Add the option that names a key."""
    parser.add_argument(
        "--key-file",
        metavar="KEY",
        help="a file with the key that FILE was signed with; the signature is checked",
    )


def opened(options: argparse.Namespace) -> Archive:
    """The file that a command line names, with all its digests checked."""
    if not options.file:
        raise UsageError("the name of the file is empty")
    key = None
    if options.key_file is not None:
        # Keys are secrets, so they do not stand on the command line. Editors end a file with a
        # newline, which is no part of the key.
        key = _read_bytes(options.key_file).removesuffix(b"\n").removesuffix(b"\r")
    try:
        return Archive(options.file, key)
    except OSError as error:
        raise CommandError(f"cannot read {options.file}: {error.strerror or error}") from None


def _read_bytes(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {name}: {error.strerror or error}") from None


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[str] = ()
) -> None:
    """Print a table, as wide as the terminal."""
    print_tables([Table(title, columns, list(rows), tuple(numeric))])


def print_tables(tables: Iterable[Table], head: str = "") -> None:
    """Print tables, as wide as the terminal."""
    lines = list(text_of(list(tables)))
    print("\n".join([printable(head), *lines] if head else lines[1:]))
