"""Evaluates and checks the cost function of the user: what a call costs by its padded sizes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from bucketjit.strategies._search.histogram import Floats, Ints

Cost = Callable[[int], float]
JointCost = Callable[..., float]


def costs_of(sizes: Ints, cost: Cost | None) -> Floats:
    """The cost of each size.

    Args:
        sizes: The padded sizes.
        cost: The cost of a size; None for the size itself.

    Returns:
        The costs.

    Raises:
        TypeError: If ``cost`` cannot be called, or returns no number.
        ValueError: If a cost is negative or not finite.

    Examples:
        >>> costs_of(np.array([2, 3]), lambda n: n * n)
        array([4., 9.])
    """
    if cost is None:
        return sizes.astype(np.float64)
    check_callable(cost)
    return np.array([checked_cost(cost(n), f"size {n}") for n in sizes.tolist()], np.float64)


def joint_costs_of(
    dims: tuple[str, ...], combinations: Iterable[tuple[int, ...]], cost: JointCost | None
) -> Floats:
    """The cost of each combination of sizes.

    Args:
        dims: The names of the variables.
        combinations: The padded sizes of all variables, in the order of ``dims``.
        cost: The cost of a combination, called with the sizes by name; None for their product.

    Returns:
        The costs.

    Raises:
        TypeError: If ``cost`` cannot be called, does not take these names, or returns no number.
        ValueError: If a cost is negative or not finite.

    Examples:
        >>> joint_costs_of(("b", "s"), [(2, 10), (4, 5)], lambda b, s: b * s * s)
        array([200., 100.])
    """
    if cost is None:
        return np.array([math.prod(sizes) for sizes in combinations], np.float64)
    check_callable(cost)
    try:
        inspect.signature(cost).bind(**dict.fromkeys(dims))
    except ValueError:
        pass  # Python knows no signature of some builtins
    except TypeError as error:
        raise TypeError(
            f"cost must take the padded sizes by name, {', '.join(dims)}: {error}"
        ) from None
    return np.array(
        [
            checked_cost(
                cost(**dict(zip(dims, sizes, strict=True))),
                ", ".join(f"{d}={n}" for d, n in zip(dims, sizes, strict=True)),
            )
            for sizes in combinations
        ],
        np.float64,
    )


def check_total(costs: Floats, counts: Floats) -> None:
    """Check that a float can hold the sum of all costs; infinite sums could not be compared.

    Args:
        costs: The cost of each size.
        counts: How often each size occurred.

    Raises:
        ValueError: The sum would be infinite if all sizes had the largest cost.

    Examples:
        >>> check_total(np.array([1e308]), np.array([3.0]))
        Traceback (most recent call last):
            ...
        ValueError: the costs of all sizes must have a sum that a float can hold; count in ...
    """
    if not math.isfinite(float(np.max(costs, initial=0.0)) * float(np.sum(counts))):
        raise ValueError(
            "the costs of all sizes must have a sum that a float can hold; count in a larger unit"
        )


def check_callable(cost: object) -> None:
    """Check that a cost is a function.

    Args:
        cost: The cost.

    Raises:
        TypeError: If ``cost`` cannot be called.
    """
    if not callable(cost):
        raise TypeError(f"cost must be a function of the padded size, or None, not {cost!r}")


def checked_cost(answer: Any, what: str) -> float:
    """Check what a cost function returned, and make it a float.

    Args:
        answer: What the function returned.
        what: The sizes, for messages.

    Returns:
        The cost.

    Raises:
        TypeError: If the answer is no number.
        ValueError: If it is negative or not finite.
    """
    try:
        if isinstance(answer, str | bytes | bool | np.bool_):
            raise TypeError
        number = float(answer)
    except (TypeError, ValueError):
        raise TypeError(f"cost must return a number for {what}, not {answer!r}") from None
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"cost must be finite and not negative, not {number} for {what}")
    return number
