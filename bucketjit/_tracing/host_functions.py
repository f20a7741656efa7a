"""Host functions that differ from one logical size to another.

A callback may close over a size, as it is in the trace at hand. So a program of concrete traces
calls the one of the trace at the logical sizes: an executable is given its number.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, NamedTuple

import cachetools
import numpy as np

from bucketjit._sizes.expressions import Dim

_KEPT = 4096


class Hosts:
    """Functions by number; the latest ones."""

    def __init__(self) -> None:
        self._functions: Any = cachetools.LRUCache(_KEPT)
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # the host calls from threads of its own

    def number_of(self, function: object) -> np.ndarray:
        """A number for this function, an int32 scalar."""
        with self._lock:
            number = next(self._numbers)
            self._functions[number] = function
        return np.asarray(number, np.int32)

    def __call__(self, number: Any) -> Any:
        """The function of a number.

        Raises:
            RuntimeError: Thousands of other sizes have been called since the call that asks.
        """
        with self._lock:
            function = self._functions.get(int(number))
        if function is None:
            raise RuntimeError("the host function of a call that has waited too long is gone")
        return function


class SizedHost(NamedTuple):
    """Stands for a host function that is taken from the trace at the logical sizes.

    Attributes:
        constant: Which constant of the program holds its number.
        depends_on: A symbolic size, so that the equation is seen to depend on sizes.
        hosts: Where to find it.
    """

    constant: int
    depends_on: Dim
    hosts: Hosts
