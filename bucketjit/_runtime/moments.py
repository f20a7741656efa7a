"""The moments at which snapshots were taken, for what is computed of them later."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

_MOMENTS = 16  # snapshots that are held and may still be asked; of more, all is computed


class Moment:
    """The moment of a snapshot, and what is computed of it.

    A counter that counts on after the moment is kept as it was. All else is computed before it
    changes, if it was not yet.

    Attributes:
        parts: What computes each part.
        kept: What counters that count on told at the moment.
    """

    def __init__(self, parts: Mapping[str, Callable[[Moment], Any]]) -> None:
        self.parts, self._known = parts, dict[str, Any]()
        self.kept: dict[Any, Any] = {}

    def told(self, counter: Any) -> Any:
        """What a counter told at the moment."""
        now = counter.told()  # read first: a thread that counts keeps it before
        return self.kept.get(counter, now)

    def ask(self, part: str) -> Any:
        """A part of the snapshot."""
        if part not in self._known:
            self._known.setdefault(part, self.parts[part](self))  # the first thread's is right
        return self._known[part]


class History:
    """The moments of snapshots that somebody holds.

    Attributes:
        taken: How many there were. A counter that sees a new number calls `keep` before it counts.
        held: References to them, the oldest first; some may be gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.taken = 0
        self.held: list[weakref.ref[Moment]] = []

    def moments(self) -> list[Moment]:
        """The moments, the oldest first."""
        return [moment for known in self.held if (moment := known()) is not None]

    def add(self, moment: Moment) -> None:
        """Add a moment."""
        with self._lock:
            self.held = [*map(weakref.ref, self.moments()), weakref.ref(moment)]
            self.taken += 1

    def make_room(self) -> None:
        """Compute all of them if there are `_MOMENTS`; they need not be told of changes then."""
        if len(self.moments()) >= _MOMENTS:
            self.settle()

    def keep(self, *counters: Any) -> int:
        """Keep what counters tell before they count on. Returns ``taken``."""
        taken = self.taken
        for moment in self.moments() if self.held else ():
            for counter in counters:
                moment.kept.setdefault(counter, counter.told())
        return taken

    def settle(self, but: str = "") -> None:
        """Compute all, or all but one part, before something else than counts changes.

        Call it without a lock.
        """
        moments = self.moments() if self.held else ()
        for moment in moments:
            for part in moment.parts.keys() - {but}:
                moment.ask(part)
        if not but:
            with self._lock:  # threads may have added others
                self.held = [known for known in self.held if known() not in moments]
