"""Where the executables of one engine are kept in files: no problem with a file breaks a call.

`directory` reads and writes the files and raises. This module turns what it raises into events and
warnings.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr

from bucketjit._compile.files import directory as files
from bucketjit._compile.files import record
from bucketjit._compile.files.directory import Distrusted
from bucketjit._compile.files.record import Record
from bucketjit._config import Persistent
from bucketjit._events import Event, warn
from bucketjit._ir.program import Program
from bucketjit._jax.serialization import compilation_cache
from bucketjit._raised import is_of_machine
from bucketjit.errors import PersistenceWarning

_SUBDIRECTORY = "bucketjit"  # of JAX's own cache


class Store(NamedTuple):
    """A directory of executables. Nothing in it is kept open or locked.

    Attributes:
        directory: The directory.
        max_bytes: The most bytes of all files; None for no bound.
        min_seconds: The fewest seconds of a compile that is written.
        warns: Whether the user asked for it, and wants to know that it cannot be used.
    """

    directory: Path
    max_bytes: int | None
    min_seconds: float = 0.0
    warns: bool = True


class ExecutableFiles:
    """Where the executables of one engine are kept in files, and the digests of its programs."""

    def __init__(
        self,
        config: Persistent | None,
        rules: Mapping[Any, Any],
        name: str,
        tell: Callable[[Event], None],
    ) -> None:
        self._config, self._rules, self.name, self._tell = config, rules, name, tell
        # The digest of each program, or the reason why it has none.
        self._programs: weakref.WeakKeyDictionary[Program, tuple[str | None, str]]
        self._programs = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._told: set[object] = set()

    def store(self) -> Store | None:
        """The directory that is in use now, or None."""
        if self._config is not None:
            directory = self._config.directory
            return None if directory is None else Store(Path(directory), self._config.max_bytes)
        of_jax = compilation_cache()
        if of_jax is None:
            return None
        directory, seconds, bound = of_jax
        return Store(Path(directory) / _SUBDIRECTORY, None if bound < 0 else bound, seconds, False)

    def digest_of(self, program: Program) -> str:
        """The digest of a program and its constants, which cannot be written to. Made once."""
        from bucketjit._compile.files.fingerprint import NoDigest

        # Threads that need several buckets of one program wait for the one that makes the digest.
        with self._lock:
            result = self._programs.get(program)
            if result is None:
                try:
                    result = self.digest(program.jaxpr, program.consts), ""
                except NoDigest as error:
                    result = None, str(error)  # not the error itself: its frames hold the program
                self._programs[program] = result
        text, why = result
        if text is None:
            raise NoDigest(why)
        return text

    def digest(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> str:
        """The digest of an open jaxpr and its constants, with the contents that these have now."""
        from bucketjit._compile.files.fingerprint import NoDigest, program_digest

        text, primitives = program_digest(jaxpr, consts)
        for primitive in primitives:
            if primitive in self._rules or primitive.name in self._rules:
                raise NoDigest(f"the rule of {primitive.name} is one of with_rules")
        return text

    def find(self, store: Store, wanted: Record) -> tuple[Record, bytes] | None:
        """A record and its bytes; None without a file. An event says why one cannot be used."""
        path = store.directory / wanted.file_name
        try:
            files.check_directory(store.directory)
            loaded, raw = files.load(path)
        except FileNotFoundError:
            return None
        except Distrusted as error:
            self._warn(store, wanted, "distrusted", str(error))
        except Exception as error:
            if is_of_machine(error):
                why = f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
                self._warn(store, wanted, "unreadable", why)
            else:
                self.discard(store, wanted, str(error))
        else:
            with contextlib.suppress(OSError):
                os.utime(path)  # `bound` removes those that were not used for longest
            return loaded, raw
        return None

    def keep(self, store: Store, compiled: Record, raw: bytes) -> None:
        """Write an executable; emit an event and warn if that is not possible."""
        if len(raw) > record.LARGEST:
            why = f"its executable has {len(raw)} bytes; a file holds {record.LARGEST} at most"
            self.refuse(compiled.sizes, why)
            return
        path, bound = store.directory / compiled.file_name, store.max_bytes
        try:
            path.parent.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            files.check_directory(path.parent)
            files.write(path, record.pack(compiled, raw))
            if bound is not None and path in files.bound(path.parent, bound):
                self.refuse(
                    compiled.sizes, f"its file has more than the {bound} bytes that files may have"
                )
        except Distrusted as error:
            self._warn(store, compiled, "distrusted", str(error), "It is not kept")
        except OSError as error:
            why = f"cannot write {path}: {error.strerror or error}"
            self._warn(store, compiled, "unwritable", why, "It is not kept")

    def discard(self, store: Store, wanted: Record, why: str) -> None:
        """Remove a file that cannot be used. The next compile of its executable writes it again."""
        path = store.directory / wanted.file_name
        files.remove(path)
        self._warn(store, wanted, "damaged", f"{path} is damaged and is made again: {why}")

    def refuse(self, sizes: Mapping[str, int], why: str) -> None:
        """Emit an event for an executable that is not stored, once for each reason and bucket."""
        if (repr(sizes), why) not in self._told:
            self._told.add((repr(sizes), why))
            self._tell(Event("unstored", self.name, sizes, detail=why))

    def _warn(
        self,
        store: Store,
        wanted: Record,
        what: str,
        detail: str,
        after: str = "The call goes on with a compile",
    ) -> None:
        """Emit an event for a problem, and warn of the first one of its kind in the directory."""
        self._tell(Event(what, self.name, wanted.sizes, detail=detail))
        if (store, what) not in self._told and (store.warns or what == "damaged"):
            self._told.add((store, what))
            warn(f"{self.name}: {detail}. {after}", PersistenceWarning)
