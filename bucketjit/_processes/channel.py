"""An exchange of one message per process, through the key-value store of ``jax.distributed``.

Process 0 collects the messages and publishes all of them under one key:

    process 1    set 7/1 "b=8"                               get 7/all
    process 2    set 7/2 "b=16"                              get 7/all
    process 0    get 7/1, get 7/2      set 7/all ["b=4", "b=8", "b=16"]      delete 5/

So every process reads the same list, also of an exchange in which one process is missing, and
draws the same conclusion from it. All keys of an exchange are deleted two exchanges later: a
process has read the list of one exchange before it writes its message of the next.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bucketjit._jax.coordination import Store, StoreLost

_ROOT = "bucketjit/agreement"
_SLICE = 1.0  # seconds of a wait in one piece: between two of them Python handles Ctrl-C
_GONE = "gave up waiting"

Messages = tuple[str | None, ...]
"""The message of each process; None of one that did not come in time."""


class Channel:
    """A sequence of exchanges. All processes must make the same ones, in the same order.

    Args:
        store: The key-value store.
        rank: The index of this process.
        count: How many processes there are.
        name: The name of the channel, the same on all processes.
        before: The name of a channel that all processes have left when they come to this one; its
            keys are deleted. None if there is none.

    Attributes:
        rank: The index of this process.
        done: How many exchanges were begun.
    """

    def __init__(
        self, store: Store, rank: int, count: int, name: str, before: str | None = None
    ) -> None:
        self.rank = rank
        self.done = 0
        self._store = store
        self._count = count
        self._path = f"{_ROOT}/{name}"
        self._before = before

    def exchange(self, mine: str, seconds: float, patient: bool = False) -> Messages:
        """Give a message, and get those of all processes.

        Args:
            mine: The message of this process.
            seconds: How long to wait for the others.
            patient: Whether to wait on while one of them says that it is `busy`.

        Raises:
            StoreLost: The store does not answer.
        """
        step, self.done = self.done, self.done + 1
        path = f"{self._path}/{step}"
        patience = _Patience(seconds, self._pulses if patient else None)
        if self.rank == 0:
            every = self._collected(path, mine, patience)
            self._delete(step)
            return tuple(json.loads(every))
        self._store.set(f"{path}/{self.rank}", mine)
        published = self._wait(f"{path}/all", patience)
        if published is None:
            self._store.set(f"{path}/{self.rank}", _GONE)
            found = self._store.under(f"{path}/")
            published = found.get("all") or self._listed(found, mine)
        return tuple(json.loads(published))

    def tell(self, message: str) -> None:
        """Give a message for the next exchange without waiting for those of the others.

        Args:
            message: Why this process does not take part, which the others read.

        Raises:
            StoreLost: The store does not answer.
        """
        step, self.done = self.done, self.done + 1
        path = f"{self._path}/{step}"
        if self.rank:
            self._store.set(f"{path}/{self.rank}", message)
        else:
            every = [message, *[""] * (self._count - 1)]
            self._store.set(f"{path}/all", json.dumps(every))
            self._delete(step)

    # --- parts of an exchange ---

    def _collected(self, path: str, mine: str, patience: _Patience) -> str:
        """Collect the messages, and publish them."""
        began = time.monotonic()
        found: dict[str, str] = {}
        for other in map(str, range(1, self._count)):
            # Those that wait longer than this process learn that it is not the one that is missing.
            message = self._wait(f"{path}/{other}", patience, lambda: self._announce(path, mine))
            if message is not None:
                found[other] = message
        if time.monotonic() - began > _SLICE:  # somebody may have given up meanwhile
            found |= self._store.under(f"{path}/")
        every = self._listed(found, mine)
        self._store.set(f"{path}/all", every)
        return every

    def _announce(self, path: str, mine: str) -> None:
        """Write the message of process 0, which nobody else needs, to show that it has come."""
        self._store.set(f"{path}/0", mine)

    def _listed(self, found: dict[str, str], mine: str) -> str:
        """The messages in the order of the processes, with None for those that are missing."""
        every = [found.get(str(i)) for i in range(self._count)]
        every[self.rank] = mine
        return json.dumps([None if x == _GONE else x for x in every])

    def _wait(
        self, key: str, patience: _Patience, announce: Callable[[], None] | None = None
    ) -> str | None:
        """The value of a key; None if there was none in time."""
        while True:
            value = self._store.get(key, min(_SLICE, patience.left))
            if value is not None:
                return value
            if announce is not None:
                announce()
            if not patience.lasts():
                return None

    def _delete(self, step: int) -> None:
        """Delete the keys that every process has read."""
        if step >= 2:
            self._store.delete(f"{self._path}/{step - 2}/")
        elif self._before is not None:
            self._store.delete(f"{_ROOT}/{self._before}/")

    # --- signs of life ---

    @contextmanager
    def busy(self, seconds: float) -> Iterator[None]:
        """A context in which this process tells the others from time to time that it is alive.

        Args:
            seconds: How long the others wait without such a sign.
        """
        done = threading.Event()
        path = f"{_ROOT}/pulse/{self.rank}"

        def beat() -> None:
            count = 0
            while not done.wait(min(5.0, seconds / 4)):
                count += 1
                try:
                    self._store.set(path, f"{time.time()} {count}")
                except StoreLost:
                    return

        thread = threading.Thread(target=beat, name="bucketjit-pulse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()

    def _pulses(self) -> dict[str, str]:
        """The last sign of life of each process that has given one."""
        found = self._store.under(f"{_ROOT}/pulse/")
        found.pop(str(self.rank), None)
        return found


class _Patience:
    """How long an exchange waits.

    Args:
        seconds: The time.
        pulses: Returns the last signs of life of the other processes: each new one starts the time
            again. None for no such extension.
    """

    def __init__(self, seconds: float, pulses: Callable[[], dict[str, str]] | None) -> None:
        self._seconds, self._pulses = seconds, pulses
        self._last = pulses() if pulses is not None else {}
        self._until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return max(0.0, self._until - time.monotonic())

    def lasts(self) -> bool:
        """Whether to wait on."""
        if self.left > 0:
            return True
        seen = self._last
        if self._pulses is not None:
            self._last = self._pulses()
        if self._last == seen:
            return False
        self._until = time.monotonic() + self._seconds
        return True
