"""The files: how they are written, read, checked, listed and pruned. Knows nothing of JAX.

A file is a magic line, the digest of the rest, the length of the header, the header in JSON, and a
compressed executable. Its name is ``<identity>-<key>.bjx``. The identity is a digest of what users
distinguish: the kind of calls (a function's name, types), then the bucket, 8 digits each. The key
covers everything that the executable depends on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import os
import re
import reprlib
import shutil
import stat
import struct
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bucketjit._errors import in_one_line

MAGIC = b"bucketjit executable 1\n"
SUFFIX = ".bjx"
_BODY_AT = len(MAGIC) + hashlib.sha256().digest_size  # where the bytes begin that are digested
_TEMPORARY = ".writing-"
_ABANDONED = 3600.0  # seconds after which an unfinished file counts as left by a process that ended
LARGEST = (1 << 31) - 1  # bytes of an executable: XLA writes a protobuf, which holds no more
_LARGEST_HEADER = 1 << 24  # bytes
_PIECE = 1 << 20  # bytes that are read, or unpacked, at a time
_DEFLATES_TO = 1032  # the highest factor by which zlib can compress
_LONGEST_TIME = 2.0**53  # seconds: below, floats hold whole seconds exactly
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{64}" + re.escape(SUFFIX))


class Damaged(Exception):
    """A file does not hold what was written to it; the message says what is wrong."""


class Distrusted(Exception):
    """Another user could have written a file or directory; the message says what to do."""


_LINKED = (errno.ELOOP, errno.EMLINK)  # errors of O_NOFOLLOW at a symbolic link; EMLINK on BSD


@dataclass(frozen=True)
class Header:
    """What a file says of its executable.

    Attributes:
        key: Digest of everything that it depends on.
        name: Name of the function.
        sizes: Size of each dimension variable: of its bucket, or of the exact shape.
        exact: Whether it runs unpadded.
        parts: Digests of the parts of the key: ``program``, ``constants``, ``call``.
        environment: Versions, device and flags it was compiled with.
        kept: Positions of the flat arguments that it takes; the others are not used.
        seconds: Seconds that compiling it took.
        created: When it was compiled, in seconds since 1970.
        nbytes: Length of the executable in bytes, not compressed.
    """

    key: str
    name: str
    sizes: Mapping[str, int]
    exact: bool
    parts: Mapping[str, str]
    environment: Mapping[str, str]
    kept: tuple[int, ...]
    seconds: float
    created: float
    nbytes: int


# The types of the header's fields in JSON; `parse_header` accepts no others.
_TYPES: Mapping[str, tuple[type, ...]] = {
    "key": (str,),
    "name": (str,),
    "sizes": (dict,),
    "exact": (bool,),
    "parts": (dict,),
    "environment": (dict,),
    "kept": (list,),
    "seconds": (int, float),
    "created": (int, float),
    "nbytes": (int,),
}


def pack(header: Header, payload: bytes) -> bytes:
    """The contents of a file.

    Args:
        header: The header.
        payload: The executable.
    """
    text = json.dumps(dataclasses.asdict(header), sort_keys=True).encode()
    body = struct.pack("<I", len(text)) + text + zlib.compress(payload, 1)
    return MAGIC + hashlib.sha256(body).digest() + body


def unpack(data: bytes) -> tuple[Header, bytes]:
    """The header and the executable in the contents of a file.

    Args:
        data: The contents.

    Raises:
        Damaged: The contents are not what was written.
    """
    payload = io.BytesIO()
    return _unpack(io.BytesIO(data), len(data), payload), payload.getvalue()


def _unpack(file: BinaryIO, length: int, payload: BinaryIO | None) -> Header:
    """Check the contents of a file piece by piece, and return the header.

    The digest is compared last, as all bytes are read only once. If it does not match,
    that is the error, whatever was found wrong with the header or the executable.

    Args:
        file: The contents.
        length: How many bytes they have.
        payload: Where to write the executable; None to only check it.

    Raises:
        Damaged: The contents are not what was written.
    """
    start = file.read(len(MAGIC))
    if start != MAGIC:
        what = "of another version" if start[:20] == MAGIC[:20] else "no executable of bucketjit"
        raise Damaged(f"it is {what}")
    digest = file.read(hashlib.sha256().digest_size)
    body = _Body(file, length - _BODY_AT)
    header, problem = None, ""
    try:
        header = _read_header(body, length)
    except Damaged as error:
        problem = str(error)
    # Before the digest, or a file of any length would be read to its end.
    if body.left > _most_packed(LARGEST if header is None else header.nbytes):
        raise Damaged(problem or "it is longer than its header says")
    try:
        if header is not None:
            _inflate(body, header.nbytes, payload)
    except Damaged as error:
        problem = str(error)  # not the error itself: its frames hold the executable
    while body.read(_PIECE):  # the rest is digested as well
        pass
    if body.digest() != digest:
        raise Damaged("its digest does not match: it is cut short or was changed")
    if header is None or problem:
        raise Damaged(problem)
    return header


class _Body:
    """The part of a file behind its digest; digests all that is read.

    Attributes:
        left: How many bytes are left to read.
    """

    def __init__(self, file: BinaryIO, left: int) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.left = left

    def read(self, count: int) -> bytes:
        """The next bytes, at most so many; fewer at the end of the file.

        Args:
            count: How many.
        """
        data = self._file.read(min(count, max(self.left, 0)))
        self.left -= len(data)
        self._hash.update(data)
        return data

    def digest(self) -> bytes:
        """The digest of the bytes read so far."""
        return self._hash.digest()


def _read_header(body: _Body, file_length: int) -> Header:
    """Read the header, and check that the file can hold the executable that it describes.

    Raises:
        Damaged: It is no header, or the executable would be too large.
    """
    count = body.read(4)
    if len(count) < 4:
        raise Damaged("it has no header")
    (length,) = struct.unpack("<I", count)
    if length > _LARGEST_HEADER:
        raise Damaged(f"its header would have {length} bytes, more than {_LARGEST_HEADER}")
    header = parse_header(body.read(length))
    tells = f"its header tells of an executable of {header.nbytes} bytes"
    if header.nbytes > LARGEST:
        raise Damaged(f"{tells}; none has more than {LARGEST}")
    if header.nbytes > _DEFLATES_TO * body.left:
        raise Damaged(f"{tells}, which a file of {file_length} bytes cannot hold")
    return header


def _most_packed(nbytes: int) -> int:
    """The most bytes to which zlib compresses so many bytes: incompressible ones grow a little."""
    return nbytes + nbytes // 1000 + 1024


def _inflate(body: _Body, nbytes: int, payload: BinaryIO | None) -> None:
    """Unpack the executable. Stop as soon as it is longer than its header says.

    Raises:
        Damaged: It has another length, or is not what zlib writes.
    """
    wrong = f"its executable has not the {nbytes} bytes that its header says"
    inflate, left = zlib.decompressobj(), nbytes
    while not inflate.eof:
        packed = inflate.unconsumed_tail or body.read(_PIECE)
        try:
            piece = inflate.decompress(packed, min(_PIECE, left + 1))
        except zlib.error as error:
            raise Damaged(f"its executable cannot be unpacked: {error}") from None
        if len(piece) > left or not (packed or piece):
            raise Damaged(wrong)
        left -= len(piece)
        if payload is not None:
            payload.write(piece)
    if left or inflate.unused_data or body.left > 0:
        raise Damaged(wrong)


def parse_header(text: bytes) -> Header:
    """The header from its text. Checks the type and the range of every value.

    Args:
        text: The text, in JSON.

    Raises:
        Damaged: It is no header.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise Damaged("its header is not JSON") from None
    if not isinstance(values, dict) or values.keys() != _TYPES.keys():
        raise Damaged("its header has other fields")
    for name, kinds in _TYPES.items():
        value = values[name]
        # Python's bool is an int, and must not pass for a number.
        if not isinstance(value, kinds) or isinstance(value, bool) is not (kinds == (bool,)):
            raise Damaged(f"its header has {name} {reprlib.repr(value)}")
    whole = [*values["sizes"].values(), *values["kept"], values["nbytes"]]
    texts = [*values["parts"].values(), *values["environment"].values()]
    times = values["seconds"], values["created"]
    if not (
        all(type(n) is int and 0 <= n < 1 << 63 for n in whole)
        and all(isinstance(t, str) for t in texts)
        and all(0 <= t < _LONGEST_TIME for t in times)  # false for NaN
    ):
        raise Damaged("its header has values of other types")
    return Header(**{**values, "kept": tuple(values["kept"])})


# --- the disk -----------------------------------------------------------------------------------


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
    with _opened(path) as file:
        return _unpack(file, os.fstat(file.fileno()).st_size, payload)


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
    """Write a file so that no process ever sees a part of it, even after a crash.

    The data goes to a temporary file, which then takes the place of the old one.

    Args:
        path: The file.
        data: Its contents.
        is_private: Whether no other user may read it. Otherwise it has the permissions of the file
            that it replaces, or those of any new file.

    Raises:
        OSError: It cannot be written; nothing is left of it.
    """
    temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(temporary, flags, 0o600 if is_private else 0o666)
    except OSError as error:
        error.filename = str(path)  # the caller does not know the name of the temporary file
        raise
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # before the rename, or a crash could leave an empty file
        if not is_private:
            with contextlib.suppress(OSError):  # there is no old file, or no permissions can be set
                shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def key_of(path: Path) -> str:
    """The key in the name of a file.

    Args:
        path: The file.
    """
    return path.stem.partition("-")[2]


def latest_of(directory: Path, kind: str, most: int) -> list[Path]:
    """The files of one kind, the last used first.

    Args:
        directory: The directory.
        kind: The kind of calls: the first half of the identity.
        most: How many to return at most.

    Raises:
        OSError: The directory cannot be read.
    """
    with os.scandir(directory) as listed:
        names = [e.name for e in listed if e.name.startswith(kind) and _NAME.fullmatch(e.name)]
    return sorted((directory / name for name in names), key=_used, reverse=True)[:most]


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


# --- what is there ------------------------------------------------------------------------------


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
    """Temporary files that were begun more than an hour ago and not finished.

    Args:
        directory: The directory.
    """
    limit = time.time() - _ABANDONED
    return [p for p in directory.glob(f"{_TEMPORARY}*") if 0 < _used(p) < limit]


def bound(directory: Path, max_bytes: int) -> list[Path]:
    """Remove the files that were used longest ago, until the others have ``max_bytes`` together.

    Args:
        directory: The directory.
        max_bytes: The most bytes that may be left.

    Returns:
        The files that were removed.
    """
    found: list[tuple[float, int, Path]] = []
    for path in directory.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):
            told: Any = path.stat()
            found.append((told.st_mtime, told.st_size, path))
    total, gone = 0, []
    for _, size, path in sorted(found, reverse=True):
        total += size
        if total > max_bytes and remove(path):
            gone.append(path)
    return gone
