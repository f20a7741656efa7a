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
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bucketjit import _jax
from bucketjit._persistence.files import Header, key_of
from bucketjit._persistence.store import Store, Wanted
from bucketjit._workers import is_running, short_turns

MOST = 32  # executables that wait before anybody has asked for them
_THREADS = 2

_Program = tuple[str | None, str | None]  # digests of a program, and of its constants


class Preloading:
    """What is loaded ahead for one cache.

    A fork of the process has none of it: there, nobody goes on with what is being loaded, and a
    lock may be held for ever.

    Args:
        room: Tells how many executables there may be that nobody has asked for.
    """

    def __init__(self, room: Callable[[], float]) -> None:
        self._room = room
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._preloads: dict[tuple[Path, str], _Preloads] = {}

    def expect(
        self, store: Store, kind: str, device: Any, environment: Callable[[], Mapping[str, str]]
    ) -> None:
        """Begin to load what a directory holds of a kind of calls, the latest first.

        Args:
            store: The directory.
            kind: The kind of calls; see `Wanted`.
            device: Where they will run.
            environment: Tells what executables depend on here besides their program.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            known = (store.directory, kind)
            if known in self._preloads or (most := self._most()) < 1:
                return
            # Not in the threads: they would wait for Python's lock after each source that is read.
            self._preloads[known] = _Preloads(store, kind, most, device, environment())

    def claim(self, store: Store, wanted: Wanted) -> tuple[Header, Any] | None:
        """What was loaded of this, for whoever asks first; None if nothing was, or in vain."""
        if os.getpid() != self._pid:
            return None
        with self._lock:
            preloads = self._preloads.get((store.directory, wanted.kind))
            preload = None if preloads is None else preloads.pop(wanted)
            self._most(coming=1)
        return None if preload is None else preload.take()

    def clear(self) -> None:
        """Forget what was loaded ahead."""
        if os.getpid() == self._pid:
            with self._lock:
                self._preloads.clear()

    def _most(self, coming: int = 0) -> int:
        """Forget what there is no room for besides what comes; how many more may be loaded."""
        left = min(self._room() - coming, MOST)
        for preloads in self._preloads.values():
            left -= preloads.keep(int(left))
        return int(left)


class _Preloads:
    """What is loaded ahead from one directory, for one kind of calls."""

    def __init__(
        self, store: Store, kind: str, most: int, device: Any, environment: Mapping[str, str]
    ) -> None:
        self._programs: set[_Program] = set()  # that were asked for; the threads look there too
        load = functools.partial(_load, store, device, dict(environment), self._programs)
        self._waiting = {
            key_of(path): _Preload(functools.partial(load, path))
            for path in store.latest(kind, most)
        }
        todo = deque(self._waiting.values())
        weakref.finalize(self, todo.clear)
        with contextlib.suppress(RuntimeError):  # no more threads can be started
            for _ in range(min(_THREADS, len(todo)) if is_running() else 0):
                # No daemon: the interpreter must not end, and cut it off, while it is inside XLA.
                threading.Thread(target=_work, args=(todo,), name="bucketjit-preload").start()

    def pop(self, wanted: Wanted) -> _Preload | None:
        """The one that is wanted. Those of other programs go, now that this one is known."""
        self._programs.add((wanted.parts["program"], wanted.parts["constants"]))
        found = self._waiting.pop(wanted.key, None)
        for key in [k for k, p in self._waiting.items() if p.is_in_vain(self._programs)]:
            del self._waiting[key]
        return found

    def keep(self, most: int) -> int:
        """Forget all but so many, those first that were of use longest ago; tell how many stay."""
        while len(self._waiting) > max(most, 0):
            _, preload = self._waiting.popitem()
            preload.drop()
        return len(self._waiting)


class _Preload:
    """One file: not begun, being loaded, or loaded."""

    def __init__(self, load: Callable[[], tuple[Header, Any] | None]) -> None:
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

    def is_in_vain(self, programs: set[_Program]) -> bool:
        """Whether it was loaded, and is of no use to these programs."""
        return self._done.is_set() and not _is_of(self._found, programs)

    def drop(self) -> None:
        """Do not begin."""
        self._begin.acquire(blocking=False)


def _work(todo: deque[_Preload]) -> None:
    with short_turns():
        while is_running():
            try:
                preload = todo.popleft()
            except IndexError:
                return
            with contextlib.suppress(Exception):  # whoever asks for it reads it again, and tells
                preload.run()
            del preload


def _load(
    store: Store, device: Any, environment: dict[str, str], programs: set[_Program], path: Path
) -> tuple[Header, Any] | None:
    """Load a file that is fit for this process, and for one of the programs if they are known.

    Raises:
        Exception: It cannot be used.
    """
    header, raw = store.read(path)
    if dict(header.environment) != environment or not _is_of((header, None), programs):
        return None
    found = header, _jax.deserialized(raw, device)
    return found if _is_of(found, programs) else None


def _is_of(found: tuple[Header, Any] | None, programs: set[_Program]) -> bool:
    """Whether something was found, and is of one of the programs as far as they are known."""
    if found is None:
        return False
    parts = found[0].parts
    return not programs or (parts.get("program"), parts.get("constants")) in programs
