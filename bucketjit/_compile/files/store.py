"""A directory of executables as a bucketed function uses it: no problem with a file breaks a call.

`directory` reads and writes the files and raises. This module turns what it raises into events and
warnings.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from bucketjit._compile.files import directory as files
from bucketjit._compile.files import record
from bucketjit._compile.files.directory import Distrusted
from bucketjit._compile.files.record import Damaged, Record
from bucketjit._events import LONGEST, Event, printable
from bucketjit._raised import frames_inside
from bucketjit.errors import PersistenceWarning

# What warnings say of the executable after a problem with its file.
_TO_COMPILE, _NOT_KEPT = "The call goes on with a compile", "It is not kept"

_SHOWN_PARTS = {
    "program": "the program changed",
    "constants": "the constants it closes over changed",
    "call": "the types of its results, the sizes it holds for, or how it is called changed",
}


class Store:
    """A directory of executables.

    Keeps no file open and no locks, so several threads and processes may use it, also on several
    machines, and a fork may.

    Attributes:
        directory: The directory.
        min_seconds: The fewest seconds of a compile that is written.
    """

    # The environments of the files that this process has written or loaded, by path.
    _in_use: ClassVar[dict[Path, Mapping[str, str]]] = {}

    def __init__(
        self,
        directory: Path,
        max_bytes: int | None,
        min_seconds: float,
        warns: bool,
        tell: Callable[[Event], None],
    ) -> None:
        self.directory = directory
        self.min_seconds = min_seconds
        self._max_bytes = max_bytes
        self._warns = warns
        self._tell = tell
        self._warned: set[str] = set()

    def find(self, wanted: Record) -> tuple[Sequence[int], bytes] | None:
        """The arguments that an executable takes, and its bytes; None if no file can be used.

        If a file exists and cannot be used, an event says why.
        """
        path = self._path(wanted)
        try:
            files.check_directory(self.directory)
            found, raw = files.load(path)
            if found.key != wanted.key:
                raise Damaged("its name is not that of its key")
        except FileNotFoundError:
            self._tell_stale(wanted)
            return None
        except Distrusted as error:
            self._warn(wanted, "distrusted", str(error))
            return None
        except Damaged as error:
            self.discard(wanted, str(error))
            return None
        except OSError as error:
            self._warn(wanted, "unreadable", f"cannot read {path}: {error.strerror or error}")
            return None
        files.mark_used(path)
        self._in_use[path] = wanted.environment
        return found.kept, raw

    def records(self) -> list[Record]:
        """What the files of the directory say; files that cannot be used are left out."""
        try:
            files.check_directory(self.directory)
            found = [entry.found for entry in files.entries(self.directory)]
        except (Distrusted, OSError):
            return []
        return [one for one in found if isinstance(one, Record)]

    def keep(self, compiled: Record, raw: bytes) -> None:
        """Write an executable; emit an event and warn if that is not possible."""
        if len(raw) > record.LARGEST:
            why = f"its executable has {len(raw)} bytes; a file holds {record.LARGEST} at most"
            self.refuse(compiled.name, compiled.sizes, why)
            return
        path = self.directory / files.file_name(compiled)
        try:
            files.make_directory(self.directory)
            files.check_directory(self.directory)
            files.write(path, record.pack(compiled, raw))
            self._in_use[path] = compiled.environment
            if self._max_bytes is not None and path in files.bound(self.directory, self._max_bytes):
                why = f"its file has more than the {self._max_bytes} bytes that files may have"
                self.refuse(compiled.name, compiled.sizes, why)
        except Distrusted as error:
            self._warn(compiled, "distrusted", str(error), _NOT_KEPT)
        except OSError as error:
            why = f"cannot write {path}: {error.strerror or error}"
            self._warn(compiled, "unwritable", why, _NOT_KEPT)

    def discard(self, wanted: Record, why: str) -> None:
        """Remove a file that cannot be used. The next compile of its executable writes it again."""
        path = self._path(wanted)
        files.remove(path)
        self._warn(wanted, "damaged", f"{path} is damaged and is made again: {why}")

    def refuse(self, name: str, sizes: Mapping[str, int], why: str) -> None:
        """Emit an event for an executable that is not stored."""
        self._tell(Event("unstored", name, sizes, detail=why))

    def _path(self, wanted: Record) -> Path:
        """The file of an executable, or one with the same key and another identity.

        The same program may have written that one under another function name or module.
        """
        path = self.directory / files.file_name(wanted)
        if os.path.exists(path):  # `Path.exists` may raise
            return path
        return files.of_key(self.directory, wanted.key) or path

    def _warn(self, wanted: Record, what: str, detail: str, after: str = _TO_COMPILE) -> None:
        """Emit an event for a problem, and warn of the first one of its kind."""
        self._tell(Event(what, wanted.name, wanted.sizes, detail=detail))
        if what not in self._warned and (self._warns or what == "damaged"):
            self._warned.add(what)
            warnings.warn(
                printable(f"{wanted.name}: {detail}. {after}", LONGEST),
                PersistenceWarning,
                stacklevel=frames_inside(),
            )

    def _tell_stale(self, wanted: Record) -> None:
        """Emit an event for a file that could have been used if nothing had changed since.

        A file that this process has used itself belongs to another function of the same name.
        """
        try:
            for path in files.others_of(self.directory, wanted):
                if self._in_use.get(path) == wanted.environment:
                    continue
                changes = differences(files.load(path)[0], wanted)
                self._tell(Event("stale", wanted.name, wanted.sizes, detail=f"{path}: {changes}"))
                return
        except (OSError, Damaged, Distrusted):
            return  # the command `list` reports those


def differences(then: Record, now: Record) -> str:
    """What has changed since a file was written, in words."""
    changes = environment_changes(then.environment, now.environment)
    changes += part_changes(then.parts, now.parts)
    return "; ".join(changes) or "what it was compiled with is not known"


def environment_changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two environments, in words."""
    return [
        f"{name} was {then.get(name, 'not there')!s}, is {now.get(name, 'not there')!s}"
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name)
    ]


def part_changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Which digests differ, in words."""
    return [text for part, text in _SHOWN_PARTS.items() if then.get(part) != now.get(part)]
