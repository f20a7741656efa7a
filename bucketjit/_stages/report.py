"""A snapshot of the counters as tables, in terminals, files and notebooks, and as a picture.

The tables are made from the fields as they are in JSON. So a snapshot that another version saved is
shown too: unknown fields become rows and columns like the others.
"""

from __future__ import annotations

import datetime
import html
import json
import math
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bucketjit._events import counted, printable
from bucketjit._events import shown as shown_sizes
from bucketjit._runtime.statistics import summary_of

_TIMES = ("last_used", "since")  # fields in seconds since 1970
# Lists that become tables, with titles.
_LISTS = {"buckets": "Executables", "programs": "Programs", "learnt": "Learnt buckets"}
_LONGEST_BAR = 20  # characters
_COMPUTED = "computed"  # the field of programs that becomes a table of its own
_NESTED = (_COMPUTED, "memory")  # fields that are no columns as they are


class Table(NamedTuple):
    """Rows of text under headings; the columns in ``numeric`` are aligned to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[str] = ()


def tables_of(stats: Mapping[str, Any]) -> list[Table]:
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
        records = [record for record in stats.get(name) or () if record]
        if records:
            plain = [{k: v for k, v in record.items() if k not in _NESTED} for record in records]
            if name == "learnt":
                unit = max(1, *(record.get("calls", 0) for record in records)) / _LONGEST_BAR
                for record in plain:
                    record[""] = "\N{FULL BLOCK}" * math.ceil(record.get("calls", 0) / unit)
            tables.append(_records(title, plain))
            if memory := [_memory(record) for record in records if record.get("device")]:
                tables.append(_records("Memory of other devices", memory))
            computed = [
                {"program": number, **size}
                for number, record in enumerate(records, 1)
                for size in record.get(_COMPUTED, ())
            ]
            if computed:
                tables.append(_records("Computed sizes", computed))
    return tables


def _memory(bucket: Mapping[str, Any]) -> dict[str, Any]:
    """What an executable needs on a device: all that is known of one that is not here."""
    parts = {f"{what} bytes": n for what, n in bucket.get("memory", {}).items()}
    return {**parts, **{name: bucket[name] for name in ("sizes", "device")}}


def _words(name: str) -> str:
    words = {"nbytes": "bytes", "inlined_calls": "calls inside jit, vmap and the like"}
    return words.get(name, name.replace("_", " "))


def _pairs(name: str, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    are_counts = all(isinstance(v, Mapping) and v for v in values.values())
    if name != "size_counts" or not are_counts:
        return [(str(key), shown(name, value)) for key, value in values.items()]
    pairs = []
    for key, counts in values.items():  # `size_counts` has too many sizes to list each
        sizes = list(map(int, counts))
        calls = sum(counts.values())
        summary = f"{min(sizes)} to {max(sizes)}, {len(sizes)} different in {calls:,} calls"
        pairs.append((str(key), summary))
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
    if name == "kind" and value == "paired":
        return "traced at several sizes"
    return value if isinstance(value, str) else json.dumps(value)


def shown_bytes(count: float) -> str:
    """A number of bytes as text, such as ``1.5 MiB``."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"


_GAP = "  "  # between two columns


def _widths(rows: Sequence[Sequence[Sequence[str]]], room: int) -> list[int]:
    """The width of each column: that of its longest line, or less if there is no room for all."""
    columns = zip(*rows, strict=True)
    widths = [max(1, *(len(line) for cell in column for line in cell)) for column in columns]
    most = max(widths)
    while most > 1 and sum(min(n, most) for n in widths) > room:
        most -= 1
    return [min(n, most) for n in widths]


def _row(
    row: Sequence[Sequence[str]], widths: Sequence[int], is_right: Sequence[bool]
) -> Iterator[str]:
    """The lines of a row, whose cells are lines of any length."""
    cells = [
        [piece for line in cell for piece in textwrap.wrap(line, width) or [""]]
        for cell, width in zip(row, widths, strict=True)
    ]
    for i in range(max(map(len, cells))):
        parts = [
            text.rjust(width) if right else text.ljust(width)
            for cell, width, right in zip(cells, widths, is_right, strict=True)
            for text in [cell[i] if i < len(cell) else ""]
        ]
        yield _GAP.join(parts).rstrip()


_WIDTH_OF_A_FILE = 120  # characters of a line in output that is no terminal
_NARROWEST = 40


def _exceeding(buckets: Sequence[Mapping[str, Any]], memory: int | None) -> str:
    """Which executables need more than a number of bytes on a device, in words."""
    if memory is None:
        return ""
    needs = [(sum(b.get("memory", {}).values()), shown_sizes(b["sizes"])) for b in buckets]
    large = [f"{sizes} ({shown_bytes(n)})" for n, sizes in needs if n > memory]
    of = f"{len(large) or 'none'} of {counted(len(needs), 'executable')} need more than "
    return ": ".join(filter(None, (f"{of}{shown_bytes(memory)} of memory", ", ".join(large))))


class Report:
    """The counters of a bucketed function, as tables; the first line says what was saved.

    ``print`` it, as wide as the terminal. In a notebook it is HTML, below a picture.

    Args:
        title: The text above the tables.
        stats: ``dataclasses.asdict`` of a `bucketjit.types.Stats`, or the same read from JSON.
        memory: Bytes of a device, to tell which executables need more; None not to.

    Attributes:
        title: The text above the tables.
        exceeding: Which executables need more than ``memory``; ``""`` without it.
        summary: What bucketing has saved, in one line; see `bucketjit.types.Stats.summary`.
        picture: Calls by size, with buckets and padding, as SVG; ``""`` without calls.
        tables: The tables.
    """

    def __init__(self, title: str, stats: Mapping[str, Any], memory: int | None = None) -> None:
        self.title = title
        self.exceeding = _exceeding(stats.get("buckets") or (), memory)
        self.summary = summary_of(stats) or ""
        self.picture = picture_of(stats)
        self.tables = tuple(tables_of(stats))

    @property
    def _heads(self) -> list[str]:
        return [printable(text) for text in (self.summary, self.exceeding, self.title) if text]

    def __str__(self) -> str:
        return "\n".join([*self._heads, *text_of(self.tables)])

    def __repr__(self) -> str:
        return f"<Report of {printable(self.title) or 'a snapshot'}>"

    def _repr_html_(self) -> str:
        return as_html(self._heads, self.picture, self.tables)


def text_of(tables: Sequence[Table]) -> Iterator[str]:
    """The lines of tables, as wide as standard output; long cells go on in further lines."""
    width = _WIDTH_OF_A_FILE
    if "COLUMNS" in os.environ or (sys.stdout is not None and sys.stdout.isatty()):
        width = max(shutil.get_terminal_size().columns, _NARROWEST)
    for table in tables:
        cells = [
            [printable(cell).split("\n") for cell in row] for row in (table.columns, *table.rows)
        ]
        widths = _widths(cells, width - len(_GAP) * (len(table.columns) - 1))
        is_right = [column in table.numeric for column in table.columns]
        yield from ("", printable(table.title))
        for number, row in enumerate(cells):
            yield from _row(row, widths, is_right)
            if number == 0:
                yield "-" * (sum(widths) + len(_GAP) * (len(widths) - 1))


def as_html(heads: Sequence[str], picture: str, tables: Sequence[Table]) -> str:
    """Tables as HTML, after some lines and a picture. All their texts are escaped."""
    parts = [*(f"<p><code>{_escaped(text)}</code></p>" for text in heads), picture]
    for table in tables:
        align = ["right" if c in table.numeric else "left" for c in table.columns]
        head = _cells("th", table.columns, align)
        body = "".join(f"<tr>{_cells('td', row, align)}</tr>" for row in table.rows)
        parts.append(
            f"<details open><summary><b>{_escaped(table.title)}</b></summary>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></details>"
        )
    return f'<div class="bucketjit">{"".join(parts)}</div>'


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def _cells(tag: str, texts: Sequence[str], align: Sequence[str]) -> str:
    return "".join(
        f'<{tag} style="text-align: {where}; white-space: pre-wrap">{_escaped(text)}</{tag}>'
        for text, where in zip(texts, align, strict=True)
    )


# --- the picture ---

_WIDTH, _HEIGHT, _MARGIN = 560, 112, 8  # of the strip of one variable
_TOP, _GROUND = 34, 92  # where bars end and begin; titles are above, sizes below
_BARS, _SHARE = 70, 120  # bars of one variable, at most; the width of data with padding
_NAMED = 20  # buckets of one variable that text names, at most
_APART = 26  # between two sizes in text, so that they do not overlap
# Middle tones, which are seen on light ground and on dark. Text has the colour of the page.
_CALL, _BUCKET = "#4c8bc8", "#e07b39"
_LEGEND = "bars: calls by size; lines: buckets; at the top right: data, and padding"


def picture_of(stats: Mapping[str, Any]) -> str:
    """An SVG of a snapshot, with a text alternative; ``""`` without calls of open sizes."""
    strips, texts = list[str](), list[str]()
    for dim, by_size in stats.get("size_counts", {}).items():
        calls = {int(n): count for n, count in by_size.items()}
        padded = [b["sizes"] for b in stats["buckets"] if not b["exact"]]
        buckets = sorted({sizes[dim] for sizes in padded if dim in sizes})
        waste = stats["dimension_waste"].get(dim, 0.0)
        text = (
            f"{printable(dim)}: {counted(sum(calls.values()), 'call')} of "
            f"{counted(len(calls), 'size')}, {counted(len(buckets), 'bucket')}, "
            f"{100 * waste:.0f} % padding"
        )
        named = ", ".join(map(str, buckets[:_NAMED])) or "none"
        more = f", ..., {buckets[-1]}" if len(buckets) > _NAMED else ""
        texts.append(f"{text}; buckets {named}{more}.")
        parts = "".join(_strip(html.escape(text), calls, buckets, waste))
        strips.append(f'<g transform="translate(0 {_HEIGHT * len(strips)})">{parts}</g>')
    if not strips:
        return ""
    height = _HEIGHT * len(strips) + 16
    strips.append(f'<text x="{_MARGIN}" y="{height - 4}" opacity="0.7">{_LEGEND}</text>')
    alternative = html.escape(f"Calls by size (bars), and buckets (lines). {' '.join(texts)}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" style="max-width: 100%" font-family="sans-serif" font-size="11" '
        f'fill="currentColor"><title>{alternative}</title>{"".join(strips)}</svg>'
    )


def _strip(
    text: str, calls: Mapping[int, int], buckets: Sequence[int], waste: float
) -> Iterator[str]:
    step = math.ceil((max(calls) + 1) / _BARS)
    bars = Counter[int]()
    for n, count in calls.items():
        bars[n // step] += count
    scale = (_WIDTH - 2 * _MARGIN) / (max([*calls, *buckets]) + step)
    yield f'<text x="{_MARGIN}" y="14">{text}</text>'
    data, left = _SHARE * (1 - waste), _WIDTH - _MARGIN - _SHARE
    yield _box(left, 6, data, 8, _CALL) + _box(left + data, 6, _SHARE - data, 8, _BUCKET)
    for place, count in bars.items():
        height = (_GROUND - _TOP) * count / max(bars.values())
        x, width = _MARGIN + scale * place * step, max(scale * step - 1, 1)
        yield _box(x, _GROUND - height, width, height, _CALL)
    yield _box(_MARGIN, _GROUND, _WIDTH - 2 * _MARGIN, 0.5, "currentColor")
    free = math.inf  # the smallest place that text has taken
    drawn = math.inf  # the place of the last line
    for bucket in reversed(buckets):
        x = _MARGIN + scale * (bucket + step)  # behind the bar of calls that fill the bucket
        if drawn - x < 2:  # lines of 1.5 would overlap
            continue
        drawn = x
        yield _box(x - 1, _TOP - 6, 1.5, _GROUND - _TOP + 6, _BUCKET)
        if x < free:
            free, x = x - _APART, min(x, _WIDTH - 2 * _MARGIN)
            yield f'<text x="{x:.1f}" y="{_GROUND + 13}" text-anchor="middle">{bucket}</text>'


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
    )
