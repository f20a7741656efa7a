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
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax

from bucketjit._compile.background import is_running, short_turns
from bucketjit._compile.cache import ExecutableCache
from bucketjit._jax.serialization import deserialized
from bucketjit._persistence.files import Header, key_of
from bucketjit._persistence.store import Store, Wanted

MOST = 32  # executables that wait before anybody has asked for them
_THREADS = 2

_Program = tuple[str | None, str | None]  # digests of a program, and of its constants
_Found = tuple[Header, Any]  # what a file says of its executable, and that
_Load = Callable[[], _Found | None]


class Preloading:
    """What is loaded ahead for one cache.

    A fork of the process has none of it: there, nobody goes on with what is being loaded, and a
    lock may be held for ever.

    Args:
        cache: Where they go once they are asked for; its room bounds how many wait.
    """

    def __init__(self, cache: ExecutableCache[Any, Any]) -> None:
        self._cache = cache
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._preloads: dict[tuple[Path, str], _Preloads] = {}

    def expect(
        self,
        store: Store,
        kind: str,
        device: jax.Device,
        environment: Callable[[], Mapping[str, str]],
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

    def claim(self, store: Store, wanted: Wanted) -> _Found | None:
        """What was loaded of this, for whoever asks first; None if nothing was, or in vain."""
        if os.getpid() != self._pid:
            return None
        with self._lock:
            preloads = self._preloads.get((store.directory, wanted.kind))
            future = None if preloads is None else preloads.pop(wanted)
            self._most(coming=1)
        if future is None or future.cancel():  # it has not begun
            return None
        return future.result()

    def clear(self) -> None:
        """Forget what was loaded ahead."""
        if os.getpid() == self._pid:
            with self._lock:
                self._preloads.clear()

    def _most(self, coming: int = 0) -> int:
        """Forget what there is no room for besides what comes; how many more may be loaded."""
        left = min(self._cache.room - coming, MOST)
        for preloads in self._preloads.values():
            left -= preloads.keep(int(left))
        return int(left)


class _Preloads:
    """What is loaded ahead from one directory, for one kind of calls."""

    def __init__(
        self, store: Store, kind: str, most: int, device: jax.Device, environment: Mapping[str, str]
    ) -> None:
        self._programs: set[_Program] = set()  # that were asked for; the threads look there too
        self._waiting: dict[str, Future[_Found | None]] = {}
        load = functools.partial(_load, store, device, environment, self._programs)
        todo: deque[tuple[_Load, Future[_Found | None]]] = deque()
        for path in store.latest(kind, most):
            future = self._waiting[key_of(path)] = Future()
            todo.append((functools.partial(load, path), future))
        weakref.finalize(self, todo.clear)
        with contextlib.suppress(RuntimeError):  # no more threads can be started
            for _ in range(min(_THREADS, len(todo)) if is_running() else 0):
                # No daemon: the interpreter must not end, and cut it off, while it is inside XLA.
                threading.Thread(target=_work, args=(todo,), name="bucketjit-preload").start()

    def pop(self, wanted: Wanted) -> Future[_Found | None] | None:
        """The one that is wanted. Those of other programs go, now that this one is known."""
        self._programs.add((wanted.parts["program"], wanted.parts["constants"]))
        future = self._waiting.pop(wanted.key, None)
        self._waiting = {k: f for k, f in self._waiting.items() if not self._is_in_vain(f)}
        return future

    def _is_in_vain(self, future: Future[_Found | None]) -> bool:
        """Whether it has ended, and with nothing for the programs that are known."""
        if not future.done():
            return False
        found = future.result()
        return found is None or not _is_of(found[0], self._programs)

    def keep(self, most: int) -> int:
        """Forget all but so many, those first that were of use longest ago; tell how many stay."""
        while len(self._waiting) > max(most, 0):
            _, future = self._waiting.popitem()
            future.cancel()
        return len(self._waiting)


def _work(todo: deque[tuple[_Load, Future[_Found | None]]]) -> None:
    with short_turns():
        while is_running():
            try:
                load, future = todo.popleft()
            except IndexError:
                return
            if not future.set_running_or_notify_cancel():
                continue
            found = None
            try:
                with contextlib.suppress(Exception):  # who asks for it reads it again, and tells
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
    """Load a file that is fit for this process, and for one of the programs if they are known.

    Raises:
        Exception: It cannot be used.
    """
    header, raw = store.read(path)
    if dict(header.environment) != dict(environment) or not _is_of(header, programs):
        return None
    found = header, deserialized(raw, device)
    return found if _is_of(header, programs) else None  # they may have become known meanwhile


def _is_of(header: Header, programs: set[_Program]) -> bool:
    """Whether a file is of one of the programs, as far as they are known."""
    parts = header.parts
    return not programs or (parts.get("program"), parts.get("constants")) in programs
