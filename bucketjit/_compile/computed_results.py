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
from bucketjit.errors import ArgumentError, MaskingError

_KEPT = 64  # rows of counts that are remembered


class NothingSelected(MaskingError):
    """A run has selected nothing, where its program is traced for an array that is not empty.

    Its results are wrong, and are dropped.
    """


class Selected(Protocol):
    """Learns what runs have selected; see `bucketjit._runtime.counters.Counters`."""

    def selected(self, program: Interface, rows: Mapping[str, tuple[int, int]]) -> None:
        """Count a run."""


def counts_of(
    program: Interface, sizes: Mapping[str, int], observer: Selected | None
) -> Callable[[Any], tuple[int, ...]]:
    """A function that waits for the computed sizes of a run, and checks them.

    The runs are of calls of equal sizes. Each different row of counts is checked once.
    """

    @functools.lru_cache(_KEPT)
    def checked(rows: tuple[int, ...]) -> Mapping[str, tuple[int, int]]:
        """For each count, the number of rows that were selected, and of those there are."""
        computed = {v: n + 1 for v, n in zip(program.counts, rows, strict=True)}
        every_size = {**sizes, **computed}
        for guard in program.presumed:
            if not guard.holds(every_size):
                origin = program.computed[min(guard.variables & program.computed.keys())]
                where = f" [{origin.line}]" if origin.line else ""
                raise NothingSelected(
                    f"a decision needs an array that is not empty ({guard}), and it is{where}",
                    "say what an empty array gives, as in x[mask].max(initial=0)",
                )
        bounds = _bounds(program, every_size)
        if program.computed_reshapes:
            program.check_reshapes(every_size)
        return {v: (computed[v] - 1, of) for v, of in bounds.items()}

    def wait(returned: Any) -> tuple[int, ...]:
        rows = tuple(np.asarray(returned).tolist())
        selected = checked(rows)
        if observer is not None:
            observer.selected(program, selected)
        return tuple([n + 1 for n in rows])

    return wait


def _bounds(program: Interface, sizes: Mapping[str, int]) -> dict[str, int]:
    """The number of rows that each count is chosen from, where it is known."""
    bounds = {}
    for variable in program.counts:
        origin = program.computed[variable]
        if not sizes.keys() >= set(variables_of(origin.bound)):
            continue
        rows = bounds[variable] = evaluate_text(origin.bound, sizes)
        n = sizes[variable] - 1
        if origin.is_checked and not 0 <= n <= rows:
            where = f" [{origin.line}]" if origin.line else ""
            raise ArgumentError(
                f"a size that the function computes is {n}{where}; it must be from 0 to {rows}"
            )
    return bounds


def finisher_of_counts(
    wait: Callable[[Any], tuple[int, ...]],
    finisher_at: Callable[[Sequence[int]], Change | None],
    later: Callable[[Callable[[], Sequence[int]]], Change | None] | None = None,
) -> Change:
    """Make the function that cuts the results of an executable which returns counts."""
    cached = functools.lru_cache(_KEPT)(finisher_at)

    def finish(pair: Any) -> Any:
        results, returned = pair
        if later is None:
            change = cached(wait(returned))
        else:  # results that have computed sizes share the answer of one run
            change = later(functools.cache(lambda: wait(returned)))
        return results if change is None else change(results)

    return finish
