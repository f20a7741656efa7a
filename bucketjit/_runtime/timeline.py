"""How counters grew over time, in bounded memory and next to nothing a call.

Nothing is noted call by call, but every compile is. The warm path compares the time, which it has
read anyway, with the time at which the next moment is `Clock.due`. When there are too many moments,
every second one goes and the time between two of them doubles, so they always span the whole run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

MOMENTS = 256  # the most that are kept
_FIRST_INTERVAL = 0.05
_PATIENCE = 300  # how much longer it is until the next moment than taking one has taken


@dataclass(frozen=True)
class Moment:
    """The counters at one time.

    Attributes:
        seconds: Since they started.
        calls: Calls by then.
        hits: Those of them that did not have to compile.
        compiles: Executables compiled by then.
        padding_waste: Padding among all elements of padded arguments by then, 0 to 1.
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
        due: When the next one is (``time.monotonic``).
    """

    __slots__ = ("__weakref__", "_interval", "_last", "_lock", "_moments", "_read", "_start", "due")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: Callable[[], Reading] | None = None
        self.start(time.monotonic())

    def start(self, now: float) -> None:
        """Forget every moment, and count seconds from now on."""
        with self._lock:
            self._start = now
            self._interval = _FIRST_INTERVAL
            self._moments: list[Moment] = []
            self._last: Moment | None = None
            self.due = now + self._interval

    def watch(self, read: Callable[[], Reading]) -> None:
        """Set what tells the counters."""
        self._read = read

    def tick(self, now: float) -> None:
        """Take a moment, if it is due still."""
        # An interrupt may come anywhere, but not between a `with` and its lock: never `acquire`.
        with self._lock:
            if now >= self.due:
                self._take(now)

    def mark(self, now: float) -> None:
        """Take a moment: something has happened that is rare, and takes longer than this."""
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
        """The moments so far, the last one that of the reading; the same while nothing happens."""
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
