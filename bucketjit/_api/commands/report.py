"""The command ``report``: shows a saved snapshot of a bucketed function's counters as tables."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from bucketjit._api.commands.command import (
    Command,
    CommandError,
    print_tables,
    read_text,
    shown_name,
)
from bucketjit._raised import in_one_line
from bucketjit._runtime.statistics import Stats
from bucketjit._runtime.summary import summary_of
from bucketjit._stages.report import tables_of

_DESCRIPTION = """\
Show a snapshot of a bucketed function's counters. Save one with

    pathlib.Path("STATS.json").write_text(executor.stats().to_json())
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "stats",
        nargs="?",
        default="-",
        metavar="STATS.json",
        help="the snapshot; standard input by default, or for -",
    )
    parser.add_argument("--json", action="store_true", help="print the snapshot itself, checked")


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
        stats = json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        raise CommandError(f"{source} is not JSON: {error}") from None
    except RecursionError:
        raise CommandError(f"{source} is not JSON of a snapshot: it is nested too deeply") from None
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
    for name, value in stats.items():
        kind = _KINDS.get(name)
        if kind is not None and not _is(kind, value):
            what = "a count" if kind is int else "a number of 0 or more"
            raise CommandError(f"{source}: {name}: expected {what}, got {json.dumps(value)[:80]}")
    return stats


# The numbers of `Stats` by name. Annotations are text: the module postpones their evaluation.
_KINDS = {
    field.name: {"int": int, "float": float}[field.type]
    for field in dataclasses.fields(Stats)
    if field.type in ("int", "float")
}


def _is(kind: type, value: Any) -> bool:
    """Whether a value of JSON is a number of a kind, not negative and below ``2**63``."""
    kinds = (int,) if kind is int else (int, float)
    return type(value) in kinds and 0 <= value < 2**63


def _refuse(constant: str) -> NoReturn:
    """Refuse NaN and infinities, which Python's parser accepts and JSON does not have."""
    raise ValueError(f"{constant} is no value of JSON")


COMMAND = Command(
    name="report",
    summary="show a saved snapshot of a bucketed function's counters",
    description=_DESCRIPTION,
    add_arguments=_add_arguments,
    run=_run,
)
