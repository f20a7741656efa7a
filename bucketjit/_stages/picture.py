"""The picture of a report in a notebook: calls by size, with buckets and padding, as SVG."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bucketjit._events import counted, printable

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
    strips, told = list[str](), list[str]()
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
        told.append(f"{text}; buckets {named}{more}.")
        parts = "".join(_strip(html.escape(text), calls, buckets, waste))
        strips.append(f'<g transform="translate(0 {_HEIGHT * len(strips)})">{parts}</g>')
    if not strips:
        return ""
    height = _HEIGHT * len(strips) + 16
    strips.append(f'<text x="{_MARGIN}" y="{height - 4}" opacity="0.7">{_LEGEND}</text>')
    alternative = html.escape(f"Calls by size (bars), and buckets (lines). {' '.join(told)}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" style="max-width: 100%" font-family="sans-serif" font-size="11" '
        f'fill="currentColor"><title>{alternative}</title>{"".join(strips)}</svg>'
    )


def _strip(
    text: str, calls: Mapping[int, int], buckets: Sequence[int], waste: float
) -> Iterator[str]:
    """The drawing of one variable."""
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
