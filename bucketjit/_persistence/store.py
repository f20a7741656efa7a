"""A directory of executables, as an executor uses it: whatever happens to it, calls go on."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

from bucketjit._errors import PersistenceWarning, frames_inside
from bucketjit._events import LONGEST, Event, printable
from bucketjit._persistence import files
from bucketjit._persistence.files import Damaged, Distrusted, Header

# What becomes of an executable after a problem with its file.
_TO_COMPILE, _NOT_KEPT = "The call goes on with a compile", "It is not kept"

_SHOWN_PARTS = {
    "program": "the program is another",
    "constants": "its constants are others",
    "call": "the types of its results, the sizes it holds for, or how it is called are others",
}


class Wanted(NamedTuple):
    """An executable that may be in a file.

    Attributes:
        kind: Digest of what all buckets of a function have in common: its name, its types.
        bucket: Digest of what users would call the same besides: the bucket.
        key: Digest of everything that it depends on.
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
        """What names its files whatever they were compiled from."""
        return self.kind + self.bucket


class Store:
    """A directory of executables.

    Keeps nothing open and no locks, so it may be used by several threads and processes, and after
    a fork.

    Args:
        directory: Where the files are; made when the first one is written.
        max_bytes: Beyond that, the files go that were of use longest ago; None for no bound.
        min_seconds: What compiled faster is not written.
        warns: Whether to warn of a directory that cannot be used; else only an event tells of it.
        tell: Told of events.
    """

    # What the files were compiled with that this process has written or loaded.
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
        """What is stored of an executable; None if there is nothing that can be trusted."""
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
        """What a file of the directory holds, if it can be trusted.

        Raises:
            Distrusted: Somebody else may have written it.
            Damaged: It is not what was written.
            OSError: It cannot be read.
        """
        files.check_directory(self.directory)
        header, raw = files.load(path)
        if header.key != files.key_of(path):
            raise Damaged("its name is not that of its key")
        return header, raw

    def latest(self, kind: str, most: int) -> list[Path]:
        """So many files of one kind at most, the one that was of use last first."""
        try:
            return files.latest_of(self.directory, kind, most)
        except OSError:
            return []  # `find` tells of that

    def mark_used(self, wanted: Wanted) -> None:
        """Let pruning know that an executable was of use."""
        files.mark_used(self._path(wanted))

    def keep(self, header: Header, raw: bytes, wanted: Wanted) -> None:
        """Write an executable, if that is possible."""
        if header.nbytes > files.LARGEST:
            why = f"its executable has {header.nbytes} bytes; a file holds {files.LARGEST} at most"
            self.refuse(wanted.name, wanted.sizes, why)
            return
        path = self._own_path(wanted)
        try:
            files.make_directory(self.directory)
            files.check_directory(self.directory)
            self._write(path, files.pack(header, raw))
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
        """Write a file; on a full disk, within the bound, once more in the place of old ones."""
        try:
            files.write(path, data)
        except OSError as error:
            if self._max_bytes is None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            files.bound(self.directory, max(self._max_bytes - len(data), 0))
            files.write(path, data)

    def discard(self, wanted: Wanted, why: str) -> None:
        """Remove a file that is of no use; it is written again when its executable is compiled."""
        path = self._path(wanted)
        files.remove(path)
        self._warn(wanted, "damaged", f"{path} is damaged and is made again: {why}")

    def refuse(self, name: str, sizes: Mapping[str, int], why: str) -> None:
        """Tell that an executable is not stored."""
        self._tell(Event("unstored", name, sizes, detail=why))

    def _own_path(self, wanted: Wanted) -> Path:
        return self.directory / files.file_name(wanted.identity, wanted.key)

    def _path(self, wanted: Wanted) -> Path:
        """Its file, or the one that the same program has left under another name or module."""
        path = self._own_path(wanted)
        if os.path.exists(path):  # unlike the method of paths, it never raises
            return path
        return files.of_key(self.directory, wanted.key) or path

    def _warn(self, wanted: Wanted, what: str, detail: str, after: str = _TO_COMPILE) -> None:
        """Tell of a problem, and warn of the first one of its kind."""
        self._tell(Event(what, wanted.name, wanted.sizes, detail=detail))
        if what not in self._warned and (self._warns or what == "damaged"):
            self._warned.add(what)
            warnings.warn(
                printable(f"{wanted.name}: {detail}. {after}", LONGEST),
                PersistenceWarning,
                stacklevel=frames_inside(),
            )

    def _tell_stale(self, wanted: Wanted) -> None:
        """Tell of a file that would have done, were it not for what has changed since.

        One that this process has a use for is that of another function of the same name.
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
            return  # `verify` tells of those


def differences(header: Header, wanted: Wanted) -> str:
    """What has changed since a file was written, in words."""
    changes = environment_changes(header.environment, wanted.environment)
    changes += part_changes(header.parts, wanted.parts)
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
