"""An exchange of one message per process, through the key-value store of ``jax.distributed``.

Process 0 collects the messages and publishes all of them under one key:

    process 1    set 7/1 "b=8"                               get 7/all
    process 2    set 7/2 "b=16"                              get 7/all
    process 0    get 7/1, get 7/2      set 7/all ["b=4", "b=8", "b=16"]

So every process reads the same list, also of an exchange in which one process is missing, and
draws the same conclusion from it. A process that has waited long enough publishes what there is.
The list that is published first is the only one.

Keys are deleted when every process has read them, eight exchanges at a time. A process has read the
list of one exchange before it writes its message of the next.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

from bucketjit._jax.coordination import Store

ROOT = "bucketjit/agreement"

_GROUP = 8  # exchanges whose keys are deleted together
_SLICE = 1.0  # seconds of a wait in one piece: between two of them Python handles Ctrl-C
_LOOK_AHEAD = (0.0, 0.1, 0.2, 0.3)  # pauses between looks at the next exchange, in seconds
_LAST = "!"  # begins the message of a process that does not wait for the others
_UNKNOWN = ""  # the message of a process for which nobody has waited

Messages = tuple[str | None, ...]
"""The message of each process: None of one that did not come in time, and ``""`` of one for which
nobody has waited, because another one has said that there will be no call."""


class Channel:
    """A sequence of exchanges. All processes must make the same ones, in the same order.

    Args:
        store: The key-value store.
        rank: The index of this process.
        count: How many processes there are.
        name: The name of the channel, the same on all processes.
    """

    def __init__(self, store: Store, rank: int, count: int, name: str) -> None:
        self._rank = rank
        self._store = store
        self._count = count
        self._path = f"{ROOT}/{name}"
        self._lock = threading.Lock()
        self._done = 0
        self._is_behind = False  # whether a process was missing in the last exchange

    def exchange(self, mine: str, seconds: float) -> Messages:
        """Give a message, and get those of all processes.

        A process that the others have given up is missing in their list. It takes part in the next
        exchange, if others are in it already, so that all make the same exchanges again.

        Args:
            mine: The message of this process.
            seconds: How long to wait for the others, and for those that tell that they are busy as
                long as they do.

        Raises:
            StoreLost: The store does not answer.
        """
        while True:
            step = self._next()
            messages = self._at(step, mine, seconds)
            self._is_behind = None in messages
            if messages[self._rank] is not None or not self._is_begun(step + 1):
                return messages

    def tell(self, message: str) -> None:
        """Give a message for the next exchange without waiting for those of the others.

        Args:
            message: Why this process does not take part, which the others read.

        Raises:
            StoreLost: The store does not answer.
        """
        step = self._next()
        path = self._place(step)
        if self._rank:
            self._store.set(f"{path}/{self._rank}", _LAST + message)
        else:
            every = [message, *[_UNKNOWN] * (self._count - 1)]
            self._store.publish(f"{path}/all", json.dumps(every))
            self._delete(step)

    # --- one exchange ---

    def _next(self) -> int:
        with self._lock:
            step, self._done = self._done, self._done + 1
        return step

    def _at(self, step: int, mine: str, seconds: float) -> Messages:
        """One exchange."""
        path = self._place(step)
        patience = _Patience(seconds, self._pulses)
        if self._rank == 0:
            found = self._collected(path, mine, patience)
        else:
            self._store.set(f"{path}/{self._rank}", mine)
            published = self._wait(f"{path}/all", patience)
            if published is not None:
                return tuple(json.loads(published))
            found = self._store.under(f"{path}/")
        every = self._store.publish(f"{path}/all", self._listed(found, mine))
        if self._rank == 0:
            self._delete(step)
        return tuple(json.loads(every))

    def _collected(self, path: str, mine: str, patience: _Patience) -> dict[str, str]:
        """The messages of the other processes."""

        def announce() -> None:
            # Those that wait longer than this process learn that it is not the one that is missing.
            self._store.set(f"{path}/0", mine)

        def is_over() -> bool:
            announce()
            found.update(self._store.under(f"{path}/"))
            return any(message.startswith(_LAST) for message in found.values())

        if self._is_behind:
            announce()
        found: dict[str, str] = {}
        for other in map(str, range(1, self._count)):
            message = self._wait(f"{path}/{other}", patience, is_over)
            if message is not None:
                found[other] = message
        return found

    def _wait(
        self, key: str, patience: _Patience, is_over: Callable[[], bool] = lambda: False
    ) -> str | None:
        """The value of a key; None if there was none in time, or waiting for it is over."""
        while True:
            value = self._store.get(key, min(_SLICE, patience.left))
            if value is not None:
                return value
            if is_over() or not patience.lasts():
                return None

    def _listed(self, found: dict[str, str], mine: str) -> str:
        """The messages in the order of the processes."""
        every = [found.get(str(i)) for i in range(self._count)]
        every[self._rank] = mine
        ends = any(message is not None and message.startswith(_LAST) for message in every)
        missing = _UNKNOWN if ends else None
        return json.dumps([missing if x is None else x.removeprefix(_LAST) for x in every])

    def _is_begun(self, step: int) -> bool:
        """Whether another process is in an exchange."""
        for pause in _LOOK_AHEAD:
            time.sleep(pause)
            if self._store.under(f"{self._place(step)}/"):
                return True
        return False

    def _place(self, step: int) -> str:
        """Where the keys of an exchange are."""
        return f"{self._path}/{step // _GROUP}/{step % _GROUP}"

    def _delete(self, step: int) -> None:
        """Delete keys that every process has read."""
        group, first = divmod(step, _GROUP)
        if first == 1 and group:
            self._store.delete(f"{self._path}/{group - 1}/")

    def _pulses(self) -> dict[str, str]:
        """The last sign of life of each other process that has given one."""
        found = self._store.under(f"{PULSES}/")
        found.pop(str(self._rank), None)
        return found


PULSES = f"{ROOT}/pulse"


def period(seconds: float) -> float:
    """The seconds between two signs of life, where others wait for so many."""
    return min(5.0, seconds / 4)


class _Patience:
    """How long an exchange waits.

    Args:
        seconds: The time.
        pulses: Returns the last signs of life of the other processes. A new one among them starts
            the time again.
    """

    def __init__(self, seconds: float, pulses: Callable[[], dict[str, str]]) -> None:
        self._seconds, self._pulses = seconds, pulses
        self._seen: dict[str, str] | None = None
        self._until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """The seconds until `lasts` should be asked."""
        # Two periods before the end, to see whether the signs change until then.
        first = self._until - (2 * period(self._seconds) if self._seen is None else 0.0)
        return max(0.001, first - time.monotonic())

    def lasts(self) -> bool:
        """Whether to wait on."""
        now = time.monotonic()
        if self._seen is None and now >= self._until - 2 * period(self._seconds):
            self._seen = self._pulses()
        if now < self._until:
            return True
        before, self._seen = self._seen, self._pulses()
        if self._seen == before:
            return False
        self._until = now + self._seconds
        return True
