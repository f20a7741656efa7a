"""A process that shares a directory, and does what its standard input says.

It prints a line for each thing that a test waits for, and at last what it compiled and loaded.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit import BucketedExec
from bucketjit._compile.provider import ExecutableProvider
from bucketjit._persistence import claims

SIZES = 3, 4, 9  # two buckets


def pooled(x: Any) -> Any:
    return jnp.tanh(x).sum(axis=0)


def rows(n: int) -> np.ndarray:
    return np.arange(2 * n, dtype=np.float32).reshape(n, 2) / 10


def say(text: str) -> None:
    print(text, flush=True)


def without_flock() -> None:
    """As on a file system that has no locks."""
    import fcntl

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    fcntl.flock = fcntl.lockf = refuse  # type: ignore[assignment]


def wait_in_compiles() -> None:
    """Say when a compile begins, and go on with the next line of standard input."""
    build = ExecutableProvider._build

    def held(*args: Any, **kwargs: Any) -> Any:
        say("compiles")
        sys.stdin.readline()
        return build(*args, **kwargs)

    ExecutableProvider._build = held  # type: ignore[method-assign]


def join(rank: int, count: int, port: str) -> None:
    """Become a process of a job, whose devices have other numbers than those of the others."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, rank)
    jax.devices()


def main(directory: str, *flags: str) -> None:
    """Serve calls, with executables of a directory that others use as well."""
    if "no-flock" in flags:
        without_flock()
    if "held" in flags:
        wait_in_compiles()
    if "quick" in flags:
        claims.BEAT, claims.DEAD_AFTER = 0.05, 1.0
    if "job" in flags:
        join(int(flags[-3]), int(flags[-2]), flags[-1])
    told: list[Any] = []
    executor = BucketedExec(pooled).with_pow2().with_on_event(told.append)
    executor = executor.with_persistence(directory, share=None if "alone" in flags else "first")
    say("ready")
    sys.stdin.readline()
    if "warm" in flags:
        like = jax.ShapeDtypeStruct((1, 2), np.float32)
        executor.warmup(like, sizes={"batch": list(SIZES)}, progress=False)
    results = []
    for n in SIZES:
        results += np.asarray(executor(rows(n))).tolist()
    stats = executor.stats()
    say(
        json.dumps(
            {
                "compiles": stats.compiles,
                "loads": stats.loads,
                "kinds": [event.kind for event in told],
                "results": results,
                "device": jax.local_devices()[0].id,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
