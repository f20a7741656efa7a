"""Functions whose buckets are learnt."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec
from bucketjit._runtime.learning.learner import Learner
from bucketjit.errors import SpecError
from bucketjit.strategies import Auto
from tests.comparison import assert_close, buckets, in_threads


def centred(x: Any) -> Any:
    return x - x.mean(0)


def ramp(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def compare(executor: Any, fn: Any, *args: Any) -> None:
    assert_close(executor(*args), jax.jit(fn)(*args))


@pytest.fixture
def dear_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling costs a second, and so does each element of a bucket."""
    ran, compiled = Learner.ran, Learner.compiled
    monkeypatch.setattr(
        Learner, "ran", lambda self, bucket, _: ran(self, bucket, float(np.prod(bucket)))
    )
    monkeypatch.setattr(Learner, "compiled", lambda self, bucket, _: compiled(self, bucket, 1.0))


def test_the_default_of_jit_learns() -> None:
    executor = bucketjit.jit(centred)
    for n in (60, 60, 13, 60, 65):
        compare(executor, centred, ramp(n, 2))
    assert buckets(executor) == [{"batch": 64}, {"batch": 128}]
    assert "Auto(buckets=20)" in repr(executor)


@pytest.mark.usefixtures("dear_running")
@pytest.mark.parametrize("out", ["jax", "numpy", "padded"])
def test_sizes_that_were_seen_get_better_buckets(out: str) -> None:
    executor = BucketedExec(centred, buckets="auto", out=out)
    compare(executor, centred, ramp(200, 2))
    for _ in range(12):
        for n in (10, 30):
            compare(executor, centred, ramp(n, 2))
    assert {"batch": 10} in buckets(executor) and {"batch": 30} in buckets(executor)
    stats = executor.stats()
    assert stats.compiles == len(stats.buckets) <= 4
    before = [bucket.hits for bucket in stats.buckets]
    compare(executor, centred, ramp(10, 2))  # in its own bucket, though it was served by others
    after = [bucket.hits for bucket in executor.stats().buckets]
    (at,) = (i for i, (m, n) in enumerate(zip(before, after, strict=True)) if n > m)
    assert stats.buckets[at].sizes["batch"] == 10


@pytest.mark.usefixtures("dear_running")
def test_all_calls_are_counted_wherever_they_are_served() -> None:
    executor = bucketjit.jit(centred)
    sizes = np.random.default_rng(0).integers(1, 40, 300)
    for n in sizes:
        executor(ramp(int(n), 2))
    stats = executor.stats()
    assert stats.calls == 300 == sum(bucket.calls for bucket in stats.learnt)
    assert len(stats.buckets) <= 20
    told = str(executor.report())
    assert "Learnt buckets" in told and "would have paid" in told
    executor.cache_clear()
    assert executor.stats().learnt == ()
    compare(executor, centred, ramp(7, 2))
    assert buckets(executor) == [{"batch": 8}]


@pytest.mark.usefixtures("dear_running")
def test_several_variables_and_one_that_is_not_learnt() -> None:
    def product(x: Any, y: Any) -> Any:
        return (x @ y).sum(0)

    rules: Any = {"b": "auto", "s": "auto", "t": [8, 16]}
    executor = bucketjit.jit(product, dynamic_axes=("b, s", "s, t"), buckets=rules)
    random = np.random.default_rng(1)
    for _ in range(60):
        b, s, t = map(int, random.integers(1, (9, 30, 17)))
        x, y = ramp(b, s) / 100, ramp(s, t) / 100
        np.testing.assert_allclose(executor(x, y), (x @ y).sum(0), rtol=2e-5)
    assert {bucket["t"] for bucket in buckets(executor)} == {8, 16}
    assert any(bucket["s"] & (bucket["s"] - 1) for bucket in buckets(executor))


@pytest.mark.usefixtures("dear_running")
def test_buckets_keep_the_guards_of_a_program() -> None:
    def halves(x: Any) -> Any:
        return x.reshape(2, -1).sum(0) if len(x) % 2 == 0 else x.sum(0)

    executor = bucketjit.jit(halves, dynamic_axes="n")
    for n in np.random.default_rng(2).integers(1, 60, 24):
        compare(executor, halves, ramp(int(n)))


@pytest.mark.usefixtures("dear_running")
def test_gradients_and_map() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w).mean()

    executor = bucketjit.jit(loss, dynamic_axes=(None, "n, _"))
    slope = bucketjit.jit(jax.grad(loss), dynamic_axes=(None, "n, _"))
    w, random = np.ones(2, np.float32) / 9, np.random.default_rng(3)
    for n in map(int, random.integers(1, 40, 14)):
        x = ramp(n, 2) / n
        compare(executor, loss, w, x)
        compare(slope, jax.grad(loss), w, x)
        compare(jax.grad(executor), jax.grad(loss), w, x)
    rows = [ramp(n, 2) / n for n in (3, 9, 30, 5)]
    for one, x in zip(executor.map(w, rows), rows, strict=True):
        np.testing.assert_allclose(one, loss(w, x), rtol=1e-5)


def test_explain_foretells_the_bucket_and_compiles_nothing() -> None:
    executor = bucketjit.jit(centred)
    told = executor.explain(ramp(5, 2))
    assert dict(told.bucket) == {"batch": 8} and told.why == "no bucket held a call"
    assert "why this bucket: no bucket held a call" in str(told)
    assert executor.cache_size() == 0
    compare(executor, centred, ramp(5, 2))
    compare(executor, centred, ramp(9, 2))
    assert buckets(executor) == [{"batch": 8}, {"batch": 16}]
    assert len(executor.stats().programs) == 1
    assert not bucketjit.jit(centred, buckets="pow2").explain(ramp(5, 2)).why


def test_the_next_process_starts_with_the_buckets(tmp_path: Path) -> None:
    first = bucketjit.jit(centred).with_persistence(tmp_path)
    for n in (60, 70):
        compare(first, centred, ramp(n, 2))
    later = bucketjit.jit(centred).with_persistence(tmp_path)
    for n in (3, 61, 65, 128):
        compare(later, centred, ramp(n, 2))
    assert buckets(later) == [{"batch": 64}, {"batch": 128}]
    assert (later.stats().compiles, later.stats().loads) == (0, 2)
    assert later.explain(ramp(3, 2)).why == "read from a file"


@pytest.mark.usefixtures("dear_running")
def test_a_budget_that_is_spent_and_a_cache_that_is_full() -> None:
    executor = bucketjit.jit(centred)
    compare(executor, centred, ramp(100, 2))
    with executor.forbid_compiles():
        for n in (3, 5) * 20:
            compare(executor, centred, ramp(n, 2))
    assert buckets(executor) == [{"batch": 128}]
    small = bucketjit.jit(centred, maxsize=2)
    for n in np.random.default_rng(4).integers(1, 90, 60):
        compare(small, centred, ramp(int(n), 2))
    assert small.cache_size() == 2


@pytest.mark.usefixtures("dear_running")
def test_in_the_background_a_larger_bucket_stands_in() -> None:
    executor = bucketjit.jit(centred).with_background_compile()
    compare(executor, centred, ramp(100, 2))
    for n in (3, 5, 7) * 8:
        compare(executor, centred, ramp(n, 2))
    assert executor.wait_for_compiles(60)
    for n in (3, 5, 7) * 2:
        compare(executor, centred, ramp(n, 2))
    assert min(bucket["batch"] for bucket in buckets(executor)) < 8


@pytest.mark.usefixtures("dear_running")
def test_threads() -> None:
    executor = bucketjit.jit(centred)

    def work(seed: int) -> None:
        for n in np.random.default_rng(seed).integers(1, 50, 60):
            x = ramp(int(n), 2)
            np.testing.assert_allclose(executor(x), x - x.mean(0), rtol=1e-5, atol=1e-4)

    in_threads(work, range(4))
    assert len(buckets(executor)) <= 24


def test_where_nothing_is_learnt_buckets_are_powers_of_two(tmp_path: Path) -> None:
    executor = bucketjit.jit(centred)
    report = executor.warmup(ramp(3, 2), sizes={"batch": [3, 5, 7]})
    assert [dict(sizes) for sizes in report.compiled] == [{"batch": 8}, {"batch": 4}]
    executor.save(tmp_path / "saved", ramp(3, 2), sizes={"batch": [3, 11]})
    loaded = bucketjit.load(tmp_path / "saved")
    compare(loaded, centred, ramp(9, 2))
    assert buckets(loaded) == [{"batch": 16}]


def test_malformed_buckets() -> None:
    with pytest.raises(SpecError, match="expected one of .'auto', 'exact', 'pow2'."):
        bucketjit.jit(centred, buckets="automatic")  # type: ignore[arg-type]
    assert bucketjit.jit(centred, buckets=Auto(3)).cache_size() == 0


@pytest.mark.usefixtures("dear_running")
@pytest.mark.parametrize("reduce", [None, "sum"])
def test_map_begins_with_one_bucket_and_learns_others(reduce: str | None) -> None:
    def scaled(w: Any, x: Any) -> Any:
        return jnp.tanh(x * w).sum(0)

    executor = bucketjit.jit(scaled, dynamic_axes=(None, "n, _"))
    w, sizes = (
        np.ones(2, np.float32),
        [int(n) for n in np.random.default_rng(6).integers(1, 99, 64)],
    )
    rows = [ramp(n, 2) / n for n in sizes]
    told = executor.explain_map(w, rows, reduce=reduce)
    (group,) = told.groups
    assert dict(group.bucket) == {"n": 128} and max(sizes) > 64
    for _ in range(2):
        got = executor.map(w, rows, reduce=reduce)
        want = [np.tanh(x * w).sum(0) for x in rows]
        np.testing.assert_allclose(got, want if reduce is None else sum(want), rtol=1e-5)
        assert max(bucket["n"] for bucket in buckets(executor)) == 128
    assert 3 <= len({bucket["n"] for bucket in buckets(executor)}) <= 20
    assert sum(bucket.calls for bucket in executor.stats().learnt) == 128
    assert executor.stats().rows == 128


def test_what_was_warmed_up_is_used() -> None:
    executor = bucketjit.jit(centred)
    executor.warmup(ramp(100, 2), sizes={"batch": [16, 128]})
    for n in (100, 10, 10):
        compare(executor, centred, ramp(n, 2))
    assert {b.sizes["batch"]: b.hits for b in executor.stats().buckets} == {16: 2, 128: 1}
    assert executor.warmup(ramp(100, 2), sizes={"batch": [8]}).compiled == ({"batch": 8},)


@pytest.mark.usefixtures("dear_running")
def test_no_call_fails_for_a_better_bucket_that_the_budget_forbids() -> None:
    executor = bucketjit.jit(centred, compile_budget=2)
    compare(executor, centred, ramp(200, 2))
    for n in (10, 30, 90) * 20:
        compare(executor, centred, ramp(n, 2))
    assert executor.stats().compiles == 2
