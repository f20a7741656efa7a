"""Messages between the processes: a few byte strings, with their lengths before them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

# The first part of an answer; the others are who gives it, and what was found.
DONE, FAILED = b"done", b"failed"
_COUNT = struct.Struct("<Q")


def packed(parts: Sequence[bytes]) -> bytes:
    """Byte strings as one message.

    >>> unpacked(packed([b"a", b""]))
    [b'a', b'']
    """
    body = b"".join(_COUNT.pack(len(part)) + part for part in parts)
    return _COUNT.pack(len(body)) + body


def length(begun: bytes | bytearray) -> int | None:
    """How long a message is that begins so; None if not enough of it is there to tell.

    >>> length(b""), length(packed([b"a"])[:8])
    (None, 17)
    """
    if len(begun) < _COUNT.size:
        return None
    (count,) = _COUNT.unpack_from(begun)
    return _COUNT.size + int(count)


def unpacked(message: bytes) -> list[bytes]:
    """The byte strings of a message."""
    parts, at = [], _COUNT.size
    while at < len(message):
        (count,) = _COUNT.unpack_from(message, at)
        at += _COUNT.size
        parts.append(message[at : at + count])
        at += count
    return parts
