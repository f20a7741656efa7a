"""Find the host function of the logical sizes while an executable runs.

The function of a callback may close over a size, so each trace may have a different one. A program
of concrete traces calls that of the trace at the logical sizes: `Hosts` numbers the functions, and
the executable gets the number as an argument.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, NamedTuple

import cachetools
import numpy as np

from bucketjit._ir.expressions import Dim

_KEPT = 4096  # host functions of one program; an older one is dropped


class Hosts:
    """The latest `_KEPT` host functions of a program, by number."""

    def __init__(self) -> None:
        self._functions: Any = cachetools.LRUCache(_KEPT)
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # XLA calls host functions from its own threads

    def number_of(self, function: object) -> np.ndarray:
        """Keep a function, and return its number."""
        with self._lock:
            number = next(self._numbers)
            self._functions[number] = function
        return np.asarray(number, np.int32)

    def __call__(self, number: Any) -> Any:
        """The function with this number."""
        with self._lock:
            function = self._functions.get(int(number))
        if function is None:
            raise RuntimeError("the host function of a call that has waited too long is gone")
        return function


class SizedHost(NamedTuple):
    """Stands in an equation for the host function of the trace at the logical sizes.

    Attributes:
        constant: Position of its number among the size constants.
        depends_on: A symbolic size. It marks the equation as one that depends on sizes.
        hosts: Returns the function for the number.
    """

    constant: int
    depends_on: Dim
    hosts: Hosts
