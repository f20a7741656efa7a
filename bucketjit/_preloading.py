"""Executables that are read from files while their function is still being traced.

Which file holds what a call needs is known only when its program is. But what was stored of the
same function, for arguments like these, is likely to be asked for next, and to load it takes
neither the program nor, for the most part, Python's lock. What is loaded so waits under its key,
and nobody gets it by any other.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bucketjit import _jax
from bucketjit._config import Background
from bucketjit._persistence.files import Header, key_of
from bucketjit._persistence.store import Store, Wanted
from bucketjit._workers import Workers

MOST = 32  # executables that wait before anybody has asked for them
_THREADS = 2


class Preloads:
    """What is loaded ahead from one directory, for one kind of calls.

    A fork of the process has none: there, nobody goes on with what is being loaded.

    Args:
        store: The directory.
        kind: The kind of calls; see `Wanted`.
        most: The most executables to load, those first that were of use last.
        device: Where they will run.
        environment: What executables depend on here besides their program.
    """

    def __init__(
        self, store: Store, kind: str, most: int, device: Any, environment: Mapping[str, str]
    ) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._programs: set[str] = set()  # digests of what was asked for; shared with the threads
        load = functools.partial(_load, store, device, dict(environment), self._programs)
        self._waiting = {
            key_of(path): _Preload(functools.partial(load, path))
            for path in store.latest(kind, most)
        }
        self._workers: Workers | None = None
        if self._waiting:
            self._workers = Workers(Background(workers=_THREADS, queue=len(self._waiting)))
            with contextlib.suppress(RuntimeError):  # no more threads can be started
                for key, preload in list(self._waiting.items()):
                    self._workers.submit(key, preload.run)

    def claim(self, wanted: Wanted) -> tuple[Header, Any] | None:
        """What was loaded of this, for whoever asks first; None if nothing was, or in vain."""
        if os.getpid() != self._pid:
            return None
        with self._lock:
            self._programs.add(wanted.parts["program"])
            preload = self._waiting.pop(wanted.key, None)
            self._end_if_empty()
        return None if preload is None else preload.take()

    def keep(self, most: int) -> int:
        """Forget all but so many, those first that were of use longest ago; tell how many stay."""
        if os.getpid() != self._pid:
            return 0
        with self._lock:
            while len(self._waiting) > max(most, 0):
                _, preload = self._waiting.popitem()
                preload.drop()
            self._end_if_empty()
            return len(self._waiting)

    def _end_if_empty(self) -> None:
        if not self._waiting:
            self._workers = None  # and its threads end


class _Preload:
    """One file: not begun, being loaded, or loaded."""

    def __init__(self, load: Any) -> None:
        self._load = load
        self._begin = threading.Lock()  # who gets it loads, or keeps others from it; for good
        self._done = threading.Event()
        self._found: tuple[Header, Any] | None = None

    def run(self) -> None:
        """Load it, unless nobody wants that any more."""
        if not self._begin.acquire(blocking=False):
            return
        try:
            self._found = self._load()
        finally:
            self._done.set()

    def take(self) -> tuple[Header, Any] | None:
        """What was loaded; None if that has not begun, or failed."""
        if self._begin.acquire(blocking=False):
            return None
        self._done.wait()
        return self._found

    def drop(self) -> None:
        """Do not begin."""
        self._begin.acquire(blocking=False)


def _load(
    store: Store, device: Any, environment: dict[str, str], programs: set[str], path: Path
) -> tuple[Header, Any] | None:
    """Load a file that is fit for this process, and for one of the programs if they are known.

    Raises:
        Exception: It cannot be used. Whoever asks for it will read it again, and tell.
    """
    header, raw = store.read(path)
    if dict(header.environment) != environment:
        return None
    if programs and header.parts.get("program") not in programs:
        return None  # the function was another then
    return header, _jax.deserialized(raw, device)
