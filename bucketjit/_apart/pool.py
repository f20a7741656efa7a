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
from bucketjit._errors import in_one_line
from bucketjit._jax import NotElsewhere

_COMPILER = "bucketjit._apart.compiler"
_MOST_BYTES = 2**28  # of a program with its constants
# Where it got no time for a compile, nobody asks for so many seconds, then twice as many.
_FIRST_REST, _LAST_REST = 60.0, 3600.0


class Pool:
    """Processes that compile, one for four cores and at most four, for one thread at a time each.

    They end with the interpreter, and by themselves where nobody asks for a while.
    """

    def __init__(self) -> None:
        self._free: list[_Process] = []
        self._all: set[_Process] = set()
        self._changed = threading.Condition()
        self._most = min(4, max(1, (os.cpu_count() or 1) // 4))
        self._rest = _FIRST_REST
        self._rests_until = 0.0
        self._has_ended = False

    def start(self) -> None:
        """Have a process ready: importing JAX takes it most of a second."""
        with self._changed, contextlib.suppress(NotElsewhere):
            self._drop_ended()
            if not self._all and time.monotonic() >= self._rests_until:
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
        answer = None
        while answer is None:
            process, is_new = self._take(deadline)
            try:
                answer = self._ask(process, message, deadline)
            except (EOFError, BrokenPipeError) as error:  # it may have ended for want of work
                if is_new:
                    raise NotElsewhere(str(error)) from error
        outcome, found = wire.unpacked(answer)
        if outcome != wire.DONE:
            raise NotElsewhere(found.decode(errors="replace"))
        return found

    def end(self) -> None:
        """End all processes, and start no other."""
        with self._changed:
            self._has_ended = True
            ending, free = self._all, self._free
            self._all, self._free = set(), []
            self._changed.notify_all()
        for process in ending:
            process.kill()
        for process in free:
            process.close()

    def forget(self) -> None:
        """Leave the processes to whose they are: after a fork, this is somebody else."""
        for process in self._all:
            process.forget()
        self.__init__()  # type: ignore[misc]

    def _take(self, deadline: float) -> tuple[_Process, bool]:
        """A process that nobody else uses, and whether it is new."""
        with self._changed:
            if time.monotonic() < self._rests_until:
                raise NotElsewhere("the process that compiles got no time for it lately")
            while True:
                self._drop_ended()
                if self._free:
                    return self._free.pop(), False
                if len(self._all) < self._most:
                    return self._started(), True
                if not self._changed.wait(deadline - time.monotonic()):
                    raise NotElsewhere("the processes that compile have much to do")

    def _ask(self, process: _Process, message: bytes, deadline: float) -> bytes:
        """What a process answers, which is free again afterwards.

        Raises:
            EOFError, BrokenPipeError: It has ended.
            NotElsewhere: It does not answer.
        """
        try:
            answer = process.ask(message, deadline)
        except BaseException as error:
            process.kill()
            process.close()
            with self._changed:
                self._all.discard(process)
                self._changed.notify()
                if isinstance(error, TimeoutError):
                    self._rests_until = time.monotonic() + self._rest
                    self._rest = min(2 * self._rest, _LAST_REST)
            if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                raise NotElsewhere(str(error)) from error
            raise
        with self._changed:
            self._rest = _FIRST_REST
            self._free.append(process)
            self._changed.notify()
        return answer

    def _drop_ended(self) -> None:
        for process in [process for process in self._free if not process.is_alive]:
            self._free.remove(process)
            self._all.discard(process)
            process.close()

    def _started(self) -> _Process:
        if self._has_ended or not can_start():
            raise NotElsewhere("there are no processes that compile")
        try:
            process = _Process()
        except Exception as error:  # it is a convenience: it must not break a call
            raise NotElsewhere(in_one_line(error)) from error
        self._all.add(process)
        return process


@functools.cache
def pool() -> Pool:
    """The processes that compile for this one; only where they `can_start`."""
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
        questions, asks = os.pipe()
        gets, answers = os.pipe()
        self._asks, self._gets = os.fdopen(asks, "wb", 0), os.fdopen(gets, "rb", 0)
        paths = json.dumps([path for path in sys.path if isinstance(path, str)])
        numbers = map(str, (os.getpid(), questions, answers))
        try:
            # Not a session of its own: the scheduler may share cores out by session first.
            self._popen = subprocess.Popen(
                [sys.executable, "-P", pacer.__file__, *numbers, paths, _COMPILER],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                pass_fds=(questions, answers),
                process_group=0,
            )
        except BaseException:
            self.close()
            raise
        finally:
            os.close(questions)
            os.close(answers)
        for stream in (self._asks, self._gets):
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
        asks, gets = self._asks.fileno(), self._gets.fileno()
        rest, answer = memoryview(message), bytearray()
        while rest:
            _wait_for(asks, select.POLLOUT, deadline)
            rest = rest[os.write(asks, rest[: 2**20]) :]
        while (wanted := wire.length(answer)) is None or len(answer) < wanted:
            _wait_for(gets, select.POLLIN, deadline)
            part = os.read(gets, 2**20)
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
        for stream in (self._asks, self._gets):
            with contextlib.suppress(OSError):
                stream.close()

    def forget(self) -> None:
        """Leave it to another process, whose child it is."""
        self.close()
        self._popen.returncode = 0


def _wait_for(fd: int, event: int, deadline: float) -> None:
    left = deadline - time.monotonic()
    poll = select.poll()
    poll.register(fd, event)
    if left <= 0 or not poll.poll(left * 1e3):
        raise TimeoutError("the process that compiles got no time for it")
