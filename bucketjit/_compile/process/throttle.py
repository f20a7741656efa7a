"""The process that is started: it forks the compiler, and halts it again and again.

The scheduler's idle class alone is not enough: beside a compile in that class, 3 to 5 in a hundred
calls of 6 ms took more than twice as long as alone, and beside one that is halted as well, less
than one in a hundred (two cores). ``python -m benchmarks.stalls`` measures the resulting p99.

This file is run as a script, and imports nothing but the standard library, because it forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import sys
import time

# Seconds: the compiler runs for RUN and is halted for PAUSE, while the process it compiles for uses
# more than the share AT_WORK of one core. That share is measured every LOOK seconds.
RUN, PAUSE = 0.0005, 0.001
LOOK, AT_WORK = 0.05, 0.1
IDLE_LOOK = 1.0  # seconds between two checks that the asker is there, while nothing compiles
BUSY, IDLE = b"1", b"0"  # what the compiler writes when it begins and ends a compile
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def main(asker: int, line: int, paths: list[str], module: str) -> None:
    """Start the compiler, and throttle it until it ends.

    Args:
        asker: Process identifier of the process that it compiles for, the parent of this one.
        line: File descriptor of the socket by which the compiler gets programs and answers.
        paths: The directories in which the asker finds modules.
        module: Name of the module with the compiler.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the asker, which ends this process
    told, tells = os.pipe()
    pacer = os.getpid()
    compiler = os.fork()
    if compiler == 0:
        try:
            os.close(told)
            _stand_back(pacer)
            os.write(tells, BUSY)
            sys.path[:] = paths
            importlib.import_module(module).serve(line, tells)
        finally:
            os._exit(0)
    os.close(line)
    os.close(tells)
    _pace(compiler, told, asker)
    os.waitpid(compiler, 0)


def _stand_back(pacer: int) -> None:
    """Take only time that no other process wants, and end when the pacer ends.

    Without the latter, a pacer that ends while the compiler is halted would leave it halted.
    """
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != pacer:  # it ended before the signal was set up
        os._exit(0)


def _pace(compiler: int, told: int, asker: int) -> None:
    """Halt the compiler in turns while both it and the asker are at work, until it ends.

    Args:
        compiler: Its process identifier.
        told: File descriptor from which its states `BUSY` and `IDLE` are read.
        asker: Process identifier of the process that it compiles for.
    """
    state = os.read(told, 1)  # it has called `_stand_back`: now it may be halted
    work = _Work(asker)
    while state:
        if os.getppid() != asker:
            os.kill(compiler, signal.SIGKILL)
            return
        if state == BUSY and work.is_under_way():
            os.kill(compiler, signal.SIGSTOP)
            time.sleep(PAUSE)
            os.kill(compiler, signal.SIGCONT)
        if select.select([told], [], [], RUN if state == BUSY else IDLE_LOOK)[0]:
            state, work = os.read(told, 1), _Work(asker)


class _Work:
    """Measures whether a process uses the cores."""

    def __init__(self, process: int) -> None:
        self._stat = f"/proc/{process}/stat"
        self._tick = 1 / os.sysconf("SC_CLK_TCK")
        self._seen = time.monotonic(), self._seconds()
        self._answer = True

    def is_under_way(self) -> bool:
        """Whether the process used more than `AT_WORK` of a core in the last `LOOK` seconds."""
        now = time.monotonic()
        then, before = self._seen
        if now - then >= LOOK:
            used = self._seconds()
            self._seen = now, used
            self._answer = used - before > AT_WORK * (now - then)
        return self._answer

    def _seconds(self) -> float:
        """CPU seconds that the process has used on all cores; 0 if it has ended."""
        try:
            with open(self._stat) as file:
                # The name of the program, in parentheses, may hold spaces.
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) * self._tick  # utime and stime


if __name__ == "__main__":
    _, _asker, _line, _paths, _module = sys.argv
    main(int(_asker), int(_line), json.loads(_paths), _module)
