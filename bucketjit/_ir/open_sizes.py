"""The sizes that the program of a trace computes, while it is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bucketjit._jax.patches.traced_sizes import of_thread, selecting


class SizeIsComputed(Exception):
    """The function computes a size, and is traced where it cannot."""


@contextmanager
def as_open(value: Any) -> Iterator[None]:
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
