"""Turns a snapshot of the counters into tables of text, for any kind of output.

The tables are made from the fields as they are in JSON. So a snapshot that another version saved is
shown too: unknown fields become rows and columns like the others.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_TIMES = ("last_used", "since")  # fields in seconds since 1970
_LISTS = {"buckets": "Executables", "programs": "Programs"}  # lists that become tables, with titles
_COMPUTED = "computed"  # the field of programs that becomes a table of its own


class Table(NamedTuple):
    """Rows of text.

    Attributes:
        title: The text above the rows.
        columns: The headings.
        rows: The cells.
        numeric: Headings of the columns to align to the right.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[str] = ()


def tables_of(stats: Mapping[str, Any]) -> list[Table]:
    """The tables of a snapshot."""
    counters = [
        (_words(name), shown(name, value))
        for name, value in stats.items()
        if not isinstance(value, Mapping | list | tuple)
    ]
    tables = [Table("Counters", ("counter", "value"), counters, ("value",))]
    for name, value in stats.items():
        if isinstance(value, Mapping) and value:
            title = _words(name)
            tables.append(Table(title.capitalize(), (title, "value"), _pairs(name, value), ()))
    for name, title in _LISTS.items():
        records = stats.get(name)
        if records:
            plain = [{k: v for k, v in one.items() if k != _COMPUTED} for one in records]
            tables.append(_records(title, plain))
            computed = [
                {"program": number, **size}
                for number, one in enumerate(records, 1)
                for size in one.get(_COMPUTED, ())
            ]
            if computed:
                tables.append(_records("Computed sizes", computed))
    return tables


def _words(name: str) -> str:
    return {"nbytes": "bytes"}.get(name, name.replace("_", " "))


def _pairs(name: str, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    are_counts = all(isinstance(v, Mapping) and v for v in values.values())
    if name != "size_counts" or not are_counts:
        return [(str(key), shown(name, value)) for key, value in values.items()]
    pairs = []
    for key, counts in values.items():  # `size_counts` has too many sizes to list each
        sizes = list(map(int, counts))
        calls = sum(counts.values())
        told = f"{min(sizes)} to {max(sizes)}, {len(sizes)} different in {calls:,} calls"
        pairs.append((str(key), told))
    return pairs


def _records(title: str, records: Sequence[Mapping[str, Any]]) -> Table:
    """A table with a row for each record. Each dimension variable is a column of sizes."""
    dims = list(dict.fromkeys(dim for r in records for dim in r.get("sizes", {})))
    fields = list(dict.fromkeys(f for r in records for f in r if f != "sizes"))
    rows = [
        [
            *(shown("", record.get("sizes", {}).get(dim)) for dim in dims),
            *(shown(field, record.get(field)) for field in fields),
        ]
        for record in records
    ]
    columns = [*dims, *map(_words, fields)]
    texts = [any(isinstance(r.get(f), str | list | tuple) for r in records) for f in fields]
    numeric = [*dims, *(_words(f) for f, text in zip(fields, texts, strict=True) if not text)]
    return Table(title, columns, rows, numeric)


def shown(name: str, value: object) -> str:
    """A value as text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if name in _TIMES:
            moment = datetime.datetime.fromtimestamp(value)
            return moment.isoformat(sep=" ", timespec="seconds")
        if name.endswith("seconds"):
            return f"{value:.2f} s"
        if name.endswith("waste"):
            return f"{value:.1%}"
        if name.endswith("bytes"):
            return shown_bytes(value)
        return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    if isinstance(value, list | tuple) and all(isinstance(x, str) for x in value):
        return "\n".join(value) or "-"
    return value if isinstance(value, str) else json.dumps(value)


def shown_bytes(count: float) -> str:
    """A number of bytes as text, such as ``1.5 MiB``."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"
