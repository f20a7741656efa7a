"""How a bucket's executable is called: the types that a plan is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from bucketjit._compile.cache_slot import Slot
from bucketjit._compile.executable import Executable
from bucketjit._runtime.counters import CallCounter

Where = int | str  # position or name of an argument

Prepared = tuple[Sequence[Any], Mapping[str, Any]]

Prepare = Callable[[Sequence[Any], Mapping[str, Any]], Prepared]

After = Callable[[Sequence[Any], Mapping[str, Any]], None]

Serve = Callable[[Sequence[Any], Mapping[str, Any]], Any]

Own = Sequence[tuple[int, Any]]  # leaves by position in the call


class Evicted(Exception):
    """The executable of a plan has left the cache."""


class Part(NamedTuple):
    """Serves the chunks of one call, whose common arguments were looked at already.

    Attributes:
        leaves: The leaves of the call, in host memory where they have open axes.
        serve: Serves a chunk, of the leaves that are its own.
    """

    leaves: Sequence[Any]
    serve: Callable[[Own], Any]


Bind = Callable[[Sequence[Any], Mapping[str, Any], Sequence[int]], Part | None]


class Handler(Protocol):
    """Serves calls with one set of shapes, in one bucket or in chunks.

    Attributes:
        following: What to try where this refuses a call.
        is_alive: Whether its executables are in the cache.
        slots: Where the executables are.
        lines: Count the calls.
        serve: Serves a call. Raises `Evicted` if an executable has left the cache, and
            `SignatureChanged` if what has no open axes is not as it was.
        bind: Of the arguments of a whole call, and the positions of the leaves that are cut, what
            serves its chunks with less to do for each of them; None where each has to be served for
            itself. Raises what ``serve`` raises.
    """

    next: Handler | None

    @property
    def is_alive(self) -> bool: ...

    @property
    def slots(self) -> tuple[Slot[Executable], ...]: ...

    @property
    def lines(self) -> tuple[CallCounter, ...]: ...

    @property
    def serve(self) -> Serve: ...

    @property
    def bind(self) -> Bind | None: ...
