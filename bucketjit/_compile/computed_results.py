"""Cut results of computed sizes: the sizes come from the executable, with the results.

executable   (results, counts:i32[k])       counts of `Interface.counts`
host         wait for the counts, check them, cut the results

`Padded` results are not cut, so they wait for nothing: each asks for its size when it is needed.
Only counts that must be checked are waited for at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from bucketjit._arrays.results import Change
from bucketjit._ir.expressions import evaluate_text, variables_of
from bucketjit._ir.interface import Interface
from bucketjit.errors import ArgumentError

_KEPT = 64  # counts whose functions are kept


class SizesDiffer(Exception):
    """A program was traced for other computed sizes than those of a call.

    Its results are wrong, and are dropped.

    Attributes:
        computed: The computed sizes that the run has returned, by variable.
    """

    def __init__(self, computed: Mapping[str, int]) -> None:
        super().__init__(f"computed sizes are {dict(computed)}")
        self.computed = computed


class Selected(Protocol):
    """Learns what runs have selected; see `bucketjit._runtime.counters.Counters`."""

    def selected(self, program: Interface, rows: Mapping[str, tuple[int, int]]) -> None:
        """Count a run."""

    def dropped(self) -> None:
        """Count a run whose results are dropped."""


class Counts:
    """The computed sizes of the runs of calls of equal sizes.

    Each different row of counts is checked once, and the latest are remembered.
    """

    def __init__(
        self, program: Interface, sizes: Mapping[str, int], observer: Selected | None
    ) -> None:
        self._program, self._sizes, self._observer = program, sizes, observer
        # For each row of counts: the numbers of rows that were selected, and of those there are.
        self._known: dict[tuple[int, ...], dict[str, tuple[int, int]]] = {}

    def of(self, returned: Any) -> tuple[int, ...]:
        """Wait for the computed sizes of a run."""
        rows = tuple(np.asarray(returned).tolist())
        told = self._known.get(rows)
        if told is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            told = self._known[rows] = self._checked(rows)
        if self._observer is not None:
            self._observer.selected(self._program, told)
        return tuple([n + 1 for n in rows])

    def _checked(self, rows: tuple[int, ...]) -> dict[str, tuple[int, int]]:
        program = self._program
        computed = {v: n + 1 for v, n in zip(program.counts, rows, strict=True)}
        at = {**self._sizes, **computed}
        if not all(guard.holds(at) for guard in program.presumed):
            if self._observer is not None:
                self._observer.dropped()
            raise SizesDiffer(computed)
        bounds = _bounds(program, at)
        if program.computed_reshapes:
            program.check_reshapes(at)
        return {v: (computed[v] - 1, of) for v, of in bounds.items()}


def _bounds(program: Interface, at: Mapping[str, int]) -> dict[str, int]:
    """The number of rows that each count is chosen from, where it is known."""
    bounds = {}
    for variable in program.counts:
        made = program.computed[variable]
        if not at.keys() >= set(variables_of(made.bound)):
            continue
        rows = bounds[variable] = evaluate_text(made.bound, at)
        n = at[variable] - 1
        if made.is_checked and not 0 <= n <= rows:
            where = f" [{made.line}]" if made.line else ""
            raise ArgumentError(
                f"a size that the function computes is {n}{where}; it must be from 0 to {rows}"
            )
    return bounds


def finisher_of_counts(
    counts: Counts,
    finisher_at: Callable[[Sequence[int]], Change | None],
    later: Callable[[Callable[[], Sequence[int]]], Change | None] | None = None,
) -> Change:
    """Make the function that cuts the results of an executable which returns counts."""
    known: dict[tuple[int, ...], Change | None] = {}

    def finish(pair: Any) -> Any:
        results, returned = pair
        if later is not None:
            # Results that have computed sizes share the answer of one run.
            change = later(functools.cache(lambda: counts.of(returned)))
            return results if change is None else change(results)
        key = counts.of(returned)
        if key not in known:
            if len(known) >= _KEPT:
                known.clear()
            known[key] = finisher_at(key)
        change = known[key]
        return results if change is None else change(results)

    return finish
