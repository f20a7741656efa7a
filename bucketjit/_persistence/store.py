"""A directory of executables as a bucketed function uses it: no problem with a file breaks a call.

`bucketjit._persistence.files` reads and writes the files and raises. This module turns what it
raises into events and warnings.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

from bucketjit._events import LONGEST, Event, printable
from bucketjit._persistence import file_format, files
from bucketjit._persistence.file_format import Damaged, Header
from bucketjit._persistence.files import Distrusted
from bucketjit._raised import frames_inside
from bucketjit.errors import PersistenceWarning

# What warnings say of the executable after a problem with its file.
_TO_COMPILE, _NOT_KEPT = "The call goes on with a compile", "It is not kept"

_SHOWN_PARTS = {
    "program": "the program changed",
    "constants": "the constants it closes over changed",
    "call": "the types of its results, the sizes it holds for, or how it is called changed",
}


class Wanted(NamedTuple):
    """An executable that may be in a file.

    Attributes:
        kind: Digest of what all buckets of a function have in common: its name and its types.
        bucket: Digest of the bucket and the argument types, as users distinguish executables.
        key: Digest of everything that the executable depends on.
        name, sizes, exact, parts, environment: See `Header`.
    """

    kind: str
    bucket: str
    key: str
    name: str
    sizes: Mapping[str, int]
    exact: bool
    parts: Mapping[str, str]
    environment: Mapping[str, str]

    @property
    def identity(self) -> str:
        """The first part of its file's name, equal for all versions of program and environment."""
        return self.kind + self.bucket


class Store:
    """A directory of executables.

    Keeps no file open and no locks, so several threads and processes may use it, also on several
    machines, and a fork may.

    Args:
        directory: The directory; it is made when the first file is written.
        max_bytes: The most bytes of all files. Beyond that, the files that were used longest ago
            are removed. None for no bound.
        min_seconds: Executables that compiled in less time are not written.
        warns: Whether to warn of a directory that cannot be used; otherwise there are only events.
        tell: Called with each `Event`.

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

    def find(self, wanted: Wanted) -> tuple[Header, bytes] | None:
        """The header and the bytes of an executable; None if there is no file that can be used.

        If a file exists and cannot be used, an event says why.

        Args:
            wanted: The executable.
        """
        path = self._path(wanted)
        try:
            header, raw = self.read(path)
            if dict(header.environment) != dict(wanted.environment):
                raise Damaged("its header tells of another environment than its key")
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
        self.mark_used(wanted)
        self._in_use[path] = wanted.environment
        return header, raw

    def read(self, path: Path) -> tuple[Header, bytes]:
        """The header and the bytes of a file of the directory.

        Args:
            path: The file.

        Raises:
            Distrusted: Another user could have written it.
            Damaged: It is not what was written.
            OSError: It cannot be read.
        """
        files.check_directory(self.directory)
        header, raw = files.load(path)
        if header.key != files.key_of(path):
            raise Damaged("its name is not that of its key")
        return header, raw

    def mark_used(self, wanted: Wanted) -> None:
        """Note on the file that the executable was used, so that it is removed later than others.

        Args:
            wanted: The executable.
        """
        files.mark_used(self._path(wanted))

    def keep(self, header: Header, raw: bytes, wanted: Wanted) -> None:
        """Write an executable; emit an event and warn if that is not possible.

        Args:
            header: Its header.
            raw: Its bytes.
            wanted: What it was requested as.
        """
        if header.nbytes > file_format.LARGEST:
            most = file_format.LARGEST
            why = f"its executable has {header.nbytes} bytes; a file holds {most} at most"
            self.refuse(wanted.name, wanted.sizes, why)
            return
        path = self._own_path(wanted)
        try:
            files.make_directory(self.directory)
            files.check_directory(self.directory)
            self._write(path, file_format.pack(header, raw))
            self._in_use[path] = wanted.environment
            if self._max_bytes is not None and path in files.bound(self.directory, self._max_bytes):
                why = f"its file has more than the {self._max_bytes} bytes that files may have"
                self.refuse(wanted.name, wanted.sizes, why)
        except Distrusted as error:
            self._warn(wanted, "distrusted", str(error), _NOT_KEPT)
        except OSError as error:
            why = f"cannot write {path}: {error.strerror or error}"
            self._warn(wanted, "unwritable", why, _NOT_KEPT)

    def _write(self, path: Path, data: bytes) -> None:
        """Write a file. If the disk is full, remove old files and try once more.

        Only files within the bound of bytes are removed for that; without a bound, none is.
        """
        try:
            files.write(path, data)
        except OSError as error:
            if self._max_bytes is None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            files.bound(self.directory, max(self._max_bytes - len(data), 0))
            files.write(path, data)

    def discard(self, wanted: Wanted, why: str) -> None:
        """Remove a file that cannot be used. The next compile of its executable writes it again.

        Args:
            wanted: The executable.
            why: What is wrong with the file.
        """
        path = self._path(wanted)
        files.remove(path)
        self._warn(wanted, "damaged", f"{path} is damaged and is made again: {why}")

    def refuse(self, name: str, sizes: Mapping[str, int], why: str) -> None:
        """Emit an event for an executable that is not stored.

        Args:
            name: Name of the function.
            sizes: Size of each variable.
            why: The reason.
        """
        self._tell(Event("unstored", name, sizes, detail=why))

    def _own_path(self, wanted: Wanted) -> Path:
        """The file that is written for an executable."""
        return self.directory / files.file_name(wanted.identity, wanted.key)

    def _path(self, wanted: Wanted) -> Path:
        """The file of an executable, or one with the same key and another identity.

        The same program may have written that one under another function name or module.
        """
        path = self._own_path(wanted)
        if os.path.exists(path):  # `Path.exists` may raise
            return path
        return files.of_key(self.directory, wanted.key) or path

    def _warn(self, wanted: Wanted, what: str, detail: str, after: str = _TO_COMPILE) -> None:
        """Emit an event for a problem, and warn of the first one of its kind."""
        self._tell(Event(what, wanted.name, wanted.sizes, detail=detail))
        if what not in self._warned and (self._warns or what == "damaged"):
            self._warned.add(what)
            warnings.warn(
                printable(f"{wanted.name}: {detail}. {after}", LONGEST),
                PersistenceWarning,
                stacklevel=frames_inside(),
            )

    def _tell_stale(self, wanted: Wanted) -> None:
        """Emit an event for a file that could have been used if nothing had changed since.

        A file that this process has used itself belongs to another function of the same name.
        """
        try:
            for path in files.others_of(self.directory, wanted.identity, wanted.key):
                if self._in_use.get(path) == wanted.environment:
                    continue
                header = files.check(path)
                changes = differences(header, wanted)
                self._tell(Event("stale", wanted.name, wanted.sizes, detail=f"{path}: {changes}"))
                return
        except (OSError, Damaged, Distrusted):
            return  # the command `verify` reports those


def differences(header: Header, wanted: Wanted) -> str:
    """What has changed since a file was written, in words.

    Args:
        header: The header of the file.
        wanted: The executable as it is requested now.
    """
    changes = environment_changes(header.environment, wanted.environment)
    changes += part_changes(header.parts, wanted.parts)
    return "; ".join(changes) or "what it was compiled with is not known"


def environment_changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two environments, in words.

    Args:
        then: The earlier environment.
        now: The later one.
    """
    return [
        f"{name} was {then.get(name, 'not there')!s}, is {now.get(name, 'not there')!s}"
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name)
    ]


def part_changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Which digests differ, in words.

    Args:
        then: The earlier digests, by part.
        now: The later ones.
    """
    return [text for part, text in _SHOWN_PARTS.items() if then.get(part) != now.get(part)]
