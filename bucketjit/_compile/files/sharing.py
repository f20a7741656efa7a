"""One of several processes compiles an executable, and the others wait for its file.

`bucketjit._persistence.claims` says which one. A wait has an end whatever the others do: a process
that dies gives its turn away, and one that compiles and writes no file is not waited for again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from bucketjit._compile.background import is_running
from bucketjit._persistence.claims import Claim, State, Watch, take

V = TypeVar("V")

_PAUSES = 0.005, 0.1  # seconds between two looks at a claim: the first, and the longest

_LONGEST_WAIT = 1200.0  # seconds, as JAX waits for the executable of another process

# Compiles of other processes that wrote no file, after which this process compiles at once. The
# second one is for a compile that failed for a reason of its process.
_IN_VAIN = 2

_this_thread = threading.local()  # `compiles`: whether it compiles under a claim


class SharedPlace(NamedTuple):
    """The place of an executable that several processes may want to compile.

    Attributes:
        claim: Where the claim on it is.
        exists: Returns whether its file is there.
    """

    claim: Path
    exists: Callable[[], bool]


@contextlib.contextmanager
def turn(
    place: SharedPlace | None, load: Callable[[], V | None], waited: Callable[[float], None]
) -> Iterator[V | None]:
    """Wait until another process has compiled an executable, or until it is the turn of this one.

    Args:
        place: The place of the executable, which was not there just now; None if each process
            compiles for itself.
        load: Loads it.
        waited: Called with the seconds of a wait for other processes, once it is over.

    Yields:
        The executable. None if the caller has to compile it; other processes that need it wait
        until the context ends.
    """
    if place is None:
        yield None
        return
    outer = getattr(_this_thread, "compiles", False)
    # A thread that compiles waits for no other process: that one may wait for it.
    claim, found = _claim_or_load(place, load, waited, may_wait=not outer)
    try:
        if claim is not None:
            if place.exists():  # it was written after the caller had looked
                found = load()
            _this_thread.compiles = True
        yield found
    finally:
        _this_thread.compiles = outer
        if claim is not None:
            claim.release()


def _claim_or_load(
    place: SharedPlace,
    load: Callable[[], V | None],
    waited: Callable[[float], None],
    may_wait: bool,
) -> tuple[Claim | None, V | None]:
    """A claim, or the executable. Neither if the caller is to compile without a claim."""
    began, has_waited, in_vain = time.monotonic(), False, 0
    claim: Claim | None = None
    found: V | None = None
    while found is None:
        try:
            claim = take(place.claim)
            if claim is not None or not may_wait or in_vain == _IN_VAIN:
                break
            has_waited = True
            state = _wait(place.claim, began + _LONGEST_WAIT)
        except OSError:  # the directory cannot be written
            break
        if state is State.HELD:
            break
        if place.exists():
            found = load()
        in_vain += state is State.GONE
    if has_waited:
        waited(time.monotonic() - began)
    return claim, found


def _wait(path: Path, until: float) -> State:
    """Wait for the end of another process's claim. A claim whose holder is dead is removed.

    Args:
        path: Where the claim is.
        until: When to give up; see `time.monotonic`.

    Returns:
        What became of the claim. `State.HELD` means that there is no more waiting.

    Raises:
        OSError: The directory cannot be written.
    """
    watch = Watch(path)
    pause, longest = _PAUSES
    while (state := watch.look()) is State.HELD:
        if not is_running() or time.monotonic() > until:
            return state
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
    if state is State.DEAD:
        watch.remove_dead()
    return state
