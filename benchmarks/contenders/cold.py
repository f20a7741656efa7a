"""The cold start of one contender, in a process that has done nothing else."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

import numpy as np

from benchmarks.contenders import entry
from benchmarks.encoder import WIDTH, draw_sizes, draw_tokens, draw_weights
from benchmarks.measuring import HostLoad, rss_mib

TOLERANCE = 1e-3  # the states are normalised: they are about 1


def start(name: str, calls: int, exact: str) -> dict[str, Any]:
    """Run a stream of so many calls.

    Args:
        name: The contender.
        calls: How many calls.
        exact: A file of float32: the right result of each call, one after the other.

    Returns:
        A row of the table. What is timed is making the contender and the calls; not importing
        its framework, and not comparing its results.

    Raises:
        ArithmeticError: A result is not the right one.
    """
    chosen = entry(name)
    sizes, weights = draw_sizes(calls), draw_weights()
    stream = draw_tokens(sizes)
    make, host = chosen.load(), HostLoad()
    began = time.perf_counter()
    contender = make(weights, sizes)
    set_up = time.perf_counter() - began
    seconds, largest = [], 0.0
    with open(exact, "rb") as file:
        for tokens in stream:
            began = time.perf_counter()
            states = contender.run(tokens)
            seconds.append(time.perf_counter() - began)
            shape = (*tokens.shape, WIDTH)
            expected = np.fromfile(file, np.float32, np.prod(shape)).reshape(shape)
            if states.shape != shape:
                raise ArithmeticError(f"tokens {tokens.shape} gave states {states.shape}")
            largest = max(largest, float(abs(states - expected).max()))
            if not largest <= TOLERANCE:
                raise ArithmeticError(f"tokens {tokens.shape}: off by {largest:.3g}")
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e3
    return {
        "version": f"{chosen.package} {importlib.metadata.version(chosen.package)}",
        "total_s": set_up + sum(seconds),
        "set_up_s": set_up,
        "compiles": contender.compiles(),
        "p50_ms": p50,
        "p99_ms": p99,
        "peak_rss_mib": rss_mib("VmHWM"),
        "off_by": largest,
        "stolen": host.stolen(),
        "note": contender.note(),
    }
