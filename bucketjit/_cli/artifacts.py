"""Opens ``.bkt`` files for commands."""

from __future__ import annotations

import argparse
from pathlib import Path

from bucketjit._artifact.archive import Archive
from bucketjit._cli.command import CommandError, UsageError


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
        key = _read(options.key_file).removesuffix(b"\n").removesuffix(b"\r")
    try:
        return Archive(options.file, key)
    except OSError as error:
        raise CommandError(f"cannot read {options.file}: {error.strerror or error}") from None


def _read(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {name}: {error.strerror or error}") from None
