"""Run many cases in processes of their own, and survive one that dies.

Each process compiles thousands of small programs. It drops them as it goes (an executable
holds about a hundred memory maps, of which the system has 65,530) and optimises none.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from tests.conformance.outcome import ERROR, Outcome

CHUNK = 24
CLEAR_EVERY = 8
TASKS_PER_PROCESS = 16
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_multi_thread_eigen=false"

Progress = Callable[[int, int, Sequence[Outcome]], None]


def _start_worker() -> None:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _fingerprints(indices: Sequence[int]) -> list[str | None]:
    from tests.conformance.harnesses import fingerprint

    return [fingerprint(i) for i in indices]


def _name(index: int) -> tuple[str, str]:
    from tests.conformance.harnesses import load

    own = load()[index]
    return own.fullname, own.group_name


def run_cases(part: str, indices: Sequence[int], only: str = "") -> list[Outcome]:
    """Run cases of one part, in this process."""
    import jax

    from tests.conformance import driver
    from tests.conformance.harnesses import harness

    found: list[Outcome] = []
    for count, index in enumerate(indices, 1):
        case = harness(index)
        if part == "b":
            found += driver.opened(case, only)
        else:
            found.append(driver.mapped(case, part))
        if count % CLEAR_EVERY == 0:
            jax.clear_caches()
            gc.collect()
    jax.clear_caches()
    gc.collect()
    return found


def _chunks(indices: Sequence[int], size: int) -> list[list[int]]:
    """Chunks of cases from all over the list, so that each takes about as long."""
    count = max(1, -(-len(indices) // size))
    return [list(indices[k::count]) for k in range(count)]


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        max_tasks_per_child=TASKS_PER_PROCESS,
    )


def _in_processes(
    task: Callable[..., Any], chunks: Sequence[list[int]], jobs: int
) -> Iterator[tuple[list[int], Any]]:
    """Results by chunk as they come; ``None`` for a chunk of one case that kills its process."""
    waiting = list(chunks)
    careful: list[list[int]] = []
    with _pool(jobs) as pool:
        futures: dict[Future[Any], list[int]] = {pool.submit(task, c): c for c in waiting}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool:
                careful.append(futures[future])
    while careful:
        chunk = careful.pop()
        try:
            with _pool(1) as pool:
                result = pool.submit(task, chunk).result()
        except BrokenProcessPool:
            if len(chunk) == 1:
                yield chunk, None
            half = len(chunk) // 2
            careful += [c for c in (chunk[:half], chunk[half:]) if c and len(chunk) > 1]
            continue
        yield chunk, result


def distinct(indices: Sequence[int], jobs: int) -> list[int]:
    """Leave out cases that are the same program on the same values as an earlier one."""
    prints: dict[int, str | None] = {}
    for chunk, found in _in_processes(_fingerprints, _chunks(indices, 200), jobs):
        prints.update(zip(chunk, found or [None] * len(chunk), strict=True))
    first: dict[str | None, int] = {}
    return [i for i in indices if prints[i] is None or first.setdefault(prints[i], i) == i]


class _Part:
    """`run_cases` of one part, as a task that another process can be sent."""

    def __init__(self, part: str, only: str) -> None:
        self.part = part
        self.only = only

    def __call__(self, indices: Sequence[int]) -> list[Outcome]:
        return run_cases(self.part, indices, self.only)


def sweep(
    part: str,
    *,
    contains: Sequence[str] = (),
    sample: int | None = None,
    seed: int = 0,
    only: str = "",
    jobs: int = 2,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Run JAX's cases.

    Args:
        part: ``a``, ``b`` or ``g``.
        contains: Only cases whose name contains one of these.
        sample: Only this many.
        seed: Of the sample.
        only: Open only these axes.
        jobs: How many processes; 0 runs in this one.
        progress: Told how many cases are done, of how many, and all outcomes so far.

    Returns:
        The outcomes in the order of JAX's list.
    """
    from tests.conformance.harnesses import selection

    indices = selection(contains=contains, sample=sample, seed=seed)
    if jobs == 0:
        return run_cases(part, indices, only)
    if len(indices) > CHUNK:
        indices = distinct(indices, jobs)
    found: list[tuple[int, list[Outcome]]] = []
    done = 0
    flat: list[Outcome] = []
    for chunk, outcomes in _in_processes(_Part(part, only), _chunks(indices, CHUNK), jobs):
        if outcomes is None:
            name, primitive = _name(chunk[0])
            outcomes = [Outcome(name, primitive, part, "", ERROR, "the process died")]
        done += len(chunk)
        found.append((chunk[0], outcomes))
        flat += outcomes
        if progress is not None:
            progress(done, len(indices), flat)
    return [o for _, outcomes in sorted(found, key=lambda f: f[0]) for o in outcomes]
