"""Messages between the processes: byte strings, through a connection of the standard library."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

# The first part of an answer. The second is the `stamp` of the process, the third the bytes of the
# executable or the text of an error.
DONE, FAILED = b"done", b"failed"


def send(line: Connection, parts: Sequence[bytes]) -> None:
    """Send a message.

    Args:
        line: The connection.
        parts: Its byte strings.

    Raises:
        OSError: The other process has ended, or took nothing in time.
    """
    for part in parts:
        line.send_bytes(part)


def receive(line: Connection, count: int) -> list[bytes]:
    """Receive a message.

    Args:
        line: The connection.
        count: How many byte strings it has.

    Raises:
        EOFError: The other process has ended.
        OSError: It has ended within a message, or sent nothing in time.
    """
    return [line.recv_bytes() for _ in range(count)]
