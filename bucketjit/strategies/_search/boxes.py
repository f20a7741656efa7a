"""Searches for the cheapest boxes: buckets of several variables, each placed freely.

Finding them with certainty is a hard problem, so this is a local search; `tests/strategies/search`
compares it with all possible answers on small instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bucketjit.strategies._search.histogram import Floats
from bucketjit.strategies._search.table import Table

Flags = np.ndarray[Any, np.dtype[np.bool_]]


def cheapest_boxes(candidates: Table, k: int) -> list[tuple[int, ...]]:
    """Choose at most ``k`` buckets; a call is served by the cheapest one that holds its sizes.

    One bucket has the largest candidate of every variable, so that every call has a bucket, whether
    or not its sizes occurred. The others are added one by one, each where it saves most (that alone
    gets 1 - 1/e of the possible saving, as the saving is submodular), then moved one by one as long
    as that helps.

    Args:
        candidates: The candidates.
        k: The largest number of buckets.

    Returns:
        The buckets as positions in the candidates, the cheapest first.
    """
    search = _Boxes(candidates)
    return search.used(search.improve(search.fill(k - 1)))


class _Boxes:
    """The search for boxes. A box is an index into the flattened combinations of candidates."""

    def __init__(self, candidates: Table) -> None:
        self._shape = candidates.weights.shape
        points = np.argwhere(candidates.weights)
        self._weights = candidates.weights[candidates.weights > 0]
        self._costs = candidates.costs.ravel()
        boxes = np.indices(self._shape).reshape(len(self._shape), -1).T
        self._holds: Flags = np.all(points[None] <= boxes[:, None], axis=2)  # (boxes, points)

    def _call_costs(self, boxes: Sequence[int]) -> Floats:
        """The cost of a call of each point in the cheapest box that holds it."""
        largest = self._costs[-1]
        costs = np.where(self._holds[boxes], self._costs[boxes][:, None], largest)
        return costs.min(axis=0, initial=largest)

    def total(self, boxes: Sequence[int]) -> float:
        """The cost of all calls."""
        return float(self._call_costs(boxes) @ self._weights)

    def _best_addition(self, boxes: Sequence[int]) -> int:
        """The box that saves most."""
        saved = np.maximum(self._call_costs(boxes) - self._costs[:, None], 0.0)
        return int(np.argmax((saved * self._holds) @ self._weights))

    def fill(self, k: int) -> list[int]:
        """Add up to ``k`` boxes, as long as they save anything."""
        boxes: list[int] = []
        while len(boxes) < k:
            more = [*boxes, self._best_addition(boxes)]
            if not self.total(more) < self.total(boxes):
                break
            boxes = more
        return boxes

    def improve(self, boxes: Sequence[int]) -> list[int]:
        """Move boxes one by one to where they save most, while the total falls."""
        boxes, total, unmoved = list(boxes), self.total(boxes), 0
        while unmoved < len(boxes):
            first, *rest = boxes
            moved = [*rest, self._best_addition(rest)]
            lower = self.total(moved)
            # By more than rounding errors; else the loop might not end.
            if lower < total * (1 - 1e-12):
                boxes, total, unmoved = moved, lower, 0
            else:
                boxes, unmoved = [*rest, first], unmoved + 1
        return boxes

    def used(self, boxes: Sequence[int]) -> list[tuple[int, ...]]:
        """The boxes that serve a point, the cheapest first, and last the largest box of all."""
        every = sorted({*boxes, len(self._costs) - 1}, key=lambda box: (self._costs[box], box))
        first_to_hold = self._holds[every].argmax(axis=0)
        kept = sorted({*first_to_hold.tolist(), len(every) - 1})
        return [tuple(map(int, np.unravel_index(every[i], self._shape))) for i in kept]
