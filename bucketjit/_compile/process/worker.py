"""The process that compiles, started by `bucketjit._compile.process.throttle`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing.connection import Connection

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
    asker = Connection(line)
    while True:
        os.write(tells, IDLE)
        message = _next_message(asker, _PATIENCE)
        os.write(tells, BUSY)
        if message is None:
            return
        try:
            answer = [messages.DONE, stamp(), _compiled(message)]
        except Exception as error:
            answer = [messages.FAILED, stamp(), printable(in_one_line(error), LONGEST).encode()]
        messages.send(asker, answer)


def _compiled(message: Sequence[bytes]) -> bytes:
    """The bytes of the executable that a message asks for."""
    module, options, devices, device = message
    return compile_to_bytes(module, options, int(devices), int(device))


def _next_message(asker: Connection, patience: float) -> list[bytes] | None:
    """The next message; None if the asker ends, or sends none in ``patience`` seconds."""
    try:
        return messages.receive(asker, 4) if asker.poll(patience) else None
    except EOFError:
        return None
