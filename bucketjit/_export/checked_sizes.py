"""The sizes for which a program of concrete traces may be exported.

The sizes in such a program are expressions that fit a few traces. A call is checked by a trace at
its own sizes, which a module cannot do. So the program is compared with traces at many sizes when
it is exported, and the module holds between the smallest and the largest of these:

    if int(x.shape[0]) > 100: ...      at n = 5, 64 the same program, at 128 another one
    guards of the module               n <= 100
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bucketjit._sizes.guards import Guard
from bucketjit._tracing.concrete import at_other_sizes
from bucketjit._tracing.program import Program

# Small sizes, and sizes around powers of two, up to which programs tend to decide otherwise.
_SIZES = (*range(1, 10), 12, 13, *(2**k + d for k in range(4, 12) for d in (-1, 0, 1)), 4095, 4096)
_FURTHER = (100, 500, 1000, 1500, 3000)


def checked_sizes(program: Program, sizes: Mapping[str, int]) -> list[Guard]:
    """Compare a program with traces at many sizes of each variable."""
    pinned = {guard.left for guard in program.guards if guard.pins}
    free = [v for v in sizes if v not in pinned]
    guards = []
    for variable in free:
        size = sizes[variable]
        tried = sorted({*_SIZES, *_FURTHER, *(k * size for k in (1, 2, 3, 4))})
        least = _last(program, sizes, variable, [n for n in reversed(tried) if n <= size])
        most = _last(program, sizes, variable, [n for n in tried if n >= size])
        if least > 1:
            guards.append(Guard(variable, ">=", str(least)))
        guards.append(Guard(variable, "<=", str(most)))
    return guards


def _last(program: Program, sizes: Mapping[str, int], variable: str, tried: Sequence[int]) -> int:
    """The last of these sizes up to which all traces are those of the program."""
    last = sizes[variable]
    for size in tried:
        if not _is_right(program, {**sizes, variable: size}):
            return _boundary(program, sizes, variable, last, size)
        last = size
    return last


def _boundary(
    program: Program, sizes: Mapping[str, int], variable: str, good: int, bad: int
) -> int:
    """The last good size before a bad one, by halving."""
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        if _is_right(program, {**sizes, variable: middle}):
            good = middle
        else:
            bad = middle
    return good


def _is_right(program: Program, at: Mapping[str, int]) -> bool:
    """Whether the trace at these sizes is that of the program, or a guard excludes them."""
    if not program.admits(at):
        return True
    return at_other_sizes(lambda: program.size_constants(at)) is not None
