"""`warmup` without sizes loads what the directory of executables has."""

from typing import Any

import jax.numpy as jnp
import numpy as np

import bucketjit
from bucketjit import BucketedExec


def _ones(n: int, dtype: Any = np.float32) -> Any:
    return np.ones((n, 2), dtype)


def test_every_bucket_of_the_program_is_loaded(tmp_path: Any) -> None:
    def fn(x: Any) -> Any:
        return (x * 3).sum(0)

    first = BucketedExec(fn, dynamic_axes="n, _").with_pow2().with_persistence(tmp_path)
    for n in (3, 9, 30):
        first(_ones(n))
    first(_ones(5, np.int32))  # another program
    other = BucketedExec(lambda x: x * 2, dynamic_axes="n, _").with_pow2()
    other.with_persistence(tmp_path)(_ones(100))

    again = first.with_persistence(tmp_path)
    report = again.warmup(_ones(3), progress=False)
    assert report.loaded == 3
    assert [b["n"] for b in report.compiled] == [32, 16, 4]
    assert again.warmup(_ones(3), progress=False).compiled == ()
    assert again.stats().compiles == 0
    with again.forbid_compiles():
        np.testing.assert_array_equal(again(_ones(12)), [36, 36])


def test_without_a_directory_the_example_alone_is_compiled() -> None:
    fn = BucketedExec(lambda x: x.sum(0), dynamic_axes="n, _").with_pow2()
    assert [b["n"] for b in fn.warmup(_ones(3), progress=False).compiled] == [4]


def test_sizes_may_be_an_array_or_none_at_all() -> None:
    double = bucketjit.jit(lambda x: x * 2, dynamic_axes="n", buckets="pow2")
    report = double.warmup(np.ones(3, np.float32), sizes={"n": jnp.arange(1, 9)}, progress=False)
    assert [dict(bucket) for bucket in report.compiled] == [{"n": n} for n in (8, 4, 2, 1)]
    assert bucketjit.jit(lambda: jnp.ones(3)).warmup(sizes={}, progress=False).compiled == ({},)
