"""Run many cases, in processes that can be thrown away."""

import functools
import gc
from collections.abc import Callable, Sequence

from tests.conformance.outcome import ERROR, Outcome
from tests.isolated import run_isolated

CHUNK = 128
CLEAR_EVERY = 8

Progress = Callable[[int, int, Sequence[Outcome]], None]


def _fingerprints(indices: Sequence[int]) -> list[str | None]:
    from tests.conformance.harnesses import fingerprint

    return [fingerprint(i) for i in indices]


def run_cases(indices: Sequence[int], part: str, only: str = "") -> list[Outcome]:
    """Run cases of one part, in this process."""
    import jax

    from tests.conformance import driver
    from tests.conformance.harnesses import harness

    outcomes: list[Outcome] = []
    for count, index in enumerate(indices, 1):
        case = harness(index)
        outcomes += driver.opened(case, only) if part == "b" else [driver.mapped(case, part)]
        if count % CLEAR_EVERY == 0 or count == len(indices):
            jax.clear_caches()
            gc.collect()
    return outcomes


def _chunks(indices: Sequence[int], size: int) -> list[list[int]]:
    """Chunks of cases from all over the list, so that each takes about as long."""
    count = -(-len(indices) // size)
    return [list(indices[k::count]) for k in range(count)]


def _distinct(indices: Sequence[int], jobs: int) -> list[int]:
    """Leave out cases that are the same program on the same values as an earlier one."""
    prints: dict[int, str | None] = {}
    for chunk, texts in run_isolated(_fingerprints, _chunks(indices, 1000), jobs):
        prints.update(zip(chunk, texts or [None] * len(chunk), strict=True))
    first: dict[str | None, int] = {}
    return [i for i in indices if prints[i] is None or first.setdefault(prints[i], i) == i]


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
    from tests.conformance.harnesses import load, selection

    indices = selection(contains=contains, sample=sample, seed=seed)
    if jobs == 0:
        return run_cases(indices, part, only)
    if len(indices) > 2 * CHUNK:
        indices = _distinct(indices, jobs)
    by_chunk: dict[int, list[Outcome]] = {}
    done = 0
    task = functools.partial(run_cases, part=part, only=only)
    for chunk, outcomes in run_isolated(task, _chunks(indices, CHUNK), jobs):
        if outcomes is None:
            case = load()[chunk[0]]
            died = Outcome(case.fullname, case.group_name, part, "", ERROR, "the process died")
            outcomes = [died]
        done += len(chunk)
        by_chunk[chunk[0]] = outcomes
        if progress is not None:
            progress(done, len(indices), [o for some in by_chunk.values() for o in some])
    return [o for _, outcomes in sorted(by_chunk.items()) for o in outcomes]
