"""``report STATS.json``: a snapshot of an executor's counters, as tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from bucketjit._cli.command import Command, CommandError
from bucketjit._cli.files import read_text, shown_name
from bucketjit._cli.tables import print_table

_DESCRIPTION = """\
Show a snapshot of an executor's counters. Save one with

    json.dump(dataclasses.asdict(executor.stats()), file)
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stats", metavar="STATS.json", help="the snapshot; - for standard input")


def _run(options: argparse.Namespace) -> None:
    stats = _load(read_text(options.stats), shown_name(options.stats))
    counters = [
        (name.replace("_", " "), _shown(name, value))
        for name, value in stats.items()
        if not isinstance(value, Mapping | list)
    ]
    print_table("Counters", ("counter", "value"), counters, numeric=("value",))
    for name, value in stats.items():
        if isinstance(value, Mapping) and value:
            rows = [(str(key), _shown(name, number)) for key, number in value.items()]
            heading = name.replace("_", " ")
            print_table(heading.capitalize(), (heading, "value"), rows, numeric=("value",))
    _print_buckets(stats["buckets"])


def _load(text: str, source: str) -> Mapping[str, Any]:
    """A snapshot, with the fields that it cannot do without."""
    try:
        stats = json.loads(text)
    except json.JSONDecodeError as error:
        raise CommandError(f"{source} is not JSON: {error}") from None
    buckets = stats.get("buckets") if isinstance(stats, dict) else None
    if (
        not isinstance(buckets, list)
        or "calls" not in stats
        or not all(isinstance(b, dict) and isinstance(b.get("sizes"), dict) for b in buckets)
    ):
        raise CommandError(
            f"{source} is no snapshot of counters: expected an object with 'calls' and a list of "
            "'buckets', each with its 'sizes', as dataclasses.asdict(executor.stats()) has them"
        )
    return stats


def _print_buckets(buckets: list[dict[str, Any]]) -> None:
    """One row for each executable; fields that are not known here are columns too."""
    if not buckets:
        return
    dims = list(dict.fromkeys(dim for bucket in buckets for dim in bucket["sizes"]))
    fields = list(dict.fromkeys(f for bucket in buckets for f in bucket if f != "sizes"))
    rows = [
        [
            *(_shown(dim, bucket["sizes"].get(dim)) for dim in dims),
            *(_shown(field, bucket.get(field)) for field in fields),
        ]
        for bucket in buckets
    ]
    columns = [*dims, *(field.replace("_", " ") for field in fields)]
    print_table("Executables", columns, rows, numeric=columns)


def _shown(name: str, value: object) -> str:
    """A number in its unit, which its name tells."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if name.endswith("seconds"):
            return f"{value:.2f} s"
        if name.endswith("waste"):
            return f"{value:.1%}"
        if name.endswith("bytes"):
            return f"{value / 2**20:,.1f} MiB"
        return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return value if isinstance(value, str) else json.dumps(value)


COMMAND = Command(
    name="report",
    summary="show a saved snapshot of an executor's counters",
    description=_DESCRIPTION,
    add_arguments=_add_arguments,
    run=_run,
)
