"""The process that compiles, started by `bucketjit._compile.process.throttle`."""

from __future__ import annotations

import os
import select

import jax

from bucketjit._compile.process import messages
from bucketjit._compile.process.throttle import BUSY, IDLE
from bucketjit._events import LONGEST, printable
from bucketjit._jax.compiler import compile_to_bytes, jaxlib_version
from bucketjit._raised import in_one_line
from bucketjit._version import __version__

_PATIENCE = 120.0  # seconds without a program after which the process ends


def stamp() -> bytes:
    """The versions that compile in this process.

    An asker compares them with its own: files may have been replaced since it has read them.
    """
    return f"jax {jax.__version__}, jaxlib {jaxlib_version()}, bucketjit {__version__}".encode()


def serve(line: int, tells: int) -> None:
    """Compile the programs that arrive, one after another, until none arrives any more.

    Args:
        line: File descriptor of the socket for programs and executables.
        tells: File descriptor to which `BUSY` and `IDLE` are written.

    Raises:
        OSError: The asker has closed the socket.
    """
    while True:
        os.write(tells, IDLE)
        message = _next_message(line, _PATIENCE)
        os.write(tells, BUSY)
        if message is None:
            return
        try:
            answer = [messages.DONE, stamp(), _compiled(message)]
        except Exception as error:
            answer = [messages.FAILED, stamp(), printable(in_one_line(error), LONGEST).encode()]
        rest = memoryview(messages.packed(answer))
        while rest:
            rest = rest[os.write(line, rest) :]


def _compiled(message: bytes) -> bytes:
    """The bytes of the executable that a message asks for."""
    module, options, devices, device = messages.unpacked(message)
    return compile_to_bytes(module, options, int(devices), int(device))


def _next_message(fd: int, patience: float) -> bytes | None:
    """The next message; None if the socket closes, or none arrives in ``patience`` seconds."""
    if not select.select([fd], [], [], patience)[0]:
        return None
    message = bytearray()
    while (wanted := messages.length(message)) is None or len(message) < wanted:
        part = os.read(fd, 2**20)
        if not part:
            return None
        message += part
    return bytes(message)
