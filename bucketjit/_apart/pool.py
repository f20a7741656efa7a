"""Ask a process to compile; start it when it is needed, and end it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from bucketjit._apart import pacer, wire
from bucketjit._jax import NotElsewhere

_COMPILER = "bucketjit._apart.compiler"
_MOST_BYTES = 2**28  # of a program with its constants


class Pool:
    """Processes that compile, each for one thread at a time.

    They end with the interpreter, and by themselves where nobody asks for a while.
    """

    def __init__(self) -> None:
        self._free: list[_Process] = []
        self._all: set[_Process] = set()
        self._lock = threading.Lock()
        self._has_ended = False

    def start(self) -> None:
        """Have a process ready: importing JAX takes it most of a second."""
        if self._all:
            return
        with self._lock, contextlib.suppress(NotElsewhere):
            if not self._all:
                self._free.append(self._started())

    def compile(
        self, patience: float, module: bytes, options: bytes, devices: int, device: int
    ) -> bytes:
        """Compile a program.

        Args:
            patience: Seconds after which to give up: where others want all cores, it gets none.
            module: The program, as MLIR bytecode.
            options: XLA's options, as a protocol buffer.
            devices: How many devices the host has.
            device: Which of them the program is for.

        Returns:
            The bytes of the executable.

        Raises:
            NotElsewhere: That did not work.
        """
        message = wire.packed([module, options, b"%d" % devices, b"%d" % device])
        if len(message) > _MOST_BYTES:
            raise NotElsewhere(f"the program has {len(message)} bytes")
        deadline = time.monotonic() + patience
        process, is_new = self._take()
        try:
            answer = self._ask(process, message, deadline)
        except (EOFError, BrokenPipeError) as error:  # it may have ended for want of work
            if is_new:
                raise NotElsewhere(str(error)) from error
            with self._lock:
                process = self._started()
            try:
                answer = self._ask(process, message, deadline)
            except (EOFError, OSError) as again:
                raise NotElsewhere(str(again)) from again
        except OSError as error:
            raise NotElsewhere(str(error)) from error
        outcome, found = wire.unpacked(answer)
        if outcome != wire.DONE:
            raise NotElsewhere(found.decode(errors="replace"))
        return found

    def end(self) -> None:
        """End all processes, and start no other."""
        with self._lock:
            self._has_ended = True
            ending, free = self._all, self._free
            self._all, self._free = set(), []
        for process in ending:
            process.kill()
        for process in free:
            process.close()

    def forget(self) -> None:
        """Leave the processes to whose they are: after a fork, this is somebody else."""
        self.__init__()  # type: ignore[misc]

    def _take(self) -> tuple[_Process, bool]:
        """A process, and whether it is new."""
        with self._lock:
            while self._free:
                process = self._free.pop()
                if process.is_alive:
                    return process, False
                self._all.discard(process)
                process.close()
            return self._started(), True

    def _ask(self, process: _Process, message: bytes, deadline: float) -> bytes:
        try:
            answer = process.ask(message, deadline)
        except BaseException:
            with self._lock:
                self._all.discard(process)
            process.kill()
            process.close()
            raise
        with self._lock:
            self._free.append(process)
        return answer

    def _started(self) -> _Process:
        if self._has_ended or not can_start():
            raise NotElsewhere(
                "there are no such processes on this platform, or by this interpreter"
            )
        try:
            process = _Process()
        except OSError as error:
            raise NotElsewhere(str(error)) from error
        self._all.add(process)
        return process


@functools.cache
def pool() -> Pool:
    """The processes that compile for this one."""
    made = Pool()
    atexit.register(made.end)
    os.register_at_fork(after_in_child=made.forget)
    return made


def can_start() -> bool:
    """Whether there can be a process: on Linux, by an interpreter that runs scripts."""
    return (
        sys.platform == "linux"
        and not getattr(sys, "frozen", False)
        and "python" in Path(sys.executable or "").name
    )


class _Process:
    """A compiler and its pacer, one group of processes."""

    def __init__(self) -> None:
        # Not a session of its own: the scheduler may share cores out by session first.
        paths = json.dumps([path for path in sys.path if isinstance(path, str)])
        self._popen = subprocess.Popen(
            [sys.executable, "-P", pacer.__file__, str(os.getpid()), paths, _COMPILER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            process_group=0,
            bufsize=0,
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._streams = self._popen.stdin, self._popen.stdout
        for stream in self._streams:
            os.set_blocking(stream.fileno(), False)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._popen.poll() is None

    def ask(self, message: bytes, deadline: float) -> bytes:
        """Send a message and wait for the answer.

        Raises:
            OSError: It does not take it, or no answer comes in time (`TimeoutError`).
            EOFError: It has ended.
        """
        asks, answers = (stream.fileno() for stream in self._streams)
        rest, answer = memoryview(message), bytearray()
        while rest:
            _wait_for(asks, select.POLLOUT, deadline)
            rest = rest[os.write(asks, rest[: 2**20]) :]
        while (wanted := wire.length(answer)) is None or len(answer) < wanted:
            _wait_for(answers, select.POLLIN, deadline)
            part = os.read(answers, 2**20)
            if not part:
                raise EOFError("the process has ended")
            answer += part
        return bytes(answer)

    def kill(self) -> None:
        """End it, whatever it does."""
        if self.is_alive:
            with contextlib.suppress(OSError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()

    def close(self) -> None:
        """Close what leads to it."""
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.close()


def _wait_for(fd: int, event: int, deadline: float) -> None:
    left = deadline - time.monotonic()
    poll = select.poll()
    poll.register(fd, event)
    if left <= 0 or not poll.poll(left * 1e3):
        raise TimeoutError("the process that compiles got no time for it")
