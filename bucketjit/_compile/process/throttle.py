"""The process that is started: it starts the one that compiles, and halts that again and again.

The scheduler's idle class alone does not do: beside a compile of that class, 3 to 5 in a hundred
calls of 6 ms took more than twice as long as alone, and beside one that is halted besides, less
than one in a hundred (two cores). ``python -m benchmarks.stalls`` has the p99 that comes of it.

This file is run as a script, and imports nothing but the standard library: it forks.
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

# The compiler runs for RUN seconds and is halted for PAUSE, as long as the process it compiles for
# uses more than AT_WORK of one core, which is looked at every LOOK seconds.
RUN, PAUSE = 0.0005, 0.001
LOOK, AT_WORK = 0.05, 0.1
IDLE_LOOK = 1.0  # seconds between two looks whether the asker is there, without work
BUSY, IDLE = b"1", b"0"  # what the compiler tells
_PR_SET_PDEATHSIG = 1


def main(asker: int, line: int, paths: list[str], module: str) -> None:
    """Start the compiler, and pace it until it ends.

    Args:
        asker: The process that it compiles for, which has started this one.
        line: Where the compiler is asked, and answers.
        paths: Where the asker finds modules.
        module: The module with the compiler.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the asker's affair
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
    """Take only the time that nobody else wants, and end with the pacer: it may have halted us."""
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != pacer:
        os._exit(0)


def _pace(compiler: int, told: int, asker: int) -> None:
    """Halt the compiler now and then while both it and the asker are at work, until it ends."""
    state = os.read(told, 1)  # from here on it ends with this process, halted or not
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
    """Whether a process does something."""

    def __init__(self, process: int) -> None:
        self._stat = f"/proc/{process}/stat"
        self._tick = 1 / os.sysconf("SC_CLK_TCK")
        self._seen = time.monotonic(), self._seconds()
        self._answer = True

    def is_under_way(self) -> bool:
        """Whether it has used the cores lately."""
        now = time.monotonic()
        then, before = self._seen
        if now - then >= LOOK:
            used = self._seconds()
            self._seen = now, used
            self._answer = used - before > AT_WORK * (now - then)
        return self._answer

    def _seconds(self) -> float:
        """What it has used of all cores; less than before if it has ended."""
        try:
            with open(self._stat) as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) * self._tick


if __name__ == "__main__":
    _, _asker, _line, _paths, _module = sys.argv
    main(int(_asker), int(_line), json.loads(_paths), _module)
