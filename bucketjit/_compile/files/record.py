"""What is in a file: a magic line, a digest of the rest, a record in JSON, and an executable.

The executable is compressed by zstandard where that is installed, else by zlib, as JAX's own cache
does. Nothing here knows JAX.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

MAGIC = b"bucketjit executable 3\n"

LARGEST = (1 << 31) - 1  # bytes of an executable: XLA writes a protobuf, which holds no more

_ZSTD = b"\x28\xb5\x2f\xfd"  # what zstandard's bytes begin with; those of zlib never do


class Damaged(Exception):
    """A file does not hold what was written to it; the message says what is wrong."""


class Record(NamedTuple):
    """What a file says of its executable; until it is compiled, what is looked for.

    Attributes:
        call: Digest of all that the executable depends on, but for the environment.
        program: Digest of the program and its constants, which is a part of ``call``.
        name: Name of the function.
        sizes: Size of each dimension variable: of its bucket, or of the exact shape.
        exact: Whether it runs unpadded.
        environment: Versions, device and flags it was compiled with.
        kept: Positions of the flat arguments that it takes; the others are not used.
        seconds: Seconds that compiling it took.
        specs: On a mesh, partition specs of the arguments that it takes, and of the results.
    """

    call: str
    program: str
    name: str
    sizes: Mapping[str, int]
    exact: bool
    environment: Mapping[str, str]
    kept: Sequence[int] = ()
    seconds: float = 0.0
    specs: Sequence[Sequence[Any]] | None = None

    @property
    def file_name(self) -> str:
        """The name of its file: digests of the call and of the environment."""
        made_with = hashlib.sha256(
            repr(sorted(self.environment.items())).encode("utf-8", "replace")
        )
        return f"{self.call[:32]}-{made_with.hexdigest()[:32]}.bjx"


def pack(record: Record, executable: bytes) -> bytes:
    zstandard = _zstandard()
    if zstandard is None:
        packed = zlib.compress(executable, 1)
    else:
        packed = zstandard.ZstdCompressor().compress(executable)
    body = json.dumps(record._asdict()).encode() + b"\n" + packed
    return MAGIC + hashlib.sha256(body).digest() + body


def unpack(data: bytes) -> tuple[Record, bytes]:
    if not data.startswith(MAGIC):
        raise Damaged("it is no executable of this version of bucketjit")
    checksum, body = data[len(MAGIC) :][:32], data[len(MAGIC) + 32 :]
    if hashlib.sha256(body).digest() != checksum:
        raise Damaged("its digest does not match: it is cut short or was changed")
    text, _, packed = body.partition(b"\n")
    record = _record(text)
    if not packed.startswith(_ZSTD):
        return record, zlib.decompress(packed)
    zstandard = _zstandard()
    if zstandard is None:
        raise OSError(
            "it is compressed with zstandard, which is not installed; install it with: "
            "pip install 'bucketjit[compression]'"
        )
    return record, zstandard.ZstdDecompressor().decompress(packed)


def head(file: BinaryIO) -> Record:
    """The record at the beginning of a file, whose digest is not checked: that reads all of it."""
    if file.read(len(MAGIC)) != MAGIC:
        raise Damaged("it is no executable of this version of bucketjit")
    file.read(32)
    return _record(file.readline())


def _record(text: bytes) -> Record:
    """The record in a line of JSON, which holds anything where the file was altered."""
    with contextlib.suppress(AttributeError, TypeError, ValueError, RecursionError):
        record = Record(**json.loads(text))
        texts = {record.call, record.program, record.name, *record.environment.values()}
        numbers = [record.seconds, *record.sizes.values(), *record.kept]
        are_of_type = {*map(type, texts)} <= {str} and {*map(type, numbers)} <= {int, float}
        if are_of_type and all(0 <= n < 1 << 63 for n in numbers) and type(record.exact) is bool:
            return record
    raise Damaged("its record is none that bucketjit writes")


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        return None
    return zstandard
