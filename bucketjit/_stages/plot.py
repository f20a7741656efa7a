"""Draws a snapshot of the counters with matplotlib."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from bucketjit._events import printable
from bucketjit._extras import Extra
from bucketjit._runtime.statistics import Stats
from bucketjit.errors import SpecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 2  # drawings beside each other
_BARS = 60  # bars of a histogram of sizes, at most


def plot(path: str | os.PathLike[str], name: str, stats: Stats) -> None:
    """Draw sizes with buckets, and waste."""
    if not isinstance(path, str | os.PathLike) or not Path(path).suffix:
        raise SpecError(f"expected a path that ends in a format such as .png or .svg, got {path!r}")
    with Extra("plots", "matplotlib", "cli"):
        from matplotlib.figure import Figure
    formats = Figure().canvas.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in formats:
        raise SpecError(f"expected a path that ends in one of {', '.join(formats)}, got {path!r}")
    dims = list(stats.size_counts)
    rows = math.ceil((len(dims) + 1) / _COLUMNS)
    # Not with pyplot: it keeps every figure alive, and chooses a window system.
    figure = Figure(figsize=(11, 3.6 * rows), layout="constrained")
    figure.suptitle(
        f"{printable(name)}: {stats.calls:,} calls, {stats.compiles} compiles, "
        f"{stats.padding_waste:.0%} padding",
        parse_math=False,
    )
    spots = list(figure.subplots(rows, _COLUMNS, squeeze=False).flat)
    for axes, dim in zip(spots, dims, strict=False):
        _draw_sizes(axes, dim, stats)
    waste, *empty = spots[len(dims) :]
    _draw_waste(waste, stats)
    for axes in empty:
        axes.set_axis_off()
    figure.savefig(path)


def _draw_sizes(axes: Axes, dim: str, stats: Stats) -> None:
    """Draw calls by logical size, and the buckets that are compiled."""
    counts = stats.size_counts[dim]
    smallest, largest = min(counts), max(counts)
    step = math.ceil((largest - smallest + 1) / _BARS)
    edges = [smallest - 0.5 + step * i for i in range((largest - smallest) // step + 2)]
    axes.hist(list(counts), bins=edges, weights=list(counts.values()), color="0.7")
    buckets = {b.sizes[dim] for b in stats.buckets if dim in b.sizes and not b.exact}
    for i, bucket in enumerate(sorted(buckets)):
        axes.axvline(bucket, color="C3", linewidth=1, label=None if i else "bucket")
    axes.set(xlabel=dim, ylabel="calls", title=f"sizes of {dim}, and the buckets")
    if buckets:
        axes.legend()


def _draw_waste(axes: Axes, stats: Stats) -> None:
    shares = [*stats.dimension_waste.values(), stats.padding_waste]
    names = [*stats.dimension_waste, "all"]
    # Bars are placed by number: a variable may be called "all" too.
    drawn = axes.bar(range(len(names)), [100 * share for share in shares], color="C1")
    axes.set_xticks(range(len(names)), names)
    axes.bar_label(drawn, fmt="%.1f")
    axes.set(ylabel="padding, %", title="waste", ylim=(0, 100))
