"""Run tasks that compile thousands of programs, each in a process of its own.

An executable holds about a hundred memory maps, of which the system has 65,530, and XLA ends
the process when there are none left; so no process compiles for long, and one that dies is no
harm to the others. Small programs that run once are not worth optimising.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_multi_thread_eigen=false"

Result = tuple[list[Any], Any]


def processes() -> int:
    """How many run at once: one for each core, and for each 4 GiB of memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores or 1, memory // (4 << 30)))


def _start() -> None:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _alone(task: Callable[[list[Any]], Any], chunk: list[Any]) -> list[Result]:
    """Run a chunk in a new process; where that dies, its halves, down to the one to blame."""
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=context, initializer=_start) as pool:
            return [(chunk, pool.submit(task, chunk).result())]
    except BrokenProcessPool:
        if len(chunk) == 1:
            return [(chunk, None)]
    half = len(chunk) // 2
    return _alone(task, chunk[:half]) + _alone(task, chunk[half:])


def run_isolated(
    task: Callable[[list[Any]], Any], chunks: Sequence[list[Any]], jobs: int
) -> Iterator[Result]:
    """Run ``task`` on each chunk in a process of its own.

    Args:
        task: A function of a chunk, at the top level of a module.
        chunks: Lists of what the task takes.
        jobs: How many at a time.

    Yields:
        Chunks and their results as they come; a chunk of one that kills its process has None.
    """
    with ThreadPoolExecutor(jobs) as threads:
        for future in as_completed([threads.submit(_alone, task, list(c)) for c in chunks]):
            yield from future.result()
