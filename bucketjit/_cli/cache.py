"""The command ``cache``: lists, checks and removes the files of `BucketedExec.with_persistence`."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from bucketjit._cli.command import Command, CommandError, UsageError
from bucketjit._cli.tables import print_table
from bucketjit._events import LONGEST, counted, one_line, shown
from bucketjit._inspect.tables import shown_bytes
from bucketjit._persistence import files
from bucketjit._persistence.environment import versions
from bucketjit._persistence.files import Distrusted, Entry

_DESCRIPTION = """\
Look after a directory of executables, as with_persistence(DIR) keeps them:

  list    what is there, the file that was of use last first; also where no action is named
  verify  check every file; exit code 1 if one is damaged or not to be trusted
  prune   remove damaged files and what was left unfinished, and whatever the options name;
          what is not to be trusted, or read, is told of and stays, unless they name it

JAX's own cache directory has them in its subdirectory bucketjit.
"""
_ACTIONS = ("list", "verify", "prune")
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DAY = 86400.0
_LONGEST_CELL = 200  # characters of a cell of the table


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=_ACTIONS,
        default="list",
        metavar="list|verify|prune",
        help="what to do",
    )
    parser.add_argument("directory", metavar="DIR", help="the directory")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument(
        "--older-than", metavar="DAYS", type=_days, help="prune: what was of no use for so long"
    )
    parser.add_argument(
        "--max-size", metavar="SIZE", type=_size, help="prune: down to so much (500M, 2G)"
    )
    parser.add_argument(
        "--other-versions",
        action="store_true",
        help="prune: what other versions of bucketjit, jax, jaxlib or numpy have made",
    )
    parser.add_argument("--dry-run", action="store_true", help="prune: only tell")


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not days >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of days, got {text!r}")
    return days


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if not found:
        raise argparse.ArgumentTypeError(f"expected a size such as 500M or 2G, got {text!r}")
    return int(Decimal(found[1]) * _UNITS[found[2]])


def _run(options: argparse.Namespace) -> None:
    pruning = [
        name
        for name in ("older_than", "max_size", "other_versions", "dry_run")
        if getattr(options, name) not in (None, False)
    ]
    if options.action != "prune" and pruning:
        raise UsageError(f"--{pruning[0].replace('_', '-')} is for prune")
    if not options.directory:
        raise UsageError("the directory is an empty text")
    directory = Path(options.directory)
    try:
        found = files.entries(directory)
        unfinished = files.abandoned(directory)
    except OSError as error:
        raise CommandError(f"cannot read {directory}: {error.strerror or error}") from None
    if options.action == "prune":
        _prune(options, found, unfinished)
    else:
        _show(found, options.json)
    if options.action == "verify":
        _complain(directory, found)


def _complain(directory: Path, found: Sequence[Entry]) -> None:
    problems = [f"{entry.path.name}: {entry.problem}" for entry in found if entry.problem]
    try:
        files.check_directory(directory)
    except Distrusted as error:
        problems.insert(0, str(error))
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CommandError(f"{problems[0]}{more}")


def _show(found: Sequence[Entry], as_json: bool) -> None:
    if as_json:
        print(json.dumps([_told(entry) for entry in found], indent=1))
        return
    columns = ("function", "bucket", "made by", "for", "size", "compiled in", "last use", "problem")
    rows = [_row(entry) for entry in found]
    total = sum(entry.nbytes for entry in found)
    title = f"{counted(len(found), 'executable')}, {shown_bytes(total)}"
    print_table(title, columns, rows, numeric=("size", "compiled in", "last use"))


def _row(entry: Entry) -> list[str]:
    size, used = shown_bytes(entry.nbytes), f"{(time.time() - entry.used) / _DAY:,.1f} d ago"
    header = entry.header
    if header is None:
        return [entry.path.name[:24], "-", "-", "-", size, "-", used, _cell(entry.problem)]
    bucket = shown(header.sizes)
    made = header.environment
    version = made.get("bucketjit", "").partition(" ")[0] or "?"
    exact = " (exact)" if header.exact else ""
    told = [
        header.name,
        bucket + exact,
        f"{version}, jax {made.get('jax', '?')}",
        made.get("device", "?"),
    ]
    return [*map(_cell, told), size, f"{header.seconds:.2f} s", used, ""]


def _cell(text: str) -> str:
    """A text of a file, shortened for the table; ``--json`` has all of it."""
    return one_line(text, _LONGEST_CELL)


def _told(entry: Entry) -> dict[str, Any]:
    told: dict[str, Any] = {
        "file": entry.path.name,
        "bytes": entry.nbytes,
        "used": entry.used,
        "problem": entry.problem or None,
    }
    if (header := entry.header) is not None:
        told |= {
            "function": header.name,
            "sizes": dict(header.sizes),
            "exact": header.exact,
            "compile_seconds": header.seconds,
            "created": header.created,
            "environment": dict(header.environment),
        }
    return told


def _prune(options: argparse.Namespace, found: Sequence[Entry], unfinished: Sequence[Path]) -> None:
    reasons = {path: "unfinished" for path in unfinished}
    total = 0
    for entry in found:  # the most recently used file comes first, so --max-size keeps that one
        why = _why_to_go(options, entry)
        if why is None:
            if options.max_size is not None and total + entry.nbytes > options.max_size:
                why = "beyond the size"
            else:
                total += entry.nbytes
        if why is not None:
            reasons[entry.path] = why
    failed = []  # files that could not be removed
    if not options.dry_run:
        failed = [path for path in reasons if not files.remove(path)]
    gone = {path.name: why for path, why in reasons.items() if path not in failed}
    stays = {e.path.name: e.problem for e in found if e.problem and e.path not in reasons}
    if options.json:
        told = {"removed": gone, "problems": stays, "kept_bytes": total, "dry_run": options.dry_run}
        print(json.dumps(told))
    else:
        verb = "would remove" if options.dry_run else "removed"
        for name, why in gone.items():
            print(one_line(f"{verb} {name}: {why}", LONGEST))
        for name, why in stays.items():
            print(one_line(f"left {name}: {why}", LONGEST))
        every = counted(len(found) + len(unfinished), "file")
        print(f"{verb} {len(gone)} of {every}, {shown_bytes(total)} stay")
    if failed:
        raise CommandError(f"cannot remove {failed[0]}")


def _why_to_go(options: argparse.Namespace, entry: Entry) -> str | None:
    if entry.damaged:
        return entry.problem
    if options.older_than is not None and time.time() - entry.used > options.older_than * _DAY:
        return f"of no use for {options.older_than:g} days"
    if options.other_versions and entry.header is not None:
        made = entry.header.environment
        for name, version in versions().items():
            if made.get(name) != version:
                return f"made by {name} {made.get(name, '?')}"
    return None


COMMAND = Command(
    name="cache",
    summary="list, verify or prune the files of with_persistence",
    description=_DESCRIPTION,
    add_arguments=_add_arguments,
    run=_run,
)
