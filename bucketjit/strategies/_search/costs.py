"""Evaluates and checks the cost function of the user: what a call costs by its padded sizes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from bucketjit.strategies._search.histogram import Floats, Ints

Cost = Callable[..., float]


def costs_of(dims: tuple[str, ...], points: Ints, cost: Cost | None) -> Floats:
    """The cost of each combination of padded sizes, one a row; without ``cost`` their product.

    Examples:
        >>> costs_of(("n",), np.array([[2], [3]]), lambda n: n * n)
        array([4., 9.])
        >>> costs_of(("b", "s"), np.array([[2, 10], [4, 5]]), lambda b, s: b * s * s)
        array([200., 100.])
    """
    if cost is None:
        return points.prod(axis=1, dtype=np.float64)
    if not callable(cost):
        raise TypeError(f"cost must be a function of the padded size, or None, not {cost!r}")
    if len(dims) == 1:
        return np.array([_checked(cost(n), f"size {n}") for n in points[:, 0].tolist()])
    try:
        inspect.signature(cost).bind(**dict.fromkeys(dims))
    except ValueError:
        pass  # Python knows no signature of some builtins
    except TypeError as error:
        raise TypeError(
            f"cost must take the padded sizes by name, {', '.join(dims)}: {error}"
        ) from None
    rows = (dict(zip(dims, row, strict=True)) for row in points.tolist())
    return np.array(
        [_checked(cost(**row), ", ".join(f"{d}={n}" for d, n in row.items())) for row in rows]
    )


def _checked(answer: Any, what: str) -> float:
    """Check what a cost function returned, and make it a float."""
    try:
        if isinstance(answer, str | bytes | bool | np.bool_):
            raise TypeError
        number = float(answer)
    except (TypeError, ValueError):
        raise TypeError(f"cost must return a number for {what}, not {answer!r}") from None
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"cost must be finite and not negative, not {number} for {what}")
    return number
