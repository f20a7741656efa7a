"""Carry out several compile requests at the same time, in threads."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from bucketjit._compile.provider import Cleared
from bucketjit._compile.requests import CompileRequest, Source
from bucketjit._jax.config import ThreadConfig
from bucketjit._runtime.engine import Engine


def compile_all(
    engine: Engine,
    requests: Sequence[CompileRequest],
    workers: int | None,
    epoch: object,
    *,
    deadline: float | None = None,
    first_run: bool,
    is_asked_for: bool = True,
) -> Generator[tuple[CompileRequest, Source | Exception]]:
    """Compile several executables in parallel. XLA compiles without holding Python's lock.

    A request is handed to the thread pool only when a thread is free, so that an interrupt, the
    deadline or a `ExecutableProvider.clear` stops all later ones.
    """
    prepare = functools.partial(
        engine.provider.prepare, first_run=first_run, is_asked_for=is_asked_for, epoch=epoch
    )
    count = workers or min(4, os.cpu_count() or 1)
    waiting = iter(requests)
    running: dict[Future[Source], CompileRequest] = {}
    config = ThreadConfig()  # JAX's context managers of this thread hold in the others too
    with ThreadPoolExecutor(count, thread_name_prefix="bucketjit-warmup") as pool:
        while True:
            late = deadline is not None and time.monotonic() >= deadline
            while not late and len(running) < count:
                request = next(waiting, None)
                if request is None:
                    break
                try:
                    running[pool.submit(config.run, prepare, request)] = request
                except RuntimeError as refused:
                    # At the end of the interpreter pools refuse work, in a daemon thread of the
                    # user for instance. Only the text of the error distinguishes that.
                    if "shutdown" not in str(refused):
                        raise
                    return
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                request = running.pop(future)
                error = future.exception()
                if isinstance(error, Cleared):
                    return
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield request, error or future.result()


def volume(sizes: Mapping[str, int]) -> int:
    """The product of the padded sizes of a bucket; 0 without variables."""
    return int(np.prod(list(sizes.values()), dtype=object)) if sizes else 0
