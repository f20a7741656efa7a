"""The files: how they are written, read, checked, listed and pruned. Knows nothing of JAX.

A file is a line that says what it is, the digest of the rest, the length of the header, the header
in JSON, and an executable, compressed. Its name is ``<identity>-<key>.bjx``: the identity is that
of what was asked for (a function's name, a bucket, types), half of it that of the kind of calls
(all buckets of the function); the key covers all that the executable depends on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import struct
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"bucketjit executable 1\n"
SUFFIX = ".bjx"
_BODY_AT = len(MAGIC) + hashlib.sha256().digest_size  # behind the digest of what follows
_TEMPORARY = ".writing-"
_ABANDONED = 3600.0  # seconds after which nobody goes on with a file that was begun
_LARGEST_HEADER = 1 << 24
_AT_FIRST = 1 << 20  # bytes that are read before a file's length is believed
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{64}" + re.escape(SUFFIX))


class Damaged(Exception):
    """A file is not what it should be; the message says in what."""


class Distrusted(Exception):
    """A file or directory that others may have written; the message says what to do."""


_LINKED = (errno.ELOOP, errno.EMLINK)  # what O_NOFOLLOW fails with, on BSD the latter


@dataclass(frozen=True)
class Header:
    """What a file says of its executable.

    Attributes:
        key: Digest of all that it depends on.
        name: Name of the function.
        sizes: Size of each dimension variable: of its bucket, or of the exact shape.
        exact: Whether it runs unpadded.
        parts: Digests of the parts of the key: ``program``, ``constants``, ``call``.
        environment: Versions, device and flags it was compiled with.
        kept: Positions of the flat arguments that it takes; the others are not used.
        seconds: What compiling it took.
        created: When that was, in seconds since 1970.
        nbytes: Length of the executable, not compressed.
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
    """The contents of a file."""
    text = json.dumps(dataclasses.asdict(header), sort_keys=True).encode()
    body = struct.pack("<I", len(text)) + text + zlib.compress(payload, 1)
    return MAGIC + hashlib.sha256(body).digest() + body


def unpack(data: bytes) -> tuple[Header, bytes]:
    """The header and the executable in the contents of a file.

    Raises:
        Damaged: The contents are not what was written.
    """
    header, compressed = _checked(data)
    inflate = zlib.decompressobj()
    try:
        payload = inflate.decompress(compressed, header.nbytes + 1)
    except (zlib.error, OverflowError) as error:
        raise Damaged(f"its executable cannot be unpacked: {error}") from None
    if len(payload) != header.nbytes or not inflate.eof:
        raise Damaged(f"its executable has not the {header.nbytes} bytes that its header says")
    return header, payload


def _checked(data: bytes) -> tuple[Header, bytes]:
    if not data.startswith(MAGIC):
        start = data[: len(MAGIC)]
        what = "of another version" if start[:20] == MAGIC[:20] else "no executable of bucketjit"
        raise Damaged(f"it is {what}")
    digest, body = data[len(MAGIC) : _BODY_AT], data[_BODY_AT:]
    if hashlib.sha256(body).digest() != digest:
        raise Damaged("its digest does not match: it is cut short or was changed")
    if len(body) < 4:
        raise Damaged("it has no header")
    (length,) = struct.unpack_from("<I", body)
    return parse_header(body[4 : 4 + length]), body[4 + length :]


def parse_header(text: bytes) -> Header:
    """The header in its text.

    Raises:
        Damaged: It is not one.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise Damaged("its header is not JSON") from None
    if not isinstance(values, dict) or values.keys() != _TYPES.keys():
        raise Damaged("its header has other fields")
    for name, kinds in _TYPES.items():
        value = values[name]
        if not isinstance(value, kinds) or isinstance(value, bool) is not (kinds == (bool,)):
            raise Damaged(f"its header has {name} {value!r}")
    whole = [*values["sizes"].values(), *values["kept"], values["nbytes"]]
    texts = [*values["parts"].values(), *values["environment"].values()]
    times = values["seconds"], values["created"]
    if not (
        all(type(n) is int and n >= 0 for n in whole)
        and all(isinstance(t, str) for t in texts)
        and all(map(math.isfinite, times))
    ):
        raise Damaged("its header has values of other types")
    return Header(**{**values, "kept": tuple(values["kept"])})


# --- the disk -----------------------------------------------------------------------------------


def file_name(identity: str, key: str) -> str:
    """Name of a file."""
    return f"{identity}-{key}{SUFFIX}"


def check_directory(directory: Path) -> None:
    """Refuse a directory into which others may write.

    Raises:
        Distrusted: They may.
        OSError: It cannot be looked at.
    """
    told = directory.stat()
    if not stat.S_ISDIR(told.st_mode):
        raise Distrusted(f"{directory} is not a directory")
    _check_owner(told, str(directory))


def _check_owner(told: os.stat_result, name: str) -> None:
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
    """Make a directory that only its owner can write into, if there is none.

    Raises:
        OSError: It cannot be made.
    """
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)


def read(path: Path) -> bytes:
    """The contents of a file that nobody else can have written.

    Raises:
        Damaged: It is longer than its header says.
        Distrusted: Somebody may have.
        OSError: It cannot be read; `FileNotFoundError` if there is none.
    """
    try:
        return _read(path)
    except OSError as error:
        if error.errno in _LINKED:
            raise Distrusted(f"{path} is a symbolic link, which is not followed") from None
        raise


def _read(path: Path) -> bytes:
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    flags |= getattr(os, "O_NONBLOCK", 0)  # else a pipe would wait for somebody to write into it
    with open(os.open(path, flags), "rb") as file:
        told = os.fstat(file.fileno())
        if not stat.S_ISREG(told.st_mode):
            raise Distrusted(f"{path} is not a file")
        _check_owner(told, str(path))
        data = file.read(_AT_FIRST)
        if not data.startswith(MAGIC):  # that says enough
            return data
        if told.st_size > len(data) and told.st_size > _most_bytes(data):
            raise Damaged("it is longer than its header says")
        return data + file.read()


def _most_bytes(start: bytes) -> float:
    """How long a file may be that starts like this; what it says is not checked otherwise."""
    text_at = _BODY_AT + 4
    if len(start) < text_at:
        return math.inf
    (length,) = struct.unpack_from("<I", start, _BODY_AT)
    text = start[text_at : text_at + length]
    if length > _LARGEST_HEADER:
        return 0
    if len(text) < length:  # a header that is longer than what was read
        return math.inf
    try:
        nbytes = parse_header(text).nbytes
    except Damaged:
        return 0
    return text_at + length + nbytes + nbytes // 1000 + 1024  # what zlib makes of them at most


def write(path: Path, data: bytes, is_private: bool = True) -> None:
    """Write a file so that nobody ever sees a part of it, whatever happens meanwhile.

    Args:
        path: The file.
        data: What is to be in it.
        is_private: Whether nobody else may read it. Else it has the permissions of the one that
            it takes the place of, or those of any new file.

    Raises:
        OSError: It cannot be written; nothing is left of it.
    """
    temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(temporary, flags, 0o600 if is_private else 0o666)
    except OSError as error:
        error.filename = str(path)  # no such directory: nobody has asked for the other name
        raise
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if not is_private:
            with contextlib.suppress(OSError):  # no file is there, or nothing is to be set
                shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def key_of(path: Path) -> str:
    """The key in the name of a file."""
    return path.stem.partition("-")[2]


def latest_of(directory: Path, kind: str, most: int) -> list[Path]:
    """So many files of one kind at most, the one that was of use last first.

    Raises:
        OSError: The directory cannot be read.
    """
    with os.scandir(directory) as listed:
        names = [e.name for e in listed if e.name.startswith(kind) and _NAME.fullmatch(e.name)]
    return sorted((directory / name for name in names), key=_used, reverse=True)[:most]


def of_key(directory: Path, key: str) -> Path | None:
    """A file of this key, whatever its identity; None if there is none, or that cannot be told."""
    with contextlib.suppress(OSError):
        return next(directory.glob(f"*-{key}{SUFFIX}"), None)
    return None


def others_of(directory: Path, identity: str, key: str) -> Iterator[Path]:
    """Files of the same identity with other keys, the latest first."""
    found = [
        p for p in directory.glob(f"{identity}-*{SUFFIX}") if p.name != file_name(identity, key)
    ]
    yield from sorted(found, key=_used, reverse=True)


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def mark_used(path: Path) -> None:
    """Let pruning know that a file was of use."""
    with contextlib.suppress(OSError):
        os.utime(path)


def remove(path: Path) -> bool:
    """Remove a file, if that is possible."""
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False


# --- what is there ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A file of a directory.

    Attributes:
        path: Where it is.
        header: What it says; None if it is damaged or not to be trusted.
        problem: What is wrong with it, or an empty string.
        damaged: Whether it is of no use to anybody.
        nbytes: Its length.
        used: When it was last of use, in seconds since 1970.
    """

    path: Path
    header: Header | None
    problem: str
    damaged: bool
    nbytes: int
    used: float


def entries(directory: Path) -> list[Entry]:
    """All files of a directory, checked, the one that was of use last first.

    Raises:
        OSError: It cannot be read.
    """
    found = []
    for path in directory.iterdir():
        if path.name.startswith(_TEMPORARY) or path.suffix != SUFFIX:
            continue
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            told = path.stat()
            header, problem, damaged = _look(path)
            found.append(Entry(path, header, problem, damaged, told.st_size, told.st_mtime))
    return sorted(found, key=lambda e: (-e.used, e.path.name))


def _look(path: Path) -> tuple[Header | None, str, bool]:
    try:
        header, _ = unpack(read(path))
    except Damaged as error:
        return None, str(error), True
    except Distrusted as error:
        return None, str(error), False
    except FileNotFoundError:
        raise
    except OSError as error:
        return None, error.strerror or str(error), False
    if not _NAME.fullmatch(path.name) or key_of(path) != header.key:
        return None, "its name is not that of its key", True
    return header, "", False


def abandoned(directory: Path) -> list[Path]:
    """Files that a process began to write and did not finish."""
    limit = time.time() - _ABANDONED
    return [p for p in directory.glob(f"{_TEMPORARY}*") if 0 < _used(p) < limit]


def bound(directory: Path, max_bytes: int) -> list[Path]:
    """Remove the files that were of use longest ago until the rest has ``max_bytes``."""
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
