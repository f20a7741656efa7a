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
