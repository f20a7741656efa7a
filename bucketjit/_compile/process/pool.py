"""Ask a process to compile; start it when it is needed, and end it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from bucketjit._compile.process import messages, throttle
from bucketjit._compile.process.worker import stamp
from bucketjit._errors import in_one_line
from bucketjit._jax.compiler import NotElsewhere

_COMPILER = "bucketjit._compile.process.worker"
_IS_ONE = "_BUCKETJIT_COMPILES"  # in the environment of those that compile: they start none
_MOST_BYTES = 2**28  # of a program with its constants
# Where it got no time for a compile, or did not start, nobody asks for so many seconds, then twice
# as many.
_FIRST_REST, _LAST_REST = 60.0, 3600.0


class Ended(Exception):
    """The interpreter ends, and so did the processes: nobody wants what they compile any more."""


class Pool:
    """Processes that compile, one for four cores and at most four, for one thread at a time each.

    They end with the interpreter, and by themselves where nobody asks for a while.
    """

    def __init__(self) -> None:
        self._free: list[_Process] = []
        self._all: set[_Process] = set()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # entered by the lock: see `background`
        self._most = min(4, max(1, (os.cpu_count() or 1) // 4))
        self._rest = _FIRST_REST
        self._rests_until = 0.0
        self._has_ended = False
        self._never: str | None = None  # why to ask none ever again

    def start(self) -> None:
        """Have a process ready: importing JAX takes it most of a second."""
        with self._lock, contextlib.suppress(NotElsewhere):
            self._drop_ended()
            if not self._all and not self._never and time.monotonic() >= self._rests_until:
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
            Ended: Nobody wants it any more.
        """
        message = messages.packed([module, options, b"%d" % devices, b"%d" % device])
        if len(message) > _MOST_BYTES:
            raise NotElsewhere(f"the program has {len(message)} bytes")
        deadline = time.monotonic() + patience
        answer = None
        while answer is None:
            process, is_new = self._take(deadline)
            try:
                answer = self._ask(process, message, deadline)
            except EOFError as error:  # it may have ended for want of work
                if is_new:
                    self._take_a_rest()
                    raise NotElsewhere(str(error)) from error
        outcome, who, found = messages.unpacked(answer)
        if who != stamp():
            self._never = f"another process finds {who.decode()}, this one has {stamp().decode()}"
            self._end_all()
            raise NotElsewhere(self._never)
        if outcome != messages.DONE:
            raise NotElsewhere(found.decode(errors="replace"))
        return found

    def end(self) -> None:
        """End all processes, and start no other."""
        with self._lock:
            self._has_ended = True
        self._end_all()

    def _end_all(self) -> None:
        with self._lock:
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
        with self._lock:
            while True:
                if self._has_ended:
                    raise Ended
                if self._never is not None:
                    raise NotElsewhere(self._never)
                if time.monotonic() < self._rests_until:
                    raise NotElsewhere("the process that compiles did not get to it lately")
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
            EOFError: It has ended.
            NotElsewhere: It does not answer.
            Ended: So has everything.
        """
        try:
            answer = process.ask(message, deadline)
        except BaseException as error:
            process.kill()
            process.close()
            with self._lock:
                self._all.discard(process)
                self._changed.notify()
            if self._has_ended:
                raise Ended from error
            if isinstance(error, TimeoutError):
                self._take_a_rest()
            if isinstance(error, OSError):
                raise NotElsewhere(str(error)) from error
            raise
        with self._lock:
            self._rest = _FIRST_REST
            self._free.append(process)
            self._changed.notify()
        return answer

    def _take_a_rest(self) -> None:
        with self._lock:
            self._rests_until = time.monotonic() + self._rest
            self._rest = min(2 * self._rest, _LAST_REST)

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


def end_pool() -> None:
    """End the processes, if there are any: the interpreter is about to."""
    if pool.cache_info().currsize:
        pool().end()


def can_start() -> bool:
    """Whether there can be a process: on Linux, by an interpreter that runs scripts.

    None of them starts another: whatever runs when an interpreter starts runs in them too.
    """
    return (
        sys.platform == "linux"
        and _IS_ONE not in os.environ
        and not getattr(sys, "frozen", False)
        and "python" in Path(sys.executable or "").name
    )


class _Process:
    """A compiler and its throttle, one group of processes."""

    def __init__(self) -> None:
        ours, theirs = map(_beyond_standard, socket.socketpair())
        self._line = ours
        try:
            # Isolated: neither variables nor files of sites decide what it runs, but the paths do.
            # Not a session of its own: the scheduler may share cores out by session first.
            self._popen = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", throttle.__file__),
                    *(str(os.getpid()), str(theirs.fileno())),
                    *(json.dumps(_paths()), _COMPILER),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "JAX_PLATFORMS": "cpu", _IS_ONE: "1"},
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()
        self._line.setblocking(False)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._popen.poll() is None

    def ask(self, message: bytes, deadline: float) -> bytes:
        """Send a message and wait for the answer.

        Raises:
            TimeoutError: No answer comes in time.
            EOFError: It has ended.
        """
        try:
            return self._answer_to(message, deadline)
        except ConnectionError as error:
            raise EOFError("the process has ended") from error

    def _answer_to(self, message: bytes, deadline: float) -> bytes:
        line = self._line
        rest, answer = memoryview(message), bytearray()
        while rest:
            _wait_for(line.fileno(), select.POLLOUT, deadline)
            rest = rest[line.send(rest[: 2**20], socket.MSG_NOSIGNAL) :]
        while (wanted := messages.length(answer)) is None or len(answer) < wanted:
            _wait_for(line.fileno(), select.POLLIN, deadline)
            part = line.recv(2**20)
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
        with contextlib.suppress(OSError):
            self._line.close()

    def forget(self) -> None:
        """Leave it to another process, whose child it is."""
        self.close()
        self._popen.returncode = 0


def _wait_for(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    # Once in any case: this process may have been halted until now.
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
        raise TimeoutError("the process that compiles got no time for it")


def _beyond_standard(end: socket.socket) -> socket.socket:
    """The same end with a number beyond those of the standard streams, which may be closed."""
    if end.fileno() > 2:
        return end
    import fcntl  # not there on every system that this module is imported on

    with end:
        return socket.socket(fileno=fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3))


def _paths() -> list[str]:
    """Where another process finds the modules of this one, wherever either works."""
    found = [path for path in sys.path if isinstance(path, str) and os.path.isabs(path)]
    for package in ("bucketjit", "jax", "jaxlib", "numpy"):
        found.append(str(Path(str(sys.modules[package].__file__)).absolute().parent.parent))
    return list(dict.fromkeys(found))
