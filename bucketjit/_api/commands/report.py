"""The command ``report``: shows a saved snapshot of a bucketed function's counters as tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from bucketjit._api.commands.command import (
    Command,
    CommandError,
    argument,
    print_tables,
    read_text,
    shown_name,
)
from bucketjit._raised import in_one_line
from bucketjit._runtime.statistics import summary_of
from bucketjit._stages.report import tables_of

_DESCRIPTION = """\
Show a snapshot of a bucketed function's counters. Save one with

    pathlib.Path("STATS.json").write_text(executor.stats().to_json())
"""
_STANDARD_INPUT = "the snapshot; standard input by default, or for -"
_ARGUMENTS = (
    argument("stats", nargs="?", default="-", metavar="STATS.json", help=_STANDARD_INPUT),
    argument("--json", action="store_true", help="print the snapshot itself, checked"),
)


def _run(options: argparse.Namespace) -> None:
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
    """Parse a snapshot, and check the fields that the tables need."""
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


COMMAND = Command(
    "report",
    "show a saved snapshot of a bucketed function's counters",
    _DESCRIPTION,
    _ARGUMENTS,
    _run,
)
