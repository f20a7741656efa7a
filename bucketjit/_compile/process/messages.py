"""Messages between the processes: byte strings, each with its length before it."""

from __future__ import annotations

import struct
from collections.abc import Sequence

# The first part of an answer. The second is the `stamp` of the process, the third the bytes of the
# executable or the text of an error.
DONE, FAILED = b"done", b"failed"
_COUNT = struct.Struct("<Q")


def packed(parts: Sequence[bytes]) -> bytes:
    """Byte strings as one message.

    Args:
        parts: The byte strings.

    Examples:
        >>> unpacked(packed([b"a", b""]))
        [b'a', b'']
    """
    body = b"".join(_COUNT.pack(len(part)) + part for part in parts)
    return _COUNT.pack(len(body)) + body


def length(begun: bytes | bytearray) -> int | None:
    """The length of a message, from its beginning.

    Args:
        begun: The first bytes of the message.

    Returns:
        Its bytes, the length field included; None if that field is not complete yet.

    Examples:
        >>> length(b""), length(packed([b"a"])[:8])
        (None, 17)
    """
    if len(begun) < _COUNT.size:
        return None
    (count,) = _COUNT.unpack_from(begun)
    return _COUNT.size + int(count)


def unpacked(message: bytes) -> list[bytes]:
    """The byte strings of a message.

    Args:
        message: A complete message.
    """
    parts, at = [], _COUNT.size
    while at < len(message):
        (count,) = _COUNT.unpack_from(message, at)
        at += _COUNT.size
        parts.append(message[at : at + count])
        at += count
    return parts
