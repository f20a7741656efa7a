"""Run many cases, in processes that can be thrown away."""

import functools
import gc
from collections.abc import Callable, Sequence

from tests.conformance.outcome import ERROR, Outcome
from tests.isolated import run_isolated

CHUNK = 128
CLEAR_EVERY = 8

Progress = Callable[[int, int, Sequence[Outcome]], None]


def _fingerprints(indices: Sequence[int], any_dtype: bool) -> list[str | None]:
    from tests.conformance.harnesses import fingerprint

    return [fingerprint(i, any_dtype=any_dtype) for i in indices]


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
    count = -(-len(indices) // size)
    return [list(indices[k::count]) for k in range(count)]


def distinct(indices: Sequence[int], jobs: int, any_dtype: bool) -> list[int]:
    """Leave out cases that are the same program on the same values as an earlier one."""
    prints: dict[int, str | None] = {}
    task = functools.partial(_fingerprints, any_dtype=any_dtype)
    for chunk, found in run_isolated(task, _chunks(indices, 1000), jobs):
        prints.update(zip(chunk, found or [None] * len(chunk), strict=True))
    first: dict[str | None, int] = {}
    return [i for i in indices if prints[i] is None or first.setdefault(prints[i], i) == i]


def _run_part(indices: Sequence[int], part: str, only: str) -> list[Outcome]:
    return run_cases(part, indices, only)


def sweep(
    part: str,
    *,
    contains: Sequence[str] = (),
    sample: int | None = None,
    seed: int = 0,
    only: str = "",
    any_dtype: bool = False,
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
        any_dtype: Leave out cases that differ from an earlier one in dtypes only.
        jobs: How many processes; 0 runs in this one.
        progress: Told how many cases are done, of how many, and all outcomes so far.

    Returns:
        The outcomes in the order of JAX's list.
    """
    from tests.conformance.harnesses import selection

    indices = selection(contains=contains, sample=sample, seed=seed)
    if jobs == 0:
        return run_cases(part, indices, only)
    if any_dtype or len(indices) > 2 * CHUNK:
        indices = distinct(indices, jobs, any_dtype)
    found: list[tuple[int, list[Outcome]]] = []
    done = 0
    flat: list[Outcome] = []
    task = functools.partial(_run_part, part=part, only=only)
    for chunk, outcomes in run_isolated(task, _chunks(indices, CHUNK), jobs):
        if outcomes is None:
            name, primitive = _name(chunk[0])
            outcomes = [Outcome(name, primitive, part, "", ERROR, "the process died")]
        done += len(chunk)
        found.append((chunk[0], outcomes))
        flat += outcomes
        if progress is not None:
            progress(done, len(indices), flat)
    return [o for _, outcomes in sorted(found, key=lambda f: f[0]) for o in outcomes]
