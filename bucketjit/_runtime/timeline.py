"""Records how the counters grew over time, in bounded memory and at almost no cost per call.

A `Moment` is taken at every compile, and otherwise when the time between two moments has passed.
The warm path compares the time, which it has read anyway, with `Clock.due`. When there are
`MOMENTS` moments, every second one is dropped and the interval doubles, so that the moments always
span the whole run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

MOMENTS = 256  # moments kept at most
_FIRST_INTERVAL = 0.05  # seconds between two moments at first
# The next moment is due at the earliest after this many times the CPU time that taking the last one
# took: moments cost at most 1/300 of the run.
_PATIENCE = 300


@dataclass(frozen=True)
class Moment:
    """The counters at one time.

    Attributes:
        seconds: Seconds since the counters started.
        calls: Calls until then.
        hits: Calls until then that did not compile.
        compiles: Executables compiled until then.
        padding_waste: Share of padding in the elements of padded arguments until then, 0 to 1.
    """

    seconds: float
    calls: int
    hits: int
    compiles: int
    padding_waste: float


Reading = tuple[int, int, int, float]  # calls, hits, compiles, waste


class Clock:
    """Takes moments when they are due.

    Attributes:
        due: When the next moment is due, in seconds of ``time.monotonic``. Read without a lock.
    """

    __slots__ = ("__weakref__", "_interval", "_last", "_lock", "_moments", "_read", "_start", "due")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: Callable[[], Reading] | None = None
        self.start(time.monotonic())

    def start(self, now: float) -> None:
        """Forget all moments, and count seconds from ``now`` on."""
        with self._lock:
            self._start = now
            self._interval = _FIRST_INTERVAL
            self._moments: list[Moment] = []
            self._last: Moment | None = None
            self.due = now + self._interval

    def watch(self, read: Callable[[], Reading]) -> None:
        """Set the function that reads the counters; without one no moments are taken."""
        self._read = read

    def tick(self, now: float) -> None:
        """Take a moment, unless another thread has taken it meanwhile."""
        # Use `with`, never `acquire`: KeyboardInterrupt may be raised anywhere except between
        # `with` and its lock, so an `acquire` could be left without its release.
        with self._lock:
            if now >= self.due:
                self._take(now)

    def mark(self, now: float) -> None:
        """Take a moment now. For rare events that take longer than this, such as a compile."""
        with self._lock:
            self._take(now)

    def _take(self, now: float) -> None:
        if self._read is None:
            return
        began = time.thread_time()
        self._moments.append(Moment(now - self._start, *self._read()))
        if len(self._moments) >= MOMENTS:
            self._moments = self._moments[::2]
            self._interval *= 2
        worked = time.thread_time() - began
        self.due = now + max(self._interval, _PATIENCE * worked)

    def moments(self, now: float, reading: Reading) -> tuple[Moment, ...]:
        """The moments so far, followed by one for a reading."""
        with self._lock:
            for known in (self._last, *self._moments[-1:]):
                if known is not None and _reading(known) == reading:
                    break
            else:
                known = Moment(now - self._start, *reading)
            self._last = known
            return (*(m for m in self._moments if m.seconds < known.seconds), known)


def _reading(moment: Moment) -> Reading:
    return moment.calls, moment.hits, moment.compiles, moment.padding_waste
