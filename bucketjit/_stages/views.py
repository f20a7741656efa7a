"""The methods of `BucketedExec` that show what it has done: statistics, report, drawing, repr."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from bucketjit._events import counted, one_line
from bucketjit._ir.interface import Interface
from bucketjit._runtime.call_counts import SelectedRows
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.statistics import ComputedSizeStats, ProgramStats, Stats, shown_reason
from bucketjit._stages.plot import plot
from bucketjit._stages.report import Report
from bucketjit.strategies import Exact

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
        return engine.counters.snapshot(
            info.hits, info.misses, engine.cache.evictions, slots, _programs(engine)
        )

    def reset_stats(self) -> None:
        """Reset the counters to zero, those of `cache_info` included. Executables are kept.

        Examples:
            >>> import numpy as np
            >>> from bucketjit import BucketedExec
            >>> double = BucketedExec(lambda x: x * 2).with_pow2()
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
            A `Report`: plain text, in colour on a terminal if rich is installed (the extra
            ``cli``); HTML in a notebook; and a rich renderable.

        Examples:
            >>> import numpy as np
            >>> from bucketjit import BucketedExec
            >>> double = BucketedExec(lambda x: x * 2).with_pow2()
            >>> _ = double(np.ones(3, np.float32))
            >>> "Executables" in str(double.report())
            True
        """
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
    for other in engine.shared.engines:
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
