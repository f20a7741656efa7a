"""Facts about the values of a trace that is not finished, each found from those of its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from bucketjit._jax.tracers import Made, equation_of

T = TypeVar("T")

# Finds the fact about a value from its equation (None: it has none) and the facts of the operands.
Find = Callable[[Any, Made | None, Sequence[T]], T]


class ValueFacts(Generic[T]):
    """Facts about values, each found once."""

    def __init__(self, find: Find[T]) -> None:
        self._find = find
        self._known: dict[int, tuple[Any, T]] = {}  # by `id`; the value is kept alive

    def of(self, value: Any) -> T:
        """The fact about a value."""
        stack = [value]  # no recursion: programs are deeper than Python's stack
        while stack:
            one = stack[-1]
            if id(one) in self._known:
                stack.pop()
                continue
            made = equation_of(one)
            operands = made.operands if made else ()
            missing = [x for x in operands if id(x) not in self._known]
            if missing:
                stack += missing
                continue
            stack.pop()
            found = self._find(one, made, [self._known[id(x)][1] for x in operands])
            self._known[id(one)] = one, found
        return self._known[id(value)][1]
