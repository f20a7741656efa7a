"""How executables are compressed: with zstandard where it is installed, else with zlib.

JAX's own compilation cache does the same. A codec unpacks in pieces, so that a file cannot take
more memory than its header claims.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Protocol

PIECE = 1 << 20  # bytes that are read, or unpacked, at a time

ZLIB, ZSTD = "zlib", "zstd"

# The highest factor by which each can compress. A block of zstd holds at most 128 KiB, in 4 bytes.
EXPANDS_TO = {ZLIB: 1032, ZSTD: 1 << 15}

_LARGEST_WINDOW = 1 << 23  # bytes of memory that a file may ask for to be unpacked by zstd


class Malformed(Exception):
    """Compressed bytes are not what their codec writes."""


class NotInstalled(OSError):
    """The library that unpacks a file is not installed; the message says what to do."""


class Source(Protocol):
    """Compressed bytes."""

    def read(self, count: int, /) -> bytes:
        """The next bytes, at most so many; none at the end."""


def best() -> str:
    """The codec with which executables are written."""
    return ZSTD if is_installed(ZSTD) else ZLIB


def is_installed(codec: str) -> bool:
    """Whether a codec can be used here."""
    return codec == ZLIB or _zstandard() is not None


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        return None
    return zstandard


def compress(codec: str, payload: bytes) -> bytes:
    """Compress an executable.

    Args:
        codec: A codec that is installed.
        payload: The executable.
    """
    if codec == ZLIB:
        return zlib.compress(payload, 1)
    packed: bytes = _zstandard().ZstdCompressor().compress(payload)
    return packed


def unpack(codec: str, source: Source, nbytes: int, write: Callable[[bytes], object]) -> bool:
    """Unpack an executable. Stop as soon as it is longer than expected.

    Args:
        codec: A codec that is installed.
        source: The compressed bytes.
        nbytes: How many bytes they should be.
        write: Called with each piece.

    Returns:
        Whether they are so many bytes, and nothing follows.

    Raises:
        Malformed: They are not what the codec writes.
    """
    return (_unpack_zlib if codec == ZLIB else _unpack_zstd)(source, nbytes, write)


def _unpack_zlib(source: Source, left: int, write: Callable[[bytes], object]) -> bool:
    inflate = zlib.decompressobj()
    while not inflate.eof:
        packed = inflate.unconsumed_tail or source.read(PIECE)
        try:
            piece = inflate.decompress(packed, min(PIECE, left + 1))
        except zlib.error as error:
            raise Malformed(str(error)) from None
        if len(piece) > left or not (packed or piece):
            return False
        left -= len(piece)
        write(piece)
    return not (left or inflate.unused_data or source.read(1))


def _unpack_zstd(source: Source, left: int, write: Callable[[bytes], object]) -> bool:
    zstandard = _zstandard()
    unpacker = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
    # What follows the frame must be a frame too, or is an error.
    reader = unpacker.stream_reader(source, PIECE, read_across_frames=True, closefd=False)
    while True:
        try:
            piece = reader.read(min(PIECE, left + 1))
        except zstandard.ZstdError as error:
            raise Malformed(str(error)) from None
        if len(piece) > left:
            return False
        if not piece:
            return not left
        left -= len(piece)
        write(piece)
