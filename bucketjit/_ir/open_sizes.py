"""The sizes that the program of a trace computes, while it is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

from bucketjit._jax.patches.traced_sizes import of_thread, selecting


class SizeIsComputed(Exception):
    """The function computes a size, and is traced where it cannot."""


class Open(Protocol):
    """What a selection does in this thread while a function is traced."""

    def nonzero(self, array: Any) -> tuple[Any, ...]:
        """The positions of the entries that are not zero, one array for each axis."""

    def refuse(self, reason: str, remedy: str) -> NoReturn:
        """Give up: what is asked for cannot be computed in the program."""

    def cut(self, arrays: list[Any], n: Any) -> list[Any]:
        """The first ``n`` rows of arrays."""

    def first(self, array: Any, n: Any, axis: int) -> Any:
        """The first ``n`` positions of an axis, or all if there are fewer."""

    def size(self, n: Any, of: str, by: str = "k", *, is_clamped: bool = False) -> Any:
        """A traced integer as a size."""

    def position(self, end: Any, size: Any, least: Any, most: Any) -> Any:
        """A traced end of a slice as a position of an axis."""

    def extend(self, array: Any, axis: int, n: Any, size: Any) -> Any:
        """An axis of ``n`` positions with zeros after it, up to a size."""

    def ended(self, trace: Any) -> None:
        """Drop what belongs to a trace."""


@contextmanager
def as_open(value: Open | None) -> Iterator[None]:
    before = selecting()
    of_thread.open = value
    try:
        yield
    finally:
        of_thread.open = before


class Noticing:
    """Stops a trace where it would compute a size.

    Attributes:
        noticed: Whether it has stopped one. User code may have caught the error.
    """

    def __init__(self) -> None:
        self.noticed = False

    def nonzero(self, *_: Any, **__: Any) -> Any:
        """Raise `SizeIsComputed`."""
        self.noticed = True
        raise SizeIsComputed

    def ended(self, trace: Any) -> None:
        """Nothing is known of a trace."""

    refuse = cut = first = size = position = extend = nonzero

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which traces of this thread stop."""
        with as_open(self):
            yield
