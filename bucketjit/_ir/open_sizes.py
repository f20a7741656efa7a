"""The sizes that the program of a trace computes, while it is traced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class SizeIsComputed(Exception):
    """The function computes a size, and is traced where it cannot."""


of_thread = threading.local()


def selecting() -> Any | None:
    """What selections do in this thread, such as `bucketjit._ir.computed_sizes.Sizing`.

    None if JAX's own functions are to run.
    """
    return getattr(of_thread, "open", None)


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
