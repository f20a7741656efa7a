"""Cut the two shapes of a reshape into groups of axes with equal products.

    before   (b, s, 12) -> (b*s, 3, 4)
    after    (b, s) -> (b*s,)   and   (12,) -> (3, 4)

Masking rules and the tracing of merged axes treat each group alone.
"""

from __future__ import annotations

import itertools
import operator

from bucketjit._sizes.expressions import Shape, is_symbolic

Group = tuple[Shape, Shape]


def groups(before: Shape, after: Shape) -> list[Group]:
    """Cut two shapes without axes of size 1 into the smallest groups with equal products.

    Products such as those of ``(s,) -> (s // 2, 2)`` are equal at some sizes only. Groups are then
    matched from the front and from the back, and the middle is one group.
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
    """The groups with equal products, from the front up to the first axes without one."""
    found: list[Group] = []
    while end := _first_end(before, after):
        found.append((before[: end[0]], after[: end[1]]))
        before, after = before[end[0] :], after[end[1] :]
    return found


def _first_end(before: Shape, after: Shape) -> tuple[int, int] | None:
    """The fewest axes of each shape, from the front, with equal products; None if none have."""
    if before and after and before[0] == after[0]:
        return 1, 1
    products, others = (list(itertools.accumulate(s, operator.mul)) for s in (before, after))
    # By number of axes on both sides together; 1 and 1 is above.
    for count in range(3, len(products) + len(others) + 1):
        for i in range(max(1, count - len(others)), min(len(products), count - 1) + 1):
            if products[i - 1] == others[count - i - 1]:
                return i, count - i
    return None
