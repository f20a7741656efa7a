"""Files of executables in a directory: written, read, listed and bounded.

`record` says what is in a file. Nothing here knows JAX. The name of a file is
``<identity>-<key>.bjx``; see `Record`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bucketjit._compile.files import record
from bucketjit._compile.files.record import Damaged, Record

SUFFIX = ".bjx"

_TEMPORARY = ".writing-"


class Distrusted(Exception):
    """Another user could have written a file or directory; the message says what to do."""


_LINKED = (errno.ELOOP, errno.EMLINK)  # errors of O_NOFOLLOW at a symbolic link; EMLINK on BSD


def file_name(of: Record) -> str:
    """The name of the file of an executable."""
    return f"{of.identity}-{of.key}{SUFFIX}"


def check_directory(directory: Path) -> None:
    """Refuse a directory that another user could write into."""
    told = directory.stat()
    if not stat.S_ISDIR(told.st_mode):
        raise Distrusted(f"{directory} is not a directory")
    _check_owner(told, str(directory))


def _check_owner(told: os.stat_result, name: str) -> None:
    """Refuse a file or directory that another user, except root, owns or may write to."""
    if not hasattr(os, "geteuid"):  # Windows has access lists in place of owners and modes
        return
    if told.st_uid not in (os.geteuid(), 0):
        raise Distrusted(
            f"{name} belongs to another user (uid {told.st_uid}), whose machine code it would run; "
            "use a directory of your own"
        )
    if told.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Distrusted(
            f"{name} can be written by other users, whose machine code it would run; "
            f"chmod go-w {name}, or use a directory of your own"
        )


def make_directory(directory: Path) -> None:
    """Make a directory that only its owner can write into, unless it exists."""
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)


def load(path: Path) -> tuple[Record, bytes]:
    """The record and the executable in a file that no other user can have written."""
    with _opened(path) as file:
        if os.fstat(file.fileno()).st_size > record.LARGEST + (1 << 24):
            raise Damaged("it is longer than any executable")
        found = record.unpack(file.read())
    if path.name != file_name(found[0]):
        raise Damaged("its name is not that of its key")
    return found


def _opened(path: Path) -> BinaryIO:
    """Open a file for reading, if it is a regular file that no other user can have written."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    flags |= getattr(os, "O_NONBLOCK", 0)  # else opening a named pipe would wait for a writer
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno in _LINKED:
            raise Distrusted(f"{path} is a symbolic link, which is not followed") from None
        raise
    try:
        told = os.fstat(handle)  # of the open file: the name may mean another one by now
        if not stat.S_ISREG(told.st_mode):
            raise Distrusted(f"{path} is not a file")
        _check_owner(told, str(path))
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def write(path: Path, data: bytes, is_private: bool = True) -> None:
    """Write a file so that no process ever sees a part of it; see `write_with`."""

    def fill(file: BinaryIO) -> None:
        file.write(data)

    write_with(path, fill, is_private)


def write_with(path: Path, fill: Callable[[BinaryIO], None], is_private: bool = True) -> None:
    """Write a file so that no process ever sees a part of it, even after a crash.

    The data goes to a temporary file, which then takes the place of the old one.
    """
    temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
    try:
        with _locked(temporary, 0o600 if is_private else 0o666) as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())  # before the rename, or a crash could leave an empty file
            if not is_private:
                with contextlib.suppress(OSError):  # no old file, or no permissions can be set
                    shutil.copymode(path, temporary)
            if os.name == "nt":  # an open file cannot be renamed there
                file.close()
            os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == os.fspath(temporary):
            error.filename, error.filename2 = os.fspath(path), None  # which the caller knows
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _locked(temporary: Path, mode: int) -> BinaryIO:
    """A new file that is locked as long as it is open."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    while True:
        file = os.fdopen(os.open(temporary, flags, mode), "wb")
        with contextlib.suppress(OSError):  # the file system has no locks
            _lock(file, waits=True)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # `remove_unfinished` of another process was faster


def remove_unfinished(directory: Path) -> None:
    """Remove the temporary files of processes that were killed, at once: nobody locks them."""
    for path in directory.glob(_TEMPORARY + "[0-9a-f]" * 32):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            _lock(file, waits=False)
            os.unlink(path)


def _lock(file: BinaryIO, waits: bool) -> None:
    """Lock a file as long as it is open."""
    with contextlib.suppress(ImportError):  # Windows does not remove files that are open
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))


def of_key(directory: Path, key: str) -> Path | None:
    """A file with this key and any identity; None if there is none, or none can be read."""
    with contextlib.suppress(OSError):
        return next(directory.glob(f"*-{key}{SUFFIX}"), None)
    return None


def others_of(directory: Path, of: Record) -> list[Path]:
    """Files of the same identity with other keys, the last used first."""
    found = directory.glob(f"{of.identity}-*{SUFFIX}")
    return sorted((p for p in found if p.name != file_name(of)), key=_used, reverse=True)


def _used(path: Path) -> float:
    """The modification time of a file, which is that of its last use; 0 if the file is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def mark_used(path: Path) -> None:
    """Set the time of a file's last change to now: `bound` removes the oldest files first."""
    with contextlib.suppress(OSError):
        os.utime(path)


def remove(path: Path) -> bool:
    """Remove a file, if that is possible."""
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False


class Entry(NamedTuple):
    """A file of a directory.

    Attributes:
        path: The file.
        found: What it says of its executable, or why it cannot be used: `Damaged` if by nobody.
        nbytes: Its length in bytes.
        used: When it was last used, in seconds since 1970.
    """

    path: Path
    found: Record | Exception
    nbytes: int
    used: float


def entries(directory: Path, is_read: bool = True) -> list[Entry]:
    """All files of a directory, the last used first."""
    found = []
    for path in directory.iterdir():
        if path.suffix != SUFFIX:
            continue
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            told = path.lstat()  # of a symbolic link itself: none is followed
            what = _found(path) if is_read else Damaged()
            found.append(Entry(path, what, told.st_size, told.st_mtime))
    return sorted(found, key=lambda e: (-e.used, e.path.name))


def _found(path: Path) -> Record | Exception:
    """See `Entry.found`. One file must not keep the others from being listed."""
    try:
        return load(path)[0]
    except FileNotFoundError:
        raise
    except Exception as error:
        return error


def bound(directory: Path, max_bytes: int) -> list[Path]:
    """Remove the files that were used longest ago, until the others have ``max_bytes`` together.

    Other processes may write and remove files meanwhile. What was left unfinished goes as well.
    """
    remove_unfinished(directory)
    total, gone = 0, []
    for entry in entries(directory, is_read=False):
        total += entry.nbytes
        if total > max_bytes and remove(entry.path):
            gone.append(entry.path)
    return gone
