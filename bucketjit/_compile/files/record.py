"""What is in a file: a magic line, a digest of the rest, a record in JSON, and an executable.

The executable is compressed by zstandard where that is installed, else by zlib, as JAX's own cache
does. Nothing here knows JAX.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

MAGIC = b"bucketjit executable 2\n"

LARGEST = (1 << 31) - 1  # bytes of an executable: XLA writes a protobuf, which holds no more

_ZSTD = b"\x28\xb5\x2f\xfd"  # what zstandard's bytes begin with; those of zlib never do


class Damaged(Exception):
    """A file does not hold what was written to it; the message says what is wrong."""


class Record(NamedTuple):
    """What a file says of its executable; until it is compiled, what is looked for.

    Attributes:
        identity: Digest of the kind of calls, then of the bucket: what users distinguish. Equal for
            all versions of a program and its environment.
        key: Digest of everything that the executable depends on.
        name: Name of the function.
        sizes: Size of each dimension variable: of its bucket, or of the exact shape.
        exact: Whether it runs unpadded.
        parts: Digests of the parts of the key: ``program``, ``constants``, ``call``.
        environment: Versions, device and flags it was compiled with.
        kept: Positions of the flat arguments that it takes; the others are not used.
        seconds: Seconds that compiling it took.
    """

    identity: str
    key: str
    name: str
    sizes: Mapping[str, int]
    exact: bool
    parts: Mapping[str, str]
    environment: Mapping[str, str]
    kept: Sequence[int] = ()
    seconds: float = 0.0


_TYPES = (str, str, str, dict, bool, dict, dict, list, float)  # of the fields, read from JSON


def pack(record: Record, executable: bytes) -> bytes:
    """The contents of a file."""
    zstandard = _zstandard()
    if zstandard is None:
        packed = zlib.compress(executable, 1)
    else:
        packed = zstandard.ZstdCompressor().compress(executable)
    body = json.dumps(record._asdict()).encode() + b"\n" + packed
    return MAGIC + hashlib.sha256(body).digest() + body


def unpack(data: bytes) -> tuple[Record, bytes]:
    """The record and the executable in the contents of a file."""
    if not data.startswith(MAGIC):
        raise Damaged("it is no executable of this version of bucketjit")
    digest, body = data[len(MAGIC) :][:32], data[len(MAGIC) + 32 :]
    if hashlib.sha256(body).digest() != digest:
        raise Damaged("its digest does not match: it is cut short or was changed")
    text, _, packed = body.partition(b"\n")
    try:
        record = Record(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        raise Damaged("its record has other fields") from None
    if any(type(x) is not kind for x, kind in zip(record, _TYPES, strict=True)):
        raise Damaged("its record has values of other types")
    if not packed.startswith(_ZSTD):
        try:
            return record, zlib.decompress(packed)
        except zlib.error as error:
            raise Damaged(f"its executable cannot be unpacked: {error}") from None
    zstandard = _zstandard()
    if zstandard is None:
        raise OSError(
            "it is compressed with zstandard, which is not installed; install it with: "
            "pip install 'bucketjit[compression]'"
        )
    try:
        return record, zstandard.ZstdDecompressor().decompress(packed)
    except zstandard.ZstdError as error:
        raise Damaged(f"its executable cannot be unpacked: {error}") from None


def _zstandard() -> ModuleType | None:
    """The library, if it is installed."""
    try:
        import zstandard
    except ImportError:
        return None
    found: ModuleType = zstandard
    return found
