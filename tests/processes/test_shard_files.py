"""Executables of all shards are kept in files, which all processes of a later job load."""

import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bucketjit import BucketedExec
from tests.comparison import assert_close
from tests.processes.launch import run_processes
from tests.processes.test_shards import WEIGHTS, bucketed, given, step, step_alone


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
        assert_close((w, loss), (exact, exact_loss), 1e-4)
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


# --- arrays on the devices of several processes, which are served where they need no padding ---


def global_arrays(rank: int) -> dict[str, Any]:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))

    def spread(n: int) -> jax.Array:
        rows = np.arange(n * 3, dtype=np.float32).reshape(n, 3)
        placed = NamedSharding(mesh, P("d"))
        return jax.make_array_from_callback(rows.shape, placed, lambda index: rows[index])

    mean = BucketedExec(lambda x: x.mean(0), dynamic_axes="n, _").with_pow2()
    scaled = BucketedExec(lambda x, y: (x * 2, y * 1), dynamic_axes=("n, _", "m")).with_pow2()
    found: dict[str, Any] = {"fits": np.asarray(mean(spread(8))).tolist()}
    for name, call in {
        "padded": lambda: mean(spread(6)),
        "explained": lambda: mean.explain(spread(6)),
        "other axis": lambda: scaled(spread(8), np.ones(3, np.float32)),
    }.items():
        try:
            found[name] = str(call())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    found["afterwards"] = [mean(spread(8)).shape, mean(np.ones((3, 3), np.float32)).tolist()]
    both = scaled(spread(8), np.ones(4, np.float32))
    found["two axes"] = [x.shape for x in both]
    return found


def test_a_global_array_that_needs_padding_is_refused_by_name() -> None:
    first, second = [x.result for x in run_processes(global_arrays, 2)]
    assert first == second
    assert first["fits"] == np.arange(24, dtype=np.float32).reshape(8, 3).mean(0).tolist()
    refusal = "x: an array of shape (6, 3) on the devices of several processes cannot be padded to"
    for name in ("padded", "explained"):
        assert first[name].startswith(f"ArgumentError: {refusal} (8, 3)")
        assert ".with_processes(mesh, axis)" in first[name]
    assert "would have to be cut to n=8, m=3" in first["other axis"]
    assert first["afterwards"] == [[3], [1, 1, 1]]
    assert first["two axes"] == [[8, 3], [4]]
