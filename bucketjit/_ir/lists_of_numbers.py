"""Lists of numbers that are given where an array is declared.

To JAX a list of numbers is a tree of scalars, never an array.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def is_list_of_numbers(value: object) -> bool:
    """Whether a value is a list or tuple of Python numbers, or of such lists."""
    if type(value) not in (list, tuple) or not value:
        return False
    assert isinstance(value, list | tuple)
    return all(
        is_list_of_numbers(item) or isinstance(item, bool | int | float | complex | np.generic)
        for item in value
    )


def cure_of_list(value: Any, path: str) -> str:
    """What is wrong with a list of numbers where an array is declared, and what to pass instead."""
    kind = type(value).__name__
    of = "lists" if isinstance(value[0], list | tuple) else "numbers"
    try:
        np.asarray(value)
    except ValueError:  # NumPy has no such array
        return (
            f"got a {kind} of {len(value)} {of} of different length, which do not form an array; "
            "pad them, or give a list of arrays to map"
        )
    return f"got a {kind} of {len(value)} {of}; pass np.asarray({path})"
