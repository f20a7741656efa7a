"""Load executables from files while their function is still being traced.

The file that a call needs is known only after tracing. But the files stored for the same function
and arguments of the same kind are likely to be needed next. Loading them needs no program, and runs
for the most part without Python's lock, so it overlaps with the tracing. A preloaded executable is
stored under its full key and handed out for that key only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax

from bucketjit._compile.background import is_running
from bucketjit._compile.cache import ExecutableCache
from bucketjit._jax.serialization import Placement, deserialized
from bucketjit._persistence.file_format import Header
from bucketjit._persistence.files import key_of
from bucketjit._persistence.store import Store, Wanted

MOST = 32  # executables that are preloaded and not yet requested
_THREADS = 2  # for each kind of calls

_Program = tuple[str | None, str | None]  # digests of a program, and of its constants
_Found = tuple[Header, Any]  # the header of a file, and the loaded executable
_Load = Callable[[], _Found | None]


class Preloading:
    """The preloaded executables of one cache.

    A fork of the process gets none of them: the threads that load do not exist there, and a lock
    may stay locked for ever.

    Args:
        cache: Where executables go when they are requested. Its free room limits how many are
            preloaded.
    """

    def __init__(self, cache: ExecutableCache[Any, Any]) -> None:
        self._cache = cache
        self._pid = os.getpid()  # another one later means: this is a fork
        self._lock = threading.Lock()
        self._preloads: dict[tuple[Path, str], _Preloads] = {}

    def expect(
        self,
        store: Store,
        kind: str,
        device: jax.Device,
        environment: Callable[[], Mapping[str, str]],
    ) -> None:
        """Begin to load the files that a directory holds for a kind of calls, the last used first.

        A second request for the same directory and kind does nothing.

        Args:
            store: The directory.
            kind: The kind of calls; see `Wanted`.
            device: The device that they will run on.
            environment: Returns what executables depend on besides their program.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            known = (store.directory, kind)
            if known in self._preloads or (most := self._most()) < 1:
                return
            # The environment is found here and not in the threads: it reads many source files, and
            # after each a thread would wait for Python's lock.
            self._preloads[known] = _Preloads(store, kind, most, device, environment())

    def claim(self, store: Store, wanted: Wanted) -> _Found | None:
        """Hand out a preloaded executable; waits if it is being loaded right now.

        Args:
            store: The directory.
            wanted: The executable.

        Returns:
            The header and the loaded executable. None if it was not preloaded, was claimed before,
            could not be loaded, or is still in the queue, from which it is removed.
        """
        if os.getpid() != self._pid:
            return None
        with self._lock:
            preloads = self._preloads.get((store.directory, wanted.kind))
            future = None if preloads is None else preloads.pop(wanted)
            self._most(coming=1)
        # Still in the queue: the caller loads it sooner itself.
        if future is None or future.cancel():
            return None
        return future.result()

    def clear(self) -> None:
        """Drop all preloaded executables."""
        if os.getpid() == self._pid:
            with self._lock:
                self._preloads.clear()

    def _most(self, coming: int = 0) -> int:
        """Drop the executables that there is no room for.

        Args:
            coming: How many others are about to be added to the cache.

        Returns:
            How many more may be preloaded.
        """
        left = min(self._cache.room - coming, MOST)
        for preloads in self._preloads.values():
            left -= preloads.keep(int(left))
        return int(left)


class _Preloads:
    """The preloaded executables of one kind of calls, from one directory."""

    def __init__(
        self, store: Store, kind: str, most: int, device: jax.Device, environment: Mapping[str, str]
    ) -> None:
        # Requested programs; the threads skip files of others.
        self._programs: set[_Program] = set()
        self._waiting: dict[str, Future[_Found | None]] = {}
        load = functools.partial(_load, store, device, environment, self._programs)
        todo: deque[tuple[_Load, Future[_Found | None]]] = deque()
        for path in store.latest(kind, most):
            future = self._waiting[key_of(path)] = Future()
            todo.append((functools.partial(load, path), future))
        weakref.finalize(self, todo.clear)
        with contextlib.suppress(RuntimeError):  # no more threads can be started
            for _ in range(min(_THREADS, len(todo)) if is_running() else 0):
                # No daemon: the interpreter would stop it at exit, possibly inside XLA.
                threading.Thread(target=_work, args=(todo,), name="bucketjit-preload").start()

    def pop(self, wanted: Wanted) -> Future[_Found | None] | None:
        """Take out the future of an executable, or None. Drop those of programs not requested."""
        self._programs.add((wanted.parts["program"], wanted.parts["constants"]))
        future = self._waiting.pop(wanted.key, None)
        self._waiting = {k: f for k, f in self._waiting.items() if not self._is_in_vain(f)}
        return future

    def _is_in_vain(self, future: Future[_Found | None]) -> bool:
        """Whether loading has ended, and with nothing for the programs that were requested."""
        if not future.done():
            return False
        found = future.result()
        return found is None or not _is_of(found[0], self._programs)

    def keep(self, most: int) -> int:
        """Drop all but so many, those that were used longest ago first.

        Args:
            most: How many may stay.

        Returns:
            How many stay.
        """
        while len(self._waiting) > max(most, 0):
            _, future = self._waiting.popitem()  # the last one, as the first is the last used
            future.cancel()
        return len(self._waiting)


def _work(todo: deque[tuple[_Load, Future[_Found | None]]]) -> None:
    """What a thread runs: load one file after the other until none is left."""
    while is_running():
        try:
            load, future = todo.popleft()
        except IndexError:
            return
        if not future.set_running_or_notify_cancel():
            continue
        found = None
        try:
            # The request reads the file again and reports it.
            with contextlib.suppress(Exception):
                found = load()
        finally:
            future.set_result(found)


def _load(
    store: Store,
    device: jax.Device,
    environment: Mapping[str, str],
    programs: set[_Program],
    path: Path,
) -> _Found | None:
    """Load a file that was written in this environment, for one of the requested programs.

    While no program is known, files of any program are loaded.

    Returns:
        The header and the loaded executable; None if it is of another environment or program.

    Raises:
        Exception: The file cannot be used.
    """
    header, raw = store.read(path)
    if dict(header.environment) != dict(environment) or not _is_of(header, programs):
        return None
    found = header, deserialized(raw, Placement.on(device))
    return found if _is_of(header, programs) else None  # again: a program may be known by now


def _is_of(header: Header, programs: set[_Program]) -> bool:
    """Whether a file is of one of the programs. True as long as no program is known."""
    parts = header.parts
    return not programs or (parts.get("program"), parts.get("constants")) in programs
