"""Groups, executables, what runs one by one, keys, statistics, threads, files, background."""

from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec, Fallback, strategies
from bucketjit.errors import CompileBudgetError, FallbackError, FallbackWarning, SpecError
from tests.comparison import assert_close, in_threads

F32 = np.float32


def ones(*lengths: int) -> list[np.ndarray]:
    return [np.ones(n, F32) for n in lengths]


# --- guards and groups ---


def test_ten_thousand_rows() -> None:
    lengths = np.random.default_rng(1).integers(1, 65, 10_000)
    executor = BucketedExec(lambda x: x.sum(), dynamic_axes="n").with_pow2(min=16)
    examples = (np.ones(n, F32) for n in lengths)
    got = executor.map(examples, out="numpy")
    assert np.array_equal(np.stack(got), lengths.astype(F32))
    assert executor.stats().rows == 10_000 and executor.cache_size() <= 9


def test_a_generator_is_taken_in_parts() -> None:
    alive: list[int] = []
    executor = BucketedExec(lambda x: x.sum(), dynamic_axes="n").with_pow2(min=1024)

    def stream() -> Any:
        for i in range(300):
            alive.append(executor.stats().rows)
            yield np.full(1024, i, F32)

    got = executor.map(stream(), out="numpy")
    assert [float(x) for x in got] == [1024.0 * i for i in range(300)]
    assert alive[0] == 0 and 0 < alive[-1] < 300  # some ran before the last was read


def test_a_variable_called_rows() -> None:
    executor = BucketedExec(lambda x: x.sum(), dynamic_axes="rows").with_pow2()
    assert [float(x) for x in executor.map(ones(3, 5))] == [3, 5]
    assert {b.sizes["rows_"] for b in executor.stats().buckets} == {1}


@pytest.mark.parametrize(
    "make",
    [
        lambda ex: ex,
        lambda ex: ex.with_strategy(strategies.Linear(6)),
        lambda ex: ex.with_strategy(strategies.fit([3, 9, 17], buckets=2)),
        lambda ex: ex.with_pow2(max=8).with_overflow("extend"),
    ],
)
def test_strategies(make: Any) -> None:
    executor = make(BucketedExec(lambda x: jnp.cumsum(x)[-1], dynamic_axes="n"))
    assert [float(x) for x in executor.map(ones(3, 9, 17, 3))] == [3, 9, 17, 3]


# --- one by one ---


def test_effects_run_one_by_one() -> None:
    seen: list[float] = []

    def fn(x: Any) -> Any:
        jax.debug.callback(lambda total: seen.append(float(total)), x.sum())
        return x * 2

    executor = BucketedExec(fn, dynamic_axes="n").with_pow2()
    with pytest.warns(FallbackWarning, match=r"fn\.map runs one example at a time: .*effects"):
        got = executor.map(ones(3, 5, 2))
    jax.effects_barrier()
    assert [len(x) for x in got] == [3, 5, 2] and sorted(seen) == [2, 3, 5]
    assert sum(executor.stats().rows_alone.values()) == 3 and executor.stats().rows == 0
    executor.map(ones(3))  # warns once
    assert sum(executor.stats().rows_alone.values()) == 4


def test_refused_programs_run_one_by_one() -> None:
    exported = jax.export.export(jax.jit(jnp.sort))(
        jax.ShapeDtypeStruct(jax.export.symbolic_shape("k"), F32)
    )
    executor = BucketedExec(lambda x: exported.call(x), dynamic_axes="n").with_pow2()
    examples = [np.arange(n, 0, -1).astype(F32) for n in (3, 5, 2)]
    with pytest.warns(FallbackWarning, match="call_exported"):
        got = executor.map(examples)
    assert [x.tolist() for x in got] == [np.sort(x).tolist() for x in examples]
    assert executor.stats().fallback_calls == 3


def test_a_callback_without_a_rule_for_batches() -> None:
    def fn(x: Any) -> Any:
        return jax.pure_callback(lambda y: y + 1, jax.ShapeDtypeStruct((), np.dtype(F32)), x.sum())

    executor = BucketedExec(fn, dynamic_axes="n").with_pow2()
    with pytest.warns(FallbackWarning, match="one example at a time"):
        assert [float(x) for x in executor.map(ones(3, 5))] == [4, 6]
    assert sum(executor.stats().rows_alone.values()) == 2


def test_results_of_computed_sizes_run_one_by_one() -> None:
    executor = BucketedExec(lambda x: x[x > 1], dynamic_axes="n").with_pow2()
    examples = [np.arange(n, dtype=F32) for n in (3, 6, 2)]
    with pytest.warns(FallbackWarning, match="depend on sizes that it computes"):
        got = executor.map(examples)
    assert [x.tolist() for x in got] == [[2], [2, 3, 4, 5], []]


def test_errors_in_place_of_fallbacks() -> None:
    executor = BucketedExec(lambda x: x[x > 1], dynamic_axes="n", fallback=Fallback.ERROR)
    executor = executor.with_pow2()
    with pytest.raises(FallbackError, match="^example 0: .*sizes that it computes"):
        executor.map(ones(3))

    def short_is_refused(x: Any) -> Any:
        return x * 2 if x.shape[0] > 3 else jax.export.export(jax.jit(jnp.sort))(x).call(x)

    executor = BucketedExec(short_is_refused, dynamic_axes="n", fallback=Fallback.ERROR)
    executor = executor.with_pow2(min=8)
    with pytest.raises(FallbackError, match="call_exported"):  # found when it is built
        executor.map(ones(5, 6, 2))


def test_empty_examples_and_examples_without_sizes() -> None:
    executor = BucketedExec(lambda x: x.sum(), dynamic_axes="n").with_pow2()
    assert [float(x) for x in executor.map(ones(3, 0, 2))] == [3, 0, 2]
    closed = BucketedExec(lambda x, y: x.sum() + y, dynamic_axes=("n", None)).with_pow2()
    with pytest.warns(FallbackWarning, match="no axis of the lists of examples is open"):
        got = BucketedExec(lambda y: y * 2, dynamic_axes=(None,)).map(ones(1, 1), in_axes=0)
    assert [x.tolist() for x in got] == [[2], [2]]
    got = closed.map(ones(3)[0], ones(1, 1), in_axes=(None, 0))
    assert [x.tolist() for x in got] == [[4], [4]]


# --- random keys ---


def noisy(key: Any, x: Any) -> Any:
    dropped = jax.random.bernoulli(key, 0.5, x.shape)
    noise = jax.random.normal(jax.random.split(key)[0], x.shape)
    return x * dropped + noise, jax.random.permutation(key, x), jax.random.fold_in(key, 3)


@pytest.mark.parametrize("typed", [True, False])
def test_a_key_for_each_row(typed: bool) -> None:
    root = jax.random.key(5) if typed else jax.random.PRNGKey(5)
    examples = [np.arange(n, dtype=F32) for n in (3, 9, 5, 3, 16, 1)]
    keys = jax.random.split(root, len(examples))
    executor = BucketedExec(noisy, dynamic_axes=(None, "n")).with_pow2(min=8)
    for given in (keys, list(keys)):
        got = executor.map(given, examples, in_axes=(0, 0))
        for key, x, (noise, order, folded) in zip(keys, examples, got, strict=True):
            want, wanted_order, wanted_key = noisy(key, x)
            np.testing.assert_array_equal(noise, want)
            np.testing.assert_array_equal(order, wanted_order)
            same = jax.random.key_data(folded) if typed else folded
            wanted_words = jax.random.key_data(wanted_key) if typed else wanted_key
            np.testing.assert_array_equal(same, wanted_words)
    assert executor.stats().rows == 12


def test_generators_that_draw_by_batch_run_one_by_one() -> None:
    key = jax.random.key(1, impl="rbg")
    executor = BucketedExec(lambda k, x: x + jax.random.normal(k, ()), dynamic_axes=(None, "n"))
    executor = executor.with_pow2()
    with pytest.warns(FallbackWarning, match="rbg"):
        got = executor.map(key, ones(3, 5))
    for result, x in zip(got, ones(3, 5), strict=True):
        np.testing.assert_array_equal(result, x + jax.random.normal(key, ()))


# --- statistics ---


def test_statistics() -> None:
    executor = BucketedExec(lambda x: x.sum(), dynamic_axes="n").with_pow2(min=8)
    executor.map(ones(3, 5, 8, 12))
    stats = executor.stats()
    assert stats.rows == 4 and dict(stats.size_counts["n"]) == {3: 1, 5: 1, 8: 1, 12: 1}
    assert {tuple(b.sizes.items()) for b in stats.buckets} == {
        (("rows", 4), ("n", 8)),
        (("rows", 1), ("n", 16)),
    }
    assert stats.calls == 2 and stats.compiles == 2
    assert stats.padding_waste == pytest.approx(1 - 28 / 48)
    assert stats.dimension_waste["n"] == pytest.approx(1 - 28 / 48)
    assert '"rows": 4' in stats.to_json()


def test_maxsize_and_clear() -> None:
    executor = BucketedExec(lambda x: x.sum(), dynamic_axes="n", compile_budget=50)
    executor = executor.with_pow2().with_maxsize(maxsize=2)
    for _ in range(2):
        assert [float(x) for x in executor.map(ones(1, 3, 6, 12))] == [1, 3, 6, 12]
    assert executor.cache_size() == 2 and executor.stats().evictions
    executor.cache_clear()
    assert executor.stats().rows == 0
    assert [float(x) for x in executor.map(ones(2))] == [2]


def test_the_compile_budget_holds() -> None:
    executor = BucketedExec(lambda x: x.sum(), dynamic_axes="n", compile_budget=1).with_pow2()
    assert [float(x) for x in executor.map(ones(3, 4))] == [3, 4]
    with pytest.raises(CompileBudgetError):
        executor.map(ones(9))
    assert [float(x) for x in executor.map(ones(3, 4))] == [3, 4]


def test_single_calls_and_rows_share_programs_not_executables() -> None:
    executor = BucketedExec(lambda x: x.sum(), dynamic_axes="n").with_pow2(min=8)
    assert float(executor(np.ones(3, F32))) == 3
    assert [float(x) for x in executor.map(ones(3))] == [3]
    assert float(executor(np.ones(5, F32))) == 5
    assert len(executor.stats().programs) == 1 and executor.cache_size() == 2


# --- threads, background, files ---


def test_threads() -> None:
    executor = BucketedExec(lambda x: jnp.sort(x), dynamic_axes="n").with_pow2(min=4)

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(5):
            examples = [random.random(n).astype(F32) for n in random.integers(1, 20, 12)]
            for x, got in zip(examples, executor.map(examples), strict=True):
                np.testing.assert_array_equal(got, np.sort(x))

    in_threads(work, range(4))
    assert executor.stats().rows == 4 * 5 * 12


def test_background_compiles() -> None:
    executor = BucketedExec(lambda x: x.sum(), dynamic_axes="n").with_pow2(min=4)
    executor = executor.with_background_compile()
    executor.map(ones(*[16] * 8), token_budget=128)
    # The batch of 8 rows of up to 16 stands in for one of 2 rows of up to 4.
    assert [float(x) for x in executor.map(ones(3, 4), token_budget=128)] == [3, 4]
    assert executor.wait_for_compiles(60)
    assert [float(x) for x in executor.map(ones(3, 4), token_budget=128)] == [3, 4]
    assert {"rows": 2, "n": 4} in [dict(b.sizes) for b in executor.stats().buckets]


def test_files(tmp_path: Path) -> None:
    def fn(w: Any, x: Any) -> Any:
        return {"a": jnp.sort(x * w), "b": x.sum()}

    def executor() -> BucketedExec:
        made = BucketedExec(fn, dynamic_axes=(None, "n")).with_pow2(min=4)
        return made.with_persistence(tmp_path)

    examples = [np.arange(n, 0, -1).astype(F32) for n in (3, 5, 4, 8)]
    first, again = executor(), executor()
    w = np.float32(2)
    wanted = first.map(w, examples)
    got = again.map(w, examples)
    assert first.stats().compiles == 2 and again.stats().compiles == 0 and again.stats().loads == 2
    for one, other, x in zip(wanted, got, examples, strict=True):
        np.testing.assert_array_equal(one["a"], 2 * np.sort(x))
        np.testing.assert_array_equal(one["a"], other["a"])
        assert float(one["b"]) == float(other["b"])
    # Shared and mapped arguments of one shape are other executables.
    scales = [np.float32(i) for i in range(4)]
    mapped = executor().map(scales, examples, in_axes=(0, 0))
    for scale, x, row in zip(scales, examples, mapped, strict=True):
        np.testing.assert_array_equal(row["a"], np.sort(scale * x))


def test_copies_of_inputs() -> None:
    executor = BucketedExec(lambda x: x * 2, dynamic_axes="n", copy_inputs=True).with_pow2()
    examples = ones(4, 4)
    got = executor.map(examples)
    for x in examples:
        x[...] = 0
    assert [x.tolist() for x in got] == [[2.0] * 4] * 2


# --- warm-up and explanations ---


def test_nothing_is_compiled_after_a_warmup() -> None:
    executor = BucketedExec(lambda w, x: (w * x).sum(), dynamic_axes=(None, "n")).with_pow2(min=4)
    like = jax.ShapeDtypeStruct((4,), F32)
    told = executor.warmup(F32(1), like, sizes={"n": range(1, 17)}, rows=[1, 3, 16], progress=False)
    assert len(told.compiled) == 9 and {b["rows"] for b in told.compiled} == {1, 4, 16}
    random = np.random.default_rng(0)
    with executor.forbid_compiles():
        for _ in range(20):
            examples = ones(*random.integers(1, 17, random.integers(1, 60)))
            got = executor.map(F32(2), examples)
            assert [float(x) for x in got] == [2.0 * len(x) for x in examples]
    assert executor.stats().compiles == 9
    again = executor.warmup(F32(1), like, sizes={"n": 3}, rows=4, progress=False)
    assert [dict(b) for b in again.present] == [{"rows": 4, "n": 4}]


def test_other_row_counts_are_compiled_where_none_was_asked_for() -> None:
    executor = BucketedExec(lambda x: x.sum(), dynamic_axes="n").with_pow2(min=4)
    executor.warmup(jax.ShapeDtypeStruct((4,), F32), rows=2, progress=False)
    executor.map(ones(*[4] * 9, 7))
    sizes = [(b.sizes["rows"], b.sizes["n"]) for b in executor.stats().buckets]
    assert sizes == [(2, 4), (1, 8)]


def test_nothing_can_be_compiled_any_more() -> None:
    executor = BucketedExec(lambda x: x.sum(), dynamic_axes="n", compile_budget=1).with_pow2(min=4)
    executor.map(ones(3, 4))
    assert [float(x) for x in executor.map(ones(*[3] * 7))] == [3] * 7


@pytest.mark.parametrize("rows", [0, -1, "4", [], [2, 0], 2.5, True])
def test_wrong_rows(rows: Any) -> None:
    executor = BucketedExec(lambda x: x.sum(), dynamic_axes="n").with_pow2()
    with pytest.raises(SpecError, match="warmup: rows"):
        executor.warmup(np.ones(3, F32), rows=rows)


def test_explanations() -> None:
    executor = BucketedExec(lambda w, x: (w * x).sum(), dynamic_axes=(None, "n")).with_pow2(min=8)
    examples = ones(3, 5, 8, 12, 0)
    told = executor.explain_map(F32(1), examples)
    assert executor.stats().calls == 0 and executor.stats().compiles == 0
    assert told.mapped == ("x",) and told.shared == ("w",) and told.examples == 5
    assert [(dict(g.bucket), g.examples, g.batches) for g in told.groups] == [
        ({"n": 8}, 3, (4,)),
        ({"n": 16}, 1, (1,)),
    ]
    assert [g.missing for g in told.groups] == [(4,), (1,)]
    assert dict(told.alone) == {"an axis of size 0 has no bucket": 1}
    executor.map(F32(1), examples[:4])
    assert executor.stats().padding_waste == pytest.approx(told.padding_waste)
    again = executor.explain_map(F32(1), examples[:4])
    assert [g.missing for g in again.groups] == [(), ()]
    assert "n=8: 3 examples in 1 x 4 rows" in str(again)


# --- plans ---


def test_events_name_the_rows() -> None:
    seen: list[Any] = []
    executor = BucketedExec(lambda x: x.sum(), dynamic_axes="n").with_on_event(seen.append)
    executor.with_pow2(min=8).map(ones(3, 5, 8))
    compiled = [event for event in seen if event.kind == "compile"]
    assert [dict(event.sizes) for event in compiled] == [{"rows": 4, "n": 8}]


def test_a_loop_has_no_step_in_a_small_bucket(tmp_path: Path) -> None:
    def advantages(r: Any) -> Any:
        both = (r[1:], r[:-1])
        return jax.lax.scan(lambda g, z: (z[0] - z[1] + g / 2,) * 2, 0.0, both, reverse=True)

    rows = [np.arange(1.0, n + 1, dtype=np.float32) for n in (1, 2, 3, 1, 4)]
    want = list(map(jax.jit(advantages), rows))
    fn = bucketjit.jit(advantages, dynamic_axes="n", buckets="pow2", fallback="error")
    fn.save(tmp_path / "fn.bkt", rows[0], sizes={"n": [1, 4]})
    loaded = bucketjit.load(tmp_path / "fn.bkt")
    for got in (list(map(fn, rows)), list(map(loaded, rows)), fn.map(rows)):
        assert_close(got, want, 1e-6)
    # Those of the calls, and those of `map`, which has the rows of one bucket in one batch.
    assert fn.stats().compiles == fn.cache_size() == 6
