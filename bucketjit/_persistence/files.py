"""Files of executables in a directory: written, read, checked, listed and pruned.

`file_format` says what is in a file. Nothing here knows JAX. The name of a file is
``<identity>-<key>.bjx``. The identity is a digest of what users
distinguish: the kind of calls (a function's name, types), then the bucket, 8 digits each. The key
covers everything that the executable depends on.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bucketjit._persistence.file_format import Damaged, Header, unpack_file
from bucketjit._raised import in_one_line

SUFFIX = ".bjx"

_TEMPORARY = ".writing-"

_ABANDONED = 3600.0  # seconds after which an unfinished file counts as left by a process that ended

_TRIES = 5  # to read a file that other machines replace or remove meanwhile

_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{64}" + re.escape(SUFFIX))


class Distrusted(Exception):
    """Another user could have written a file or directory; the message says what to do."""


_LINKED = (errno.ELOOP, errno.EMLINK)  # errors of O_NOFOLLOW at a symbolic link; EMLINK on BSD


def file_name(identity: str, key: str) -> str:
    """The name of a file.

    Args:
        identity: Its identity.
        key: Its key.
    """
    return f"{identity}-{key}{SUFFIX}"


def check_directory(directory: Path) -> None:
    """Refuse a directory that another user could write into.

    Args:
        directory: The directory.

    Raises:
        Distrusted: Another user owns it or may write into it, or it is no directory.
        OSError: Its status cannot be read.
    """
    told = directory.stat()
    if not stat.S_ISDIR(told.st_mode):
        raise Distrusted(f"{directory} is not a directory")
    _check_owner(told, str(directory))


def _check_owner(told: os.stat_result, name: str) -> None:
    """Refuse a file or directory that another user, except root, owns or may write to.

    Raises:
        Distrusted: Another user does.
    """
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
    """Make a directory that only its owner can write into, unless it exists.

    Args:
        directory: The directory.

    Raises:
        OSError: It cannot be made.
    """
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)


def load(path: Path) -> tuple[Header, bytes]:
    """The header and the executable in a file that no other user can have written.

    Args:
        path: The file.

    Raises:
        Damaged: It is not what was written.
        Distrusted: Another user could have written it.
        OSError: It cannot be read; `FileNotFoundError` if there is none.
    """
    payload = io.BytesIO()
    return _read(path, payload), payload.getvalue()


def check(path: Path) -> Header:
    """The header of a file, after the whole file was checked. The executable is not kept.

    Args:
        path: The file.

    Raises:
        Damaged: It is not what was written.
        Distrusted: Another user could have written it.
        OSError: It cannot be read; `FileNotFoundError` if there is none.
    """
    return _read(path, None)


def _read(path: Path, payload: BinaryIO | None) -> Header:
    """The header of a file; its executable is written to ``payload``, if there is one."""
    for left in reversed(range(_TRIES)):
        try:
            with _opened(path) as file:
                return unpack_file(file, os.fstat(file.fileno()).st_size, payload)
        except OSError as error:
            # On a network file system, an open file is gone when another machine replaces it.
            if error.errno != errno.ESTALE or not left:
                raise
        if payload is not None:
            payload.seek(0)
            payload.truncate()
    raise AssertionError("the last try returns or raises")


def _opened(path: Path) -> BinaryIO:
    """Open a file for reading, if it is a regular file that no other user can have written.

    Raises:
        Distrusted: It is not.
        OSError: It cannot be opened.
    """
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
    """Write a file so that no process ever sees a part of it; see `write_with`.

    Args:
        path: The file.
        data: Its contents.
        is_private: See `write_with`.

    Raises:
        OSError: It cannot be written; nothing is left of it.
    """

    def fill(file: BinaryIO) -> None:
        file.write(data)

    write_with(path, fill, is_private)


def write_with(path: Path, fill: Callable[[BinaryIO], None], is_private: bool = True) -> None:
    """Write a file so that no process ever sees a part of it, even after a crash.

    The data goes to a temporary file, which then takes the place of the old one.

    Args:
        path: The file.
        fill: Writes its contents.
        is_private: Whether no other user may read it. Otherwise it has the permissions of the file
            that it replaces, or those of any new file.

    Raises:
        OSError: It cannot be written; nothing is left of it.
        Exception: Whatever ``fill`` raises; nothing is left of the file.
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
    """Remove the temporary files of processes that were killed, at once: nobody locks them.

    Args:
        directory: The directory.
    """
    for path in directory.glob(_TEMPORARY + "[0-9a-f]" * 32):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            _lock(file, waits=False)
            os.unlink(path)


def _lock(file: BinaryIO, waits: bool) -> None:
    """Lock a file as long as it is open.

    Raises:
        OSError: Another process has locked it, or the file system has no locks.
    """
    with contextlib.suppress(ImportError):  # Windows does not remove files that are open
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))


def key_of(path: Path) -> str:
    """The key in the name of a file.

    Args:
        path: The file.
    """
    return path.stem.partition("-")[2]


def of_key(directory: Path, key: str) -> Path | None:
    """A file with this key and any identity; None if there is none or the directory cannot be read.

    Args:
        directory: The directory.
        key: The key.
    """
    with contextlib.suppress(OSError):
        return next(directory.glob(f"*-{key}{SUFFIX}"), None)
    return None


def others_of(directory: Path, identity: str, key: str) -> Iterator[Path]:
    """Files of the same identity with other keys, the last used first.

    Args:
        directory: The directory.
        identity: The identity.
        key: The key to leave out.
    """
    found = [
        p for p in directory.glob(f"{identity}-*{SUFFIX}") if p.name != file_name(identity, key)
    ]
    yield from sorted(found, key=_used, reverse=True)


def _used(path: Path) -> float:
    """The modification time of a file, which is that of its last use; 0 if the file is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def mark_used(path: Path) -> None:
    """Set the time of a file's last change to now: `bound` removes the oldest files first.

    Args:
        path: The file.
    """
    with contextlib.suppress(OSError):
        os.utime(path)


def remove(path: Path) -> bool:
    """Remove a file, if that is possible.

    Args:
        path: The file.

    Returns:
        Whether it was removed.
    """
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False


@dataclass(frozen=True)
class Entry:
    """A file of a directory, as the commands list it.

    Attributes:
        path: The file.
        header: Its header; None if it is damaged or not trusted.
        problem: What is wrong with it, or an empty string.
        damaged: Whether it can be used by nobody, and can be removed.
        nbytes: Its length in bytes.
        used: When it was last used, in seconds since 1970.
    """

    path: Path
    header: Header | None
    problem: str
    damaged: bool
    nbytes: int
    used: float


def entries(directory: Path) -> list[Entry]:
    """All files of a directory, checked, the last used first.

    Args:
        directory: The directory.

    Raises:
        OSError: The directory cannot be read.
    """
    found = []
    for path in directory.iterdir():
        if path.name.startswith(_TEMPORARY) or path.suffix != SUFFIX:
            continue
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            found.append(_entry(path))
    return sorted(found, key=lambda e: (-e.used, e.path.name))


def _entry(path: Path) -> Entry:
    """A file of a directory, checked.

    Raises:
        FileNotFoundError: It is gone.
    """
    header: Header | None = None
    length, used, problem, damaged = 0, 0.0, "", False
    try:
        told = path.lstat()  # of a symbolic link itself, as `check` follows none
        length, used = told.st_size, told.st_mtime
        header = check(path)
        if not _NAME.fullmatch(path.name) or key_of(path) != header.key:
            header = None
            raise Damaged("its name is not that of its key")
    except Damaged as error:
        problem, damaged = str(error), True
    except Distrusted as error:
        problem = str(error)
    except FileNotFoundError:
        raise
    except OSError as error:
        problem = error.strerror or str(error)
    except Exception as error:  # one file must not keep the others from being listed
        problem = in_one_line(error)
    return Entry(path, header, problem, damaged, length, used)


def abandoned(directory: Path) -> list[Path]:
    """Temporary files that nobody has written to for more than an hour.

    Args:
        directory: The directory.

    Raises:
        OSError: The directory cannot be read.
    """
    with os.scandir(directory) as listed:
        names = [e.name for e in listed if e.name.startswith(_TEMPORARY)]
    limit = _now(directory) - _ABANDONED if names else 0.0
    return [p for name in sorted(names) if 0 < _used(p := directory / name) < limit]


def _now(directory: Path) -> float:
    """The time on the machine that keeps a directory, whose clock may differ from the one here."""
    probe = directory / f"{_TEMPORARY}{uuid.uuid4().hex}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            return probe.stat().st_mtime
        finally:
            remove(probe)
    except OSError:
        return time.time()  # it cannot be written, so nothing can be removed either


def bound(directory: Path, max_bytes: int) -> list[Path]:
    """Remove the files that were used longest ago, until the others have ``max_bytes`` together.

    Other processes may write and remove files meanwhile. What was left unfinished goes as well.

    Args:
        directory: The directory.
        max_bytes: The most bytes that may be left.

    Returns:
        The files that were removed.
    """
    found: list[tuple[float, int, Path]] = []
    with contextlib.suppress(OSError):
        for left in abandoned(directory):
            remove(left)
        with os.scandir(directory) as listed:
            names = [e.name for e in listed if e.name.endswith(SUFFIX)]
        for path in map(directory.joinpath, names):
            with contextlib.suppress(OSError):
                told: Any = path.stat()
                found.append((told.st_mtime, told.st_size, path))
    total, gone = 0, []
    for _, size, path in sorted(found, reverse=True):
        total += size
        if total > max_bytes and remove(path):
            gone.append(path)
    return gone
