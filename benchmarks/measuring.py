"""Times, memory and compiles: the few ways of measuring that the benchmarks share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any


def rss_mib(field: str = "VmRSS") -> float:
    """Resident memory of this process in MiB; with ``"VmHWM"`` the most it has ever been.

    Not ``getrusage``: what that calls the peak of a process may be that of its parent.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


class HostLoad:
    """How much of the CPUs other guests of the host took, from the making of it on.

    A virtual machine may get half of its CPUs for minutes at a time. Work that keeps several of
    them busy then takes twice as long, and work that keeps one busy does not, so ratios of such
    runs tell of the host. Linux calls that time stolen; see proc_stat(5).
    """

    def __init__(self) -> None:
        self._began = _ticks()

    def stolen(self) -> float | None:
        """Stolen time, as a share of all CPU time that was not idle; None if it is not told."""
        now = _ticks()
        if self._began is None or now is None:
            return None
        stolen, wanted = (b - a for a, b in zip(self._began, now, strict=True))
        return stolen / wanted if wanted else 0.0


def _ticks() -> tuple[int, int] | None:
    """CPU time since boot that was stolen, and that was not idle, of all CPUs."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()
        user, nice, system, _idle, _wait, irq, softirq, stolen = map(int, first[1:9])
    except (OSError, ValueError):
        return None
    return stolen, user + nice + system + irq + softirq + stolen


def in_turn(
    calls: Mapping[str, Callable[..., Any]], arguments: Iterable[tuple[Any, ...]]
) -> dict[str, list[float]]:
    """Seconds of each call in each round, those of a round one after the other.

    Every other round goes backwards, so that no call always comes after the same one.

    Args:
        calls: What to time, by name. Each has to wait for its own result.
        arguments: Those of each round. ``[()] * 60`` for 60 rounds without.

    Returns:
        By name, one time for each round.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i, given in enumerate(arguments):
        for name in calls if i % 2 else reversed(list(calls)):
            began = time.perf_counter()
            calls[name](*given)
            times[name].append(time.perf_counter() - began)
    return times


def paired_ratio(times: Mapping[str, list[float]], name: str, to: str) -> float:
    """The median over all rounds of the time of one call over that of another."""
    return median(a / b for a, b in zip(times[name], times[to], strict=True))
