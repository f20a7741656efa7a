"""Cut results of computed sizes: the sizes come from the executable, with the results.

executable   (results, counts:i32[k])       counts of `Interface.counts`
host         wait for the counts, check them, cut the results
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bucketjit._arrays.results import Change
from bucketjit._errors import ArgumentError
from bucketjit._sizes.expressions import evaluate_text
from bucketjit._tracing.interface import Interface

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


def finisher_of_counts(
    program: Interface,
    sizes: Mapping[str, int],
    finisher_at: Callable[[Sequence[int]], Change | None],
) -> Change:
    """Make the function that cuts the results of an executable which returns counts.

    Args:
        program: The program of the executable.
        sizes: The logical sizes of the call.
        finisher_at: Makes the function that cuts the results, from the computed sizes in the order
            of `Interface.counts`.

    Returns:
        A function of the pair of results and counts.

    Raises:
        SizesDiffer: By the returned function, if the results are those of other computed sizes.
        ArgumentError: By the returned function, if `bucketjit.sized` was given a number of rows
            that there are not.
    """
    known: dict[tuple[int, ...], Change | None] = {}

    def finish(pair: Any) -> Any:
        results, counts = pair
        key = tuple(np.asarray(counts).tolist())
        if key not in known:
            if len(known) >= _KEPT:
                known.clear()
            computed = {v: n + 1 for v, n in zip(program.counts, key, strict=True)}
            _check(program, sizes, computed)
            known[key] = finisher_at(list(computed.values()))
        change = known[key]
        return results if change is None else change(results)

    return finish


def _check(program: Interface, sizes: Mapping[str, int], computed: Mapping[str, int]) -> None:
    at = {**sizes, **computed}
    for guard in program.presumed:
        if not guard.holds(at):
            raise SizesDiffer(computed)
    for variable, made in program.computed.items():
        if made.is_checked:
            rows, n = evaluate_text(made.bound, at), computed[variable] - 1
            if not 0 <= n <= rows:
                where = f" [{made.line}]" if made.line else ""
                raise ArgumentError(
                    f"sized: n is {n}, and the arrays have {rows} rows{where}; "
                    f"give a number from 0 to {rows}"
                )
