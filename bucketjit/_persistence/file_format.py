"""The format of a file that holds an executable.

A file is a magic line, the digest of the rest, the length of the header, the header in JSON, and a
executable, which is compressed as the header says. It is read and unpacked in pieces. Nothing here
knows JAX.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from bucketjit._persistence import codecs

MAGIC = b"bucketjit executable 1\n"

_BODY_AT = len(MAGIC) + hashlib.sha256().digest_size  # where the bytes begin that are digested

LARGEST = (1 << 31) - 1  # bytes of an executable: XLA writes a protobuf, which holds no more

_LARGEST_HEADER = 1 << 24  # bytes

_CODEC = "codec"  # the field of the header that names the codec; without it, that is zlib

_LONGEST_TIME = 2.0**53  # seconds: below, floats hold whole seconds exactly


class Damaged(Exception):
    """A file does not hold what was written to it; the message says what is wrong."""


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
    codec = codecs.best()
    text = json.dumps({**dataclasses.asdict(header), _CODEC: codec}, sort_keys=True).encode()
    body = struct.pack("<I", len(text)) + text + codecs.compress(codec, payload)
    return MAGIC + hashlib.sha256(body).digest() + body


def unpack(data: bytes) -> tuple[Header, bytes]:
    """The header and the executable in the contents of a file.

    Args:
        data: The contents.

    Raises:
        Damaged: The contents are not what was written.
        NotInstalled: The library that unpacks them is not installed.
    """
    payload = io.BytesIO()
    return unpack_file(io.BytesIO(data), len(data), payload), payload.getvalue()


def unpack_file(file: BinaryIO, length: int, payload: BinaryIO | None) -> Header:
    """Check the contents of a file piece by piece, and return the header.

    The digest is compared last, as all bytes are read only once. If it does not match,
    that is the error, whatever was found wrong with the header or the executable.

    Args:
        file: The contents.
        length: How many bytes they have.
        payload: Where to write the executable; None to only check it.

    Raises:
        Damaged: The contents are not what was written.
        NotInstalled: The library that unpacks them is not installed.
    """
    start = file.read(len(MAGIC))
    if start != MAGIC:
        what = "of another version" if start[:20] == MAGIC[:20] else "no executable of bucketjit"
        raise Damaged(f"it is {what}")
    digest = file.read(hashlib.sha256().digest_size)
    body = _Body(file, length - _BODY_AT)
    header, codec, problem = None, codecs.ZLIB, ""
    try:
        header, codec = _read_header(body, length)
    except Damaged as error:
        problem = str(error)
    # Before the digest, or a file of any length would be read to its end.
    if body.left > _most_packed(LARGEST if header is None else header.nbytes):
        raise Damaged(problem or "it is longer than its header says")
    try:
        if header is not None and codecs.is_installed(codec):
            _inflate(body, codec, header.nbytes, payload)
    except Damaged as error:
        problem = str(error)  # not the error itself: its frames hold the executable
    while body.read(codecs.PIECE):  # the rest is digested as well
        pass
    if body.digest() != digest:
        raise Damaged("its digest does not match: it is cut short or was changed")
    if header is None or problem:
        raise Damaged(problem)
    if not codecs.is_installed(codec):
        raise codecs.NotInstalled(
            "it is compressed with zstandard, which is not installed; install it with: "
            "pip install 'bucketjit[compression]'"
        )
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


def _read_header(body: _Body, file_length: int) -> tuple[Header, str]:
    """Read the header and the codec, and check that the file can hold what they describe.

    Raises:
        Damaged: It is no header, or the executable would be too large.
    """
    count = body.read(4)
    if len(count) < 4:
        raise Damaged("it has no header")
    (length,) = struct.unpack("<I", count)
    if length > _LARGEST_HEADER:
        raise Damaged(f"its header would have {length} bytes, more than {_LARGEST_HEADER}")
    header, codec = parse_header(body.read(length))
    tells = f"its header tells of an executable of {header.nbytes} bytes"
    if header.nbytes > LARGEST:
        raise Damaged(f"{tells}; none has more than {LARGEST}")
    if header.nbytes > codecs.EXPANDS_TO[codec] * body.left:
        raise Damaged(f"{tells}, which a file of {file_length} bytes cannot hold")
    return header, codec


def _most_packed(nbytes: int) -> int:
    """The most bytes to which so many are compressed: incompressible ones grow a little."""
    return nbytes + nbytes // 1000 + 1024


def _inflate(body: _Body, codec: str, nbytes: int, payload: BinaryIO | None) -> None:
    """Unpack the executable. Stop as soon as it is longer than its header says.

    Raises:
        Damaged: It has another length, or is not what the codec writes.
    """
    write = (lambda piece: None) if payload is None else payload.write
    try:
        is_right = codecs.unpack(codec, body, nbytes, write)
    except codecs.Malformed as error:
        raise Damaged(f"its executable cannot be unpacked: {error}") from None
    if not is_right:
        raise Damaged(f"its executable has not the {nbytes} bytes that its header says")


def parse_header(text: bytes) -> tuple[Header, str]:
    """The header and the codec from their text. Checks the type and the range of every value.

    Args:
        text: The text, in JSON.

    Raises:
        Damaged: It is no header.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise Damaged("its header is not JSON") from None
    codec = values.pop(_CODEC, codecs.ZLIB) if isinstance(values, dict) else None
    if codec is None or values.keys() != _TYPES.keys():
        raise Damaged("its header has other fields")
    if not isinstance(codec, str) or codec not in codecs.EXPANDS_TO:
        raise Damaged(f"its header has codec {reprlib.repr(codec)}")
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
    return Header(**{**values, "kept": tuple(values["kept"])}), codec
