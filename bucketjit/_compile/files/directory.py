"""Files of executables in a directory: written, read, listed and bounded.

`record` says what is in a file, and how it is called. Nothing here knows JAX.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bucketjit._compile.files import record
from bucketjit._compile.files.record import Damaged, Record

SUFFIX = ".bjx"

_TEMPORARY = ".writing-"
_LONGEST_WRITE = 3600.0  # seconds after which a temporary file is of a process that was killed


class Distrusted(Exception):
    """Another user could have written a file or directory; the message says what to do."""


def check_directory(directory: Path) -> None:
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise Distrusted(f"{directory} is not a directory")
    _check_owner(status, directory)


def _check_owner(status: os.stat_result, path: Path) -> None:
    """Refuse a file or directory that another user, except root, owns or may write to."""
    if not hasattr(os, "geteuid"):  # Windows has access lists in place of owners and modes
        return
    if status.st_uid not in (os.geteuid(), 0):
        raise Distrusted(
            f"{path} belongs to another user (uid {status.st_uid}), whose machine code it would "
            "run; use a directory of your own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Distrusted(
            f"{path} can be written by other users, whose machine code it would run; "
            f"chmod go-w {path}, or use a directory of your own"
        )


def _checked(path: Path) -> os.stat_result:
    """Refuse a file that another user can have written."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise Distrusted(f"{path} is not a file (links are not followed)")
    _check_owner(status, path)
    return status


def records(directory: Path) -> list[Record]:
    """What the files of a directory say of themselves; only `load` checks the rest of them."""
    heads = []
    with contextlib.suppress(Distrusted, OSError):
        check_directory(directory)
        for path in directory.glob(f"*{SUFFIX}"):
            with contextlib.suppress(Exception):
                _checked(path)
                with path.open("rb") as file:
                    heads.append(record.head(file))
    return heads


def load(path: Path) -> tuple[Record, bytes]:
    """The record and the executable in a file that no other user can have written."""
    status = _checked(path)
    if status.st_size > record.LARGEST + (1 << 24):
        raise Damaged("it is longer than any executable")
    contents = record.unpack(path.read_bytes())
    if path.name != contents[0].file_name:
        raise Damaged("its name is not that of its contents")
    return contents


def write(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read; see `write_with`."""
    write_with(path, lambda file: file.write(data), is_private=True)


def write_with(path: Path, fill: Callable[[BinaryIO], object], is_private: bool = False) -> None:
    """Write a file so that no process ever sees a part of it, even after a crash.

    The data goes to a temporary file, which then takes the place of the old one.
    """
    temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
    mode = 0o600 if is_private else 0o666
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())  # before the rename, or a crash could leave an empty file
        if not is_private:
            with contextlib.suppress(OSError):  # no old file, or no permissions can be set
                shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == os.fspath(temporary):
            error.filename, error.filename2 = os.fspath(path), None  # which the caller knows
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def remove_unfinished(directory: Path) -> None:
    """Remove the temporary files of processes that were killed: those of an hour ago."""
    for path in directory.glob(_TEMPORARY + "[0-9a-f]" * 32):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _LONGEST_WRITE:
                path.unlink()


def remove(path: Path) -> bool:
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False


class Entry(NamedTuple):
    """A file, and its record or why it cannot be used: `Damaged` if by nobody."""

    path: Path
    record: Record | Exception
    nbytes: int
    used: float


def entries(directory: Path, is_read: bool = True) -> list[Entry]:
    """The files of a directory, the last used first."""
    listed = []
    for path in directory.iterdir():  # it fails where there is no directory
        if path.suffix != SUFFIX:
            continue
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            status = path.lstat()
            contents: Record | Exception = Damaged()
            try:
                contents = load(path)[0] if is_read else contents
            except FileNotFoundError:
                raise
            except Exception as error:  # one file must not keep the others from being listed
                contents = error
            listed.append(Entry(path, contents, status.st_size, status.st_mtime))
    return sorted(listed, key=lambda e: (-e.used, e.path.name))


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
