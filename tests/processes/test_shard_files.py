"""Executables of all shards are kept in files, which all processes of a later job load."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax

from tests.processes.launch import run_processes
from tests.processes.test_shards import (
    WEIGHTS,
    bucketed,
    close,
    given,
    on_all_devices,
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


def several_forms(rank: int, directory: str) -> Any:
    """Keys, weak types, rows of results, scalars that are not used, and another mesh."""
    mine, every = given(rank, (5, 9))

    def mixed(key: Any, rate: Any, unused: Any, x: Any) -> Any:
        noise = jax.random.normal(key, (3,)) * rate
        return jax.random.fold_in(key, 1), rate * 0.5, (noise, x * 2, lax.psum(x.shape[0], "d"))

    fn = kept(bucketed(mixed, dynamic_axes=(None, None, None, "b, _")), directory)
    key, rate, (noise, doubled, count) = fn(jax.random.key(3), 0.5, 7, mine)
    close((noise, doubled), (jax.random.normal(jax.random.key(3), (3,)) * 0.5, mine * 2), 1e-5)
    assert (
        jax.random.key_data(key).tolist()
        == jax.random.key_data(jax.random.fold_in(jax.random.key(3), 1)).tolist()
    )
    assert (float(rate), rate.weak_type, int(count)) == (0.25, True, len(every))
    fn(key, rate, 8, mine)  # results are taken as they are
    turned = jax.sharding.Mesh(on_all_devices().devices[::-1], ("d",))
    other = kept(bucketed(mixed, turned, dynamic_axes=(None, None, None, "b, _")), directory)
    close(other(jax.random.key(3), 0.5, 7, mine)[2][1], mine * 2)
    return [*counts(fn), *counts(other)]


def test_what_a_file_depends_on(tmp_path: Path) -> None:
    for fewest in (1, 0):
        found = [x.result for x in run_processes(several_forms, 2, str(tmp_path))]
        for compiles, loads in np.sum(found, 0).reshape(2, 2).tolist():
            assert compiles + loads == 2 and (compiles >= fewest if fewest else compiles == 0)
