"""What the system tells of processes, where it has ``/proc``."""

from __future__ import annotations

import time
from pathlib import Path

SECONDS = 240  # the machine may be busy, and what is waited for has the lowest priority


def child(parent: int) -> int:
    """A process that another one has started, once there is one."""
    deadline = time.monotonic() + SECONDS
    while not (found := [pid for pid in _all() if _field(pid, 1) == str(parent)]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found[0]


def assert_gone(*pids: int) -> None:
    """Wait until processes have ended."""
    deadline = time.monotonic() + SECONDS
    while any(map(_is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    return state(pid) not in (None, "Z")


def state(pid: int) -> str | None:
    """One letter, as of ``ps``; None if there is no such process."""
    return _field(pid, 0)


def _all() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _field(pid: int, number: int) -> str | None:
    """A field behind the name of a process: 0 its state, 1 its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[number]
    except OSError:
        return None
