"""The methods of `BucketedExec` that show what it has done: statistics, report, drawing, repr."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from bucketjit._events import counted, one_line, printable
from bucketjit._ir.interface import Interface
from bucketjit._runtime.counters import SelectedRows
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.engine_parts import alive
from bucketjit._runtime.statistics import (
    ComputedSizeStats,
    LearntBucket,
    ProgramStats,
    Stats,
    shown_reason,
)
from bucketjit.errors import SpecError
from bucketjit.strategies import Exact

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bucketjit._stages.report import Report

_COLUMNS = 2  # drawings beside each other
_BARS = 60  # bars of a histogram of sizes, at most


def plot(path: str | os.PathLike[str], name: str, stats: Stats) -> None:
    """Draw sizes with buckets, and waste."""
    from bucketjit._extras import Extra

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


if TYPE_CHECKING:
    from bucketjit._config import Config


_LONGEST = 80  # characters of a strategy in the repr of a bucketed function


class Views:
    """The methods of `BucketedExec` that show what it has done."""

    _config: Config
    _engine: Engine

    def stats(self) -> Stats:
        """A snapshot of what this bucketed function has done; see `Stats`.

        Counting costs a call well under a microsecond; sums are made when a snapshot is taken. The
        memory for counters is bounded: 64 reasons of fallbacks, of 500 characters each, with the
        rest counted as ``"other"``; 4,096 sizes of each dimension variable.

        Returns:
            The snapshot, which does not change any more.
        """
        engine = self._engine
        info = engine.cache.info()
        slots = [slot for _, slot in engine.cache.slots()]
        found = slots, _programs(engine), _learnt(engine)
        return engine.counters.snapshot(info.hits, info.misses, engine.cache.evictions, *found)

    def reset_stats(self) -> None:
        """Reset the counters to zero, those of `cache_info` included. Executables are kept.

        Examples:
            >>> import numpy as np
            >>> import bucketjit
            >>> double = bucketjit.jit(lambda x: x * 2, buckets="pow2")
            >>> _ = double(np.ones(3, np.float32))
            >>> double.reset_stats()
            >>> double.stats().calls, double.cache_size()
            (0, 1)
        """
        self._engine.cache.reset_counts()
        self._engine.counters.reset()

    def report(self) -> Report:
        """The counters as tables: ``print`` them, or show them in a notebook.

        The first line says what bucketing has saved, as `Stats.summary` does.

        Returns:
            A `Report`: text where it is printed; a picture and HTML in a notebook.

        Examples:
            >>> import numpy as np
            >>> import bucketjit
            >>> double = bucketjit.jit(lambda x: x * 2, buckets="pow2")
            >>> _ = double(np.ones(3, np.float32))
            >>> "Executables" in str(double.report())
            True
        """
        from bucketjit._stages.report import Report

        return Report(repr(self), dataclasses.asdict(self.stats()))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw sizes with buckets, and waste.

        Args:
            path: The file to write; its suffix chooses the format, such as ``.png`` or ``.svg``.

        Raises:
            MissingExtraError: matplotlib is not installed; the extra ``cli`` installs it.
            SpecError: ``path`` has no suffix, or one of a format that matplotlib does not write.
            OSError: The file cannot be written.
        """
        plot(path, self._engine.name, self.stats())

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def __repr__(self) -> str:
        config = self._config
        parts = [f"{d}: {s!r}" for d, s in config.per_dim.items()]
        if config.plan is None or not isinstance(config.default, Exact):
            parts.insert(0, repr(config.default))
        if config.plan is not None:
            parts.insert(0, repr(config.plan))
        parts = [p if len(p) <= _LONGEST else f"{p[: _LONGEST - 3]}..." for p in parts]
        name = getattr(config.fn, "__qualname__", None) or repr(config.fn)
        size = counted(len(self._engine.cache), "executable")
        line = f"<BucketedExec {name}, {', '.join(parts)}, {size}>"
        return one_line(line)


def _programs(engine: Engine) -> tuple[ProgramStats, ...]:
    """The programs of a bucketed function and of its derivatives."""
    # Executables of exact shapes have a signature in place of a program in their keys.
    stored = [key[0] for key, _ in engine.cache.slots()]
    found = []
    for other in alive(engine.shared.engines):
        for signature in other.signer.signatures():
            for inputs, program in signature.programs():
                refusal = other.refusals.of_program(program)
                found.append(
                    ProgramStats(
                        inputs=inputs,
                        guards=tuple(map(str, program.guards)),
                        kind="symbolic" if program.pairing is None else "paired",
                        executables=sum(owner is program for owner in stored),
                        refused=None if refusal is None else shown_reason(refusal.reason),
                        computed=_computed(engine, program),
                    )
                )
    return tuple(found)


def _learnt(engine: Engine) -> tuple[LearntBucket, ...]:
    """The buckets that a bucketed function and its derivatives have learnt."""
    found = []
    for other in alive(engine.shared.engines):
        for signature in other.signer.signatures():
            for _, program in signature.programs():
                for of_rows in (False, True):
                    learning = other.buckets.learning(program, of_rows=of_rows)
                    if learning is not None:
                        with other.lock:
                            found += learning.learnt()
    return tuple(found)


def _computed(engine: Engine, program: Interface) -> tuple[ComputedSizeStats, ...]:
    """The sizes that a program computes, and what runs have told of them."""
    told = engine.counters.selected_by(program)
    return tuple(
        ComputedSizeStats(
            size=f"{variable} - 1",
            bound=made.bound,
            line=one_line(made.line),
            **dataclasses.asdict(told.get(variable, SelectedRows())),
        )
        for variable, made in program.computed.items()
    )
