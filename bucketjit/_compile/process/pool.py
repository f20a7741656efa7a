"""The processes that compile: start them when they are needed, send them programs, end them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from bucketjit._compile.process import messages, throttle
from bucketjit._compile.process.worker import stamp
from bucketjit._jax.compiler import NotElsewhere
from bucketjit._raised import in_one_line

_COMPILER = "bucketjit._compile.process.worker"
_IS_ONE = "_BUCKETJIT_COMPILES"  # set in the environment of these processes, which start no others
_MOST_BYTES = 2**28  # of a message: a program with its constants
# After a compile that got no time, or a process that did not start, no process is asked for so many
# seconds. The rest doubles each time, up to the second number.
_FIRST_REST, _LAST_REST = 60.0, 3600.0


class Ended(Exception):
    """The interpreter is ending and the processes with it, so the compile is no longer wanted."""


class Pool:
    """Processes that compile: one for every four cores, four at most, a thread at a time each.

    They end with the interpreter, or by themselves when they are not used for a while.
    """

    def __init__(self) -> None:
        self._free: list[_Process] = []
        self._all: set[_Process] = set()
        self._lock = threading.RLock()
        # Enter the lock itself: see `background._Jobs`.
        self._changed = threading.Condition(self._lock)
        self._most = min(4, max(1, (os.cpu_count() or 1) // 4))
        self._rest = _FIRST_REST
        self._rests_until = 0.0
        self._has_ended = False
        self._never: str | None = None  # why no process can ever be used, or None

    def start(self) -> None:
        """Start a process if there is none, before it is needed: it takes most of a second."""
        with self._lock, contextlib.suppress(NotElsewhere):
            self._drop_ended()
            if not self._all and not self._never and time.monotonic() >= self._rests_until:
                self._free.append(self._started())

    def compile(
        self, patience: float, module: bytes, options: bytes, devices: int, device: int
    ) -> bytes:
        """Compile a program.

        Args:
            patience: Seconds after which to give up. Where other programs use all cores, the
                process gets none.
            module: The program, as MLIR bytecode.
            options: XLA's options, as a protocol buffer.
            devices: How many devices the host has.
            device: The index of the one the program is for.

        Returns:
            The bytes of the executable.

        Raises:
            NotElsewhere: It cannot be compiled by another process, for the reason in the message.
            Ended: The interpreter is ending.
        """
        message = [module, options, b"%d" % devices, b"%d" % device]
        if (nbytes := sum(map(len, message))) > _MOST_BYTES:
            raise NotElsewhere(f"the program has {nbytes} bytes")
        deadline = time.monotonic() + patience
        answer = None
        while answer is None:
            process, is_new = self._take(deadline)
            try:
                answer = self._ask(process, message, deadline)
            # A process that was not used for a while ends; try the next one.
            except EOFError as error:
                if is_new:
                    self._take_a_rest()
                    raise NotElsewhere(str(error)) from error
        outcome, who, found = answer
        if who != stamp():
            self._never = f"another process finds {who.decode()}, this one has {stamp().decode()}"
            self._end_all()
            raise NotElsewhere(self._never)
        if outcome != messages.DONE:
            raise NotElsewhere(found.decode(errors="replace"))
        return found

    def end(self) -> None:
        """End all processes, and start no others."""
        with self._lock:
            self._has_ended = True
        self._end_all()

    def _end_all(self) -> None:
        """Kill all processes, and wake the threads that wait for one."""
        with self._lock:
            ending, free = self._all, self._free
            self._all, self._free = set(), []
            self._changed.notify_all()
        for process in ending:
            process.kill()
        for process in free:  # the others are closed by the threads that use them
            process.close()

    def forget(self) -> None:
        """Forget the processes of the parent, after a fork: they belong to the parent."""
        for process in self._all:
            process.forget()
        self.__init__()  # type: ignore[misc]

    def _take(self, deadline: float) -> tuple[_Process, bool]:
        """A process that no other thread uses, and whether it was started just now.

        Raises:
            NotElsewhere: There is none before the deadline.
            Ended: The interpreter is ending.
        """
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

    def _ask(self, process: _Process, message: Sequence[bytes], deadline: float) -> list[bytes]:
        """The answer of a process, which goes back to the free ones. After an error it is killed.

        Raises:
            EOFError: The process has ended.
            NotElsewhere: It does not answer in time.
            Ended: The interpreter is ending.
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
        """Ask no process for a while, and for twice as long the next time."""
        with self._lock:
            self._rests_until = time.monotonic() + self._rest
            self._rest = min(2 * self._rest, _LAST_REST)

    def _drop_ended(self) -> None:
        """Drop the free processes that have ended."""
        for process in [process for process in self._free if not process.is_alive]:
            self._free.remove(process)
            self._all.discard(process)
            process.close()

    def _started(self) -> _Process:
        """A new process.

        Raises:
            NotElsewhere: It cannot be started.
        """
        if self._has_ended or not can_start():
            raise NotElsewhere("there are no processes that compile")
        try:
            process = _Process()
        except Exception as error:  # whatever it is: the program can be compiled in this process
            raise NotElsewhere(in_one_line(error)) from error
        self._all.add(process)
        return process


@functools.cache
def pool() -> Pool:
    """The pool of this process; use it only if it `can_start` processes."""
    made = Pool()
    atexit.register(made.end)
    os.register_at_fork(after_in_child=made.forget)
    return made


def end_pool() -> None:
    """End the processes, if there are any, as the interpreter is about to end."""
    if pool.cache_info().currsize:
        pool().end()


def can_start() -> bool:
    """Whether processes can be started: on Linux, by an interpreter that runs scripts.

    Processes that compile start no others: code that runs at every start of the interpreter, such
    as ``sitecustomize``, runs in them too.
    """
    return (
        sys.platform == "linux"
        and _IS_ONE not in os.environ
        and not getattr(sys, "frozen", False)
        and "python" in Path(sys.executable or "").name
    )


class _Process:
    """One process that compiles and its throttle, together a process group."""

    def __init__(self) -> None:
        ours, theirs = map(_beyond_standard, Pipe())
        self._line = ours
        try:
            # -I -S: neither environment variables nor site packages decide what it runs, only the
            # paths that it gets. A group, but not a session: the scheduler may divide the cores
            # among sessions first, and then its low priority would not count against this process.
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

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._popen.poll() is None

    def ask(self, message: Sequence[bytes], deadline: float) -> list[bytes]:
        """Send a message and wait for the answer.

        Args:
            message: Its byte strings.
            deadline: When to give up (``time.monotonic``).

        Returns:
            The byte strings of the answer.

        Raises:
            TimeoutError: No answer came in time.
            EOFError: The process has ended.
            OSError: The connection failed otherwise.
        """
        line = self._line
        try:
            _bound_waits(line, deadline)
            with _without_signal():
                messages.send(line, message)
            # Look once even after the deadline: this process may have been suspended, and an answer
            # be there.
            if not line.poll(max(0.0, deadline - time.monotonic())):
                raise BlockingIOError
            return messages.receive(line, 3)
        except BlockingIOError:
            raise TimeoutError("the process that compiles got no time for it") from None
        except OSError as error:
            # Of an end within a message, `Connection` makes an error without a number.
            if isinstance(error, ConnectionError) or error.errno is None:
                raise EOFError("the process has ended") from error
            raise
        except EOFError:
            raise EOFError("the process has ended") from None

    def kill(self) -> None:
        """End the process and its throttle at once."""
        if self.is_alive:
            with contextlib.suppress(OSError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()

    def close(self) -> None:
        """Close the connection to the process."""
        with contextlib.suppress(OSError):
            self._line.close()

    def forget(self) -> None:
        """Forget the process in a fork, whose child it is not, so that it is not waited for."""
        self.close()
        self._popen.returncode = 0


def _bound_waits(line: Connection, deadline: float) -> None:
    """Let each read and write that gets nowhere until a deadline raise BlockingIOError.

    `Connection` waits without end, and a process that is halted reads nothing.
    """
    left = max(0.001, deadline - time.monotonic())
    seconds = struct.pack("ll", int(left), int(left % 1 * 1e6))  # struct timeval; 0 is no bound
    with socket.socket(fileno=os.dup(line.fileno())) as end:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, seconds)


@contextlib.contextmanager
def _without_signal() -> Iterator[None]:
    """Let a write to a process that has ended raise, even where SIGPIPE would end this process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        yield
    finally:
        if signal.SIGPIPE not in before:
            signal.sigtimedwait({signal.SIGPIPE}, 0)  # takes the one that is pending, if there is
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _beyond_standard(end: Connection) -> Connection:
    """The same connection under a number above 2, so that it is none of the standard streams.

    Numbers up to 2 are free if a standard stream is closed; the new process would replace them.
    """
    if end.fileno() > 2:
        return end
    import fcntl  # not there on every system that this module is imported on

    with end:
        return Connection(fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))


def _paths() -> list[str]:
    """The directories in which another process finds the modules of this one, as absolute paths."""
    found = [path for path in sys.path if isinstance(path, str) and os.path.isabs(path)]
    for package in ("bucketjit", "jax", "jaxlib", "numpy"):
        found.append(str(Path(str(sys.modules[package].__file__)).absolute().parent.parent))
    return list(dict.fromkeys(found))
