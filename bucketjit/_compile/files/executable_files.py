"""Where the executables of one engine are kept in files, and the digests of its programs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jax.extend.core import Jaxpr

from bucketjit._compile.files.fingerprint import NoDigest, program_digest
from bucketjit._compile.files.keys import OWN_PRIMITIVES, digest_of
from bucketjit._compile.files.store import Store
from bucketjit._config import Persistent
from bucketjit._events import Event
from bucketjit._ir.program import Program
from bucketjit._jax.serialization import compilation_cache
from bucketjit._tracing.call import Call

S = TypeVar("S")

_SUBDIRECTORY = "bucketjit"  # of JAX's own cache


class ExecutableFiles:
    """Where the executables of one engine are kept in files."""

    def __init__(
        self,
        config: Persistent | None,
        rules: Mapping[Any, Any],
        name: str,
        tell: Callable[[Event], None],
    ) -> None:
        self._config = config
        self._rules = rules
        self.name = name
        self._tell = tell
        self._stores: dict[Any, Store] = {}
        # The digests of each program, or the reason why it has none.
        self._programs: weakref.WeakKeyDictionary[Program, Mapping[str, str] | str]
        self._programs = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._refused: set[tuple[str, str]] = set()

    def store(self) -> Store | None:
        """The directory that is in use now, or None."""
        if self._config is not None:
            directory = self._config.directory
            if directory is None:
                return None
            known: tuple[Any, ...] = (directory, 0.0, self._config.max_bytes)
        else:
            of_jax = compilation_cache()
            if of_jax is None:
                return None
            bound = None if of_jax[2] < 0 else of_jax[2]
            known = (str(Path(of_jax[0]) / _SUBDIRECTORY), of_jax[1], bound)
        if known not in self._stores:
            directory, seconds, bound = known
            asked = self._config is not None
            self._stores[known] = Store(Path(directory), bound, seconds, asked, self._tell)
        return self._stores[known]

    def place(
        self,
        kind: Callable[..., S],
        call: Call,
        sizes: Mapping[str, int],
        made: Callable[[], Any],
    ) -> S | None:
        """The place of an executable; None if executables are not kept in files."""
        store = self.store()
        return None if store is None else kind(self, store, call, sizes, made)

    def digests_of(self, program: Program) -> Mapping[str, str]:
        """Digests of a program and its constants. Made once: its constants cannot be written to."""
        # Threads that need several buckets of one program wait for the one that makes the digests.
        with self._lock:
            known = self._programs.get(program)
            if known is None:
                try:
                    known = self.digests(program.jaxpr, program.consts)
                except NoDigest as error:
                    known = str(error)  # not the error itself: its frames hold the program
                self._programs[program] = known
        if isinstance(known, str):
            raise NoDigest(known)
        return known

    def digests(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> Mapping[str, str]:
        """Digests of an open jaxpr and of its constants, with the contents that arrays have now."""
        program = program_digest(jaxpr, OWN_PRIMITIVES)
        for primitive in program.primitives:
            if primitive in self._rules or primitive.name in self._rules:
                raise NoDigest(f"the rule of {primitive.name} is one of with_rules")
        return {"program": program.text, "constants": digest_of(consts)}

    def refuse(self, store: Store, sizes: Mapping[str, int], why: str) -> None:
        """Emit an event for an executable that is not stored, once for each reason and bucket."""
        once = (repr(sizes), why)
        if once not in self._refused:
            self._refused.add(once)
            store.refuse(self.name, sizes, why)
