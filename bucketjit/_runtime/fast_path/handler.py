"""The types of the fast path: `Handler`, which serves calls of one set of shapes, and its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bucketjit._compile.cache import Slot
from bucketjit._compile.executable import Executable
from bucketjit._runtime.call_counts import CallCounter

Where = int | str  # position or name of an argument

Prepared = tuple[Sequence[Any], Mapping[str, Any]]  # arguments as the executable takes them

Prepare = Callable[[Sequence[Any], Mapping[str, Any]], Prepared]  # of the arguments of a call

After = Callable[[Sequence[Any], Mapping[str, Any]], None]  # called when the executable has run

Serve = Callable[[Sequence[Any], Mapping[str, Any]], Any]  # from arguments to the result


class Evicted(Exception):
    """The executable of a handler has left the cache; the call takes the slow path."""


class Handler:
    """Serves calls with one set of shapes by one executable."""

    __slots__ = ("line", "serve", "slot")

    def __init__(self, slot: Slot[Executable], line: CallCounter, serve: Serve) -> None:
        self.slot = slot
        self.line = line
        self.serve = serve

    @property
    def is_alive(self) -> bool:
        """Whether its executable is in the cache."""
        return self.slot.entry is not None
