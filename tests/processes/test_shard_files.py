"""Executables of all shards are kept in files, which all processes of a later job load."""

import warnings
from pathlib import Path
from typing import Any

import jax

from tests.processes.launch import run_processes
from tests.processes.test_shards import (
    WEIGHTS,
    bucketed,
    close,
    given,
    step,
    step_alone,
)


def counts(fn: Any) -> list[int]:
    found = fn.stats()
    return [found.compiles, found.loads]


def kept(fn: Any, directory: str) -> Any:
    return fn.with_persistence(directory)


def trained(rank: int, directory: str, donate: bool) -> Any:
    """Steps of two buckets, each fed with the results of the one before."""
    warnings.simplefilter("error")
    options: dict[str, Any] = {"donate_argnums": (0,)} if donate else {}
    stepped = kept(bucketed(step, **options), directory)
    w, exact = jax.numpy.asarray(WEIGHTS), jax.numpy.asarray(WEIGHTS)
    types = set()
    for i, sizes in enumerate(((5, 9), (40, 60), (7, 2), (34, 4))):
        mine, every = given(rank, sizes[: jax.process_count()], seed=10 * i)
        before = w
        w, loss = stepped(w, mine)
        exact, exact_loss = step_alone(exact, every)
        close((w, loss), (exact, exact_loss), 1e-4)
        assert i == 0 or before.is_deleted() == donate
        types.add(str((jax.typeof(w), jax.typeof(loss), w.sharding, w.committed)))
    assert len(types) == 1
    return [*counts(stepped), stepped.cache_size(), types.pop()]


def test_later_jobs_load(tmp_path: Path) -> None:
    def job(count: int, devices: int, donate: bool = False) -> Any:
        outcomes = run_processes(trained, count, str(tmp_path), donate, devices=devices)
        compiles, loads, buckets, types = zip(*(x.result for x in outcomes), strict=True)
        assert len(set(buckets)) == 1 and len(set(types)) == 1
        return sum(compiles), sum(loads), buckets[0], types[0]

    # The number of devices and the processes that have them are in the key.
    for count, devices in ((1, 4), (2, 2)):
        compiles, loads, buckets, types = job(count, devices, donate=count == 2)
        # A process that is late may find what the other has written by then.
        assert compiles >= buckets > 1 and compiles + loads == buckets * count
    assert job(2, 2, donate=True) == (0, 2 * buckets, buckets, types)
