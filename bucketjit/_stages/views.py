"""The methods of `BucketedExec` that show what it has done: statistics, report, drawing, repr."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bucketjit._config import is_int_from
from bucketjit._events import counted, one_line
from bucketjit._ir.interface import Interface
from bucketjit._runtime import statistics
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.engine_parts import alive
from bucketjit.errors import SpecError

if TYPE_CHECKING:
    from bucketjit._config import Config
    from bucketjit._stages.report import Report


_LONGEST = 80  # characters of a strategy in the repr of a bucketed function
_EMPTY = '<svg xmlns="http://www.w3.org/2000/svg"/>'


class Views:
    """The methods of `BucketedExec` that show what it has done."""

    _config: Config
    _engine: Engine

    def stats(self) -> statistics.Stats:
        """A snapshot of what this bucketed function has done; see `Stats`.

        Counting costs a call well under a microsecond. A snapshot computes what it is asked for,
        and tells of the moment when it was taken; it keeps the bucketed function alive. The memory
        for counters is bounded: 64 reasons of fallbacks, of 500 characters each, with the rest
        counted as ``"other"``; 4,096 sizes of each dimension variable.

        Returns:
            The snapshot, which does not change any more.
        """
        engine, cache, counters = self._engine, self._engine.cache, self._engine.counters
        return counters.snapshot(
            cache.misses,
            cache.evictions,
            hits=lambda moment: cache.info(moment.told).hits,
            buckets=lambda moment: counters.buckets([s for _, s in cache.slots()], moment),
            programs=lambda moment: _programs(engine),
            learnt=lambda moment: _learnt(engine, moment),
        )

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
        self._engine.counters.reset()
        self._engine.cache.reset_counts()

    def report(self, memory: int | None = None) -> Report:
        """The counters as tables: ``print`` them, or show them in a notebook.

        The first line says what bucketing has saved, as `Stats.summary` does.

        Args:
            memory: Bytes of a device. A line tells which executables need more for a call.

        Returns:
            A `Report`: text where it is printed; a picture and HTML in a notebook.

        Raises:
            SpecError: ``memory`` is no positive int.

        Examples:
            >>> import numpy as np
            >>> import bucketjit
            >>> double = bucketjit.jit(lambda x: x * 2, buckets="pow2")
            >>> _ = double(np.ones(3, np.float32))
            >>> "Executables" in str(double.report())
            True
        """
        from bucketjit._stages.report import Report

        if memory is not None and not is_int_from(memory, 1):
            raise SpecError(f"report: memory must be a number of bytes or None, got {memory!r}")
        return Report(repr(self), dataclasses.asdict(self.stats()), memory)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write the picture of `report`: calls by size, with buckets and padding.

        Args:
            path: The file to write, which ends in ``.svg``.

        Raises:
            SpecError: ``path`` does not end so.
            OSError: The file cannot be written.
        """
        if not isinstance(path, str | os.PathLike) or Path(path).suffix.lower() != ".svg":
            raise SpecError(f"expected a path that ends in .svg, got {path!r}")
        Path(path).write_text(self.report().picture or _EMPTY, encoding="utf-8")

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def __repr__(self) -> str:
        config = self._config
        parts = [repr(config.default), *(f"{d}: {s!r}" for d, s in config.per_dim.items())]
        parts = [p if len(p) <= _LONGEST else f"{p[: _LONGEST - 3]}..." for p in parts]
        name = getattr(config.fn, "__qualname__", None) or repr(config.fn)
        size = counted(len(self._engine.cache), "executable")
        line = f"<BucketedExec {name}, {', '.join(parts)}, {size}>"
        return one_line(line)


def _every_program(engine: Engine) -> Iterator[tuple[Engine, tuple[str, ...], Interface]]:
    """The programs of a bucketed function and of its derivatives, with engine and inputs."""
    for member in alive(engine.shared.engines):
        for signature in member.signer.signatures():
            for inputs, program in signature.programs():
                yield member, inputs, program


def _programs(engine: Engine) -> tuple[statistics.ProgramStats, ...]:
    # Executables of exact shapes have a signature in place of a program in their keys.
    owners = [key[0] for key, _ in engine.cache.slots()]
    return tuple(
        statistics.ProgramStats(
            inputs=inputs,
            guards=tuple(map(str, program.guards)),
            kind="symbolic" if program.pairing is None else "paired",
            executables=sum(owner is program for owner in owners),
            refused=None if why is None else statistics.shown_reason(why.reason),
            computed=_computed(engine, program),
        )
        for member, inputs, program in _every_program(engine)
        for why in [member.refusals.of_program(program)]
    )


def _learnt(engine: Engine, moment: statistics.Moment) -> tuple[statistics.LearntBucket, ...]:
    for earlier in engine.counters.history.moments():  # what is learnt later adds to it
        if earlier is moment:
            break
        earlier.ask("learnt")
    learnt: list[statistics.LearntBucket] = []
    for member, _, program in _every_program(engine):
        for of_rows in (False, True):
            learning = member.buckets.learning(program, of_rows=of_rows)
            if learning is not None:
                with member.lock:
                    learnt += learning.learnt(moment.told)
    return tuple(learnt)


def _computed(engine: Engine, program: Interface) -> tuple[statistics.ComputedSizeStats, ...]:
    """The sizes that a program computes, and what runs have told of them."""
    selected = engine.counters.selected_by(program)
    return tuple(
        statistics.ComputedSizeStats(
            *(f"{variable} - 1", size.bound, one_line(size.line)), *selected.get(variable, ())
        )
        for variable, size in program.computed.items()
    )
