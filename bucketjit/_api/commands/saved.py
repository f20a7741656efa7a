"""The commands of what was saved: ``report`` of counters, ``cache``, ``unpack`` of a function."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from bucketjit._api.commands.command import (
    CommandError,
    UsageError,
    argument,
    command,
    named,
    print_tables,
    read_text,
    shown_name,
)
from bucketjit._artifact import unpack as unpacked
from bucketjit._artifact.archive import Archive
from bucketjit._compile.files import directory as files
from bucketjit._compile.files.directory import Entry
from bucketjit._compile.files.record import Damaged
from bucketjit._events import LONGEST, counted, one_line, shown
from bucketjit._raised import in_one_line
from bucketjit._runtime.statistics import summary_of
from bucketjit._stages.report import Table, shown_bytes, tables_of

# --- report ---

_STANDARD_INPUT = "the snapshot; standard input by default, or for -"


@command(
    "report",
    "show a saved snapshot of a bucketed function's counters",
    argument("stats", nargs="?", default="-", metavar="STATS.json", help=_STANDARD_INPUT),
    argument("--json", action="store_true", help="print the snapshot itself, checked"),
)
def report(options: argparse.Namespace) -> None:
    """Show a snapshot of a bucketed function's counters.

    Save one with

        pathlib.Path("STATS.json").write_text(executor.stats().to_json())
    """
    source = shown_name(options.stats)
    # `_load` checks the fields that any version has; others may still have unexpected types.
    stats = _load(read_text(options.stats), source)
    try:
        head, tables = summary_of(stats) or "", tables_of(stats)
    except (ArithmeticError, AttributeError, OSError, TypeError, ValueError) as error:
        why = in_one_line(error)
        raise CommandError(f"{source} has a field that is not as expected: {why}") from None
    if options.json:
        print(json.dumps(stats, indent=2))
    else:
        print_tables(tables, head)


def _load(text: str, source: str) -> Mapping[str, Any]:
    try:
        stats = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{source} is not JSON: {error}") from None
    buckets = stats.get("buckets") if isinstance(stats, dict) else None
    if (
        not isinstance(buckets, list)
        or "calls" not in stats
        or not all(isinstance(b, dict) and isinstance(b.get("sizes"), dict) for b in buckets)
    ):
        raise CommandError(
            f"{source} is no snapshot of counters: expected an object with 'calls' and a list of "
            "'buckets', each with its 'sizes', as executor.stats().to_json() has them"
        )
    return stats


# --- cache ---

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DAY = 86400.0
_LONGEST_CELL = 200  # characters of a cell of the table


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not days >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of days, got {text!r}")
    return days


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if not match:
        raise argparse.ArgumentTypeError(f"expected a size such as 500M or 2G, got {text!r}")
    return int(Decimal(match[1]) * _UNITS[match[2]])


@command(
    "cache",
    "list or prune the files of with_persistence",
    argument("action", nargs="?", choices=("list", "prune"), default="list", help="what to do"),
    argument("directory", metavar="DIR", type=named, help="the directory"),
    argument("--older-than", metavar="DAYS", type=_days, help="prune: of no use for so long"),
    argument("--max-size", metavar="SIZE", type=_size, help="prune: down to so much (500M, 2G)"),
)
def cache(options: argparse.Namespace) -> None:
    """Look after a directory of executables, as with_persistence(DIR) keeps them.

      list    what is there, the file that was of use last first; also where no action is named
      prune   remove damaged files, what was left unfinished, and what the options name

    JAX's own cache directory has them in its subdirectory bucketjit.
    """
    directory = Path(options.directory)
    entries = files.entries(directory)
    if options.action == "prune":
        _prune(directory, entries, options.older_than, options.max_size)
        return
    if options.older_than is not None or options.max_size is not None:
        raise UsageError("--older-than and --max-size are for prune")
    columns = ("function", "bucket", "made by", "size", "compiled in", "last use", "problem")
    total = shown_bytes(sum(entry.nbytes for entry in entries))
    title = f"{counted(len(entries), 'executable')}, {total}"
    numeric = ("size", "compiled in", "last use")
    print_tables([Table(title, columns, list(map(_row, entries)), numeric)])


def _row(entry: Entry) -> list[str]:
    size, used = shown_bytes(entry.nbytes), f"{(time.time() - entry.used) / _DAY:,.1f} d ago"
    record = entry.record
    if isinstance(record, Exception):
        problem = one_line(str(record) or in_one_line(record), LONGEST)
        return [entry.path.name[:24], "-", "-", size, "-", used, problem]
    environment = record.environment
    by = f"{environment.get('bucketjit', '?').partition(' ')[0]}, jax {environment.get('jax', '?')}"
    bucket = shown(record.sizes) + " (exact)" * record.exact
    cells = [one_line(text, _LONGEST_CELL) for text in (record.name, bucket, by)]
    return [*cells, size, f"{record.seconds:.2f} s", used, ""]


def _prune(
    directory: Path, entries: list[Entry], older_than: float | None, max_size: int | None
) -> None:
    """Remove files. What is not to be trusted, or read, stays unless the options name it."""
    files.remove_unfinished(directory)
    total, gone = 0, 0
    for entry in entries:  # the most recently used file comes first, so --max-size keeps that one
        why = None
        if isinstance(entry.record, Damaged):
            why = str(entry.record)
        elif older_than is not None and time.time() - entry.used > older_than * _DAY:
            why = f"of no use for {older_than:g} days"
        elif max_size is not None and total + entry.nbytes > max_size:
            why = "beyond the size"
        if why is None:
            total += entry.nbytes
            continue
        if not files.remove(entry.path):
            raise CommandError(f"cannot remove {entry.path}")
        gone += 1
        print(one_line(f"removed {entry.path.name}: {why}", LONGEST))
    print(f"removed {gone} of {counted(len(entries), 'file')}, {shown_bytes(total)} stay")


# --- unpack ---


@command(
    "unpack",
    "write a saved function as plain StableHLO files",
    argument("file", metavar="FILE", type=named, help="the .bkt file"),
    argument("directory", metavar="DIR", type=named, help="the directory to write"),
    argument("--platform", metavar="NAME", help="the one of several platforms to write for"),
    argument("--text", action="store_true", help="write the modules as MLIR text, too"),
    argument("--force", action="store_true", help="write into a directory with files"),
    argument("--key-file", metavar="KEY", help="a file with the key that FILE was signed with"),
)
def unpack(options: argparse.Namespace) -> None:
    """Write a function that BucketedExec.save has saved as plain files.

    They are a StableHLO module for each bucket, the constants as raw bytes, and layout.json, which
    says how to serve calls with them. A program in C++, Rust or Go with a PJRT plugin can do so,
    and so can IREE; neither Python nor JAX is needed.

        python -m bucketjit unpack model.bkt model/
    """
    # Keys are secrets, so they do not stand on the command line. Editors end a file with a
    # newline, which is no part of the key.
    key = None if options.key_file is None else Path(options.key_file).read_bytes()
    archive = Archive(options.file, key and key.removesuffix(b"\n").removesuffix(b"\r"))
    directory = Path(options.directory)
    how = options.platform, options.text, options.force
    written = unpacked.unpack(archive, directory, *how)
    files, nbytes = counted(len(written), "file"), shown_bytes(sum(written.values()))
    print(
        one_line(
            f"wrote {files}, {nbytes}, into {directory}: programs read {unpacked.LAYOUT}", LONGEST
        )
    )
