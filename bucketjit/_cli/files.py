"""Reads the files of commands, or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from bucketjit._cli.command import CommandError, UsageError

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
