"""Cut the two shapes of a reshape into groups of axes of equal product."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bucketjit._dims import Dim, Shape, is_symbolic

Group = tuple[Shape, Shape]


def groups(before: Shape, after: Shape) -> list[Group]:
    """Cut two shapes without axes of size 1 into the smallest groups of equal products.

    Where the products agree only at some sizes (``(s,) -> (s // 2, 2)``), what can be
    matched from the front and from the back is, and the middle is one group.
    """
    front = _matching(before, after)
    i, j = (sum(len(g[k]) for g in front) for k in (0, 1))
    before, after = before[i:], after[j:]
    back = [(b[::-1], a[::-1]) for b, a in _matching(before[::-1], after[::-1])]
    i, j = (sum(len(g[k]) for g in back) for k in (0, 1))
    middle = (before[: len(before) - i], after[: len(after) - j])
    return [*front, *([middle] if middle != ((), ()) else []), *back[::-1]]


def without_ones(shape: Shape) -> Shape:
    """A shape without its axes of size 1."""
    return tuple(d for d in shape if is_symbolic(d) or d != 1)


def _matching(before: Shape, after: Shape) -> list[Group]:
    """Groups of equal products from the front, as far as there are any."""
    found: list[Group] = []
    while True:
        ends = (
            (i, j)
            for i in range(1, len(before) + 1)
            for j in range(1, len(after) + 1)
            if _product(before[:i]) == _product(after[:j])
        )
        end = min(ends, key=sum, default=None)
        if end is None:
            return found
        found.append((before[: end[0]], after[: end[1]]))
        before, after = before[end[0] :], after[end[1] :]


def _product(shape: Sequence[Dim]) -> Dim:
    return math.prod(shape)
