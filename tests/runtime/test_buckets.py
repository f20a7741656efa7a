"""Sizes beyond the largest bucket: an error, the next bucket, the exact size, or chunks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec, Check, Overflow, Padded, strategies
from bucketjit.errors import BucketOverflowError, SpecError, SplitError
from bucketjit.types import Event
from tests.comparison import assert_like_jit, assert_same, ramp


def rows(x: Any) -> Any:
    return jnp.sum(jnp.exp(x), axis=1)


def total(x: Any) -> Any:
    return jnp.sum(x * x)


def buckets(executor: Any) -> list[dict[str, int]]:
    return [dict(b.sizes) for b in executor.stats().buckets]


# --- the policies ------------------------------------------------------------------------------


def test_it_is_an_error_by_default() -> None:
    for executor in (
        BucketedExec(total).with_pow2(max=8),
        BucketedExec(total).with_pow2(max=8, overflow="exact").with_overflow(Overflow.ERROR),
    ):
        with pytest.raises(BucketOverflowError, match="'batch' has size 9, beyond .* 8"):
            executor(ramp(9))


@pytest.mark.parametrize("policy", ["extend", Overflow.EXTEND])
@pytest.mark.parametrize(
    ("strategy", "n", "bucket"),
    [
        (strategies.Pow2(max=8), 9, 16),
        (strategies.Boundaries([3, 6]), 7, 12),
        (strategies.fit([2, 4], buckets=1), 9, 16),
        (strategies.Exponential(1.5, max=4), 5, 6),
    ],
    ids=lambda x: type(x).__name__,
)
def test_extend(policy: Any, strategy: Any, n: int, bucket: int) -> None:
    executor = BucketedExec(total, dynamic_axes="n").with_strategy(strategy).with_overflow(policy)
    assert_like_jit(executor, total, ramp(2))
    assert_like_jit(executor, total, ramp(n))
    assert buckets(executor)[-1] == {"n": bucket}
    told = executor.explain(ramp(n))
    assert dict(told.bucket) == {"n": bucket} and told.compiled


def test_exact_leaves_the_size_as_it_is_and_counts(xla_compiles: Callable[[], int]) -> None:
    executor = BucketedExec(total).with_pow2(max=8, overflow="exact")
    x = ramp(9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = executor(x)
        compiled = xla_compiles()
        for _ in range(3):  # by the warm path
            np.testing.assert_array_equal(executor(x), first)
        assert xla_compiles() == compiled
    np.testing.assert_array_equal(first, jax.jit(total)(x))  # bit by bit: nothing is masked
    stats = executor.stats()
    assert (stats.calls, stats.fallback_calls, stats.compiles) == (4, 4, 1)
    (reason,) = stats.fallback_reasons
    assert reason == "the size of batch is beyond its largest bucket 8 (overflow='exact')"
    assert [b.exact for b in stats.buckets] == [True]
    told = executor.explain(x)
    assert (told.kind, told.reason, told.compiled) == ("exact", reason, True)
    executor(ramp(5))
    assert executor.stats().fallback_calls == 4


def test_exact_is_told_once() -> None:
    told: list[Event] = []
    executor = BucketedExec(total).with_pow2(max=8, overflow="exact").with_on_event(told.append)
    for n in (5, 9, 9, 11):
        executor(ramp(n))
    (event,) = [e for e in told if e.kind == "fallback"]
    assert (event.detail, event.sizes) == (
        "the size of batch is beyond its largest bucket 8 (overflow='exact')",
        {"batch": 9},
    )


def test_exact_for_one_variable_only() -> None:
    """The other variable keeps its buckets, so its sizes cost no compiles."""
    executor = (
        BucketedExec(rows, dynamic_axes="b, s")
        .with_pow2("b", max=4, overflow="exact")
        .with_pow2("s", min=8, max=16)
    )
    for s in (3, 8, 5, 8):
        assert_like_jit(executor, rows, ramp(6, s, start=0) / 50)
    assert buckets(executor) == [{"b": 6, "s": 8}]
    assert executor.stats().fallback_calls == 4
    with pytest.raises(BucketOverflowError, match="'s'"):
        executor(ramp(6, 17))
    wholly = executor.with_exact("s")
    assert_like_jit(wholly, rows, ramp(6, 3) / 50)
    assert [b.exact for b in wholly.stats().buckets] == [True]


def test_each_variable_has_its_own_policy() -> None:
    executor = (
        BucketedExec(rows, dynamic_axes="b, s")
        .with_pow2(max=4)
        .with_overflow("extend")
        .with_overflow("split", "b")
    )
    assert_like_jit(executor, rows, ramp(9, 5) / 50)
    assert buckets(executor) == [{"b": 4, "s": 8}, {"b": 1, "s": 8}]


def test_builders_take_a_policy_and_keep_it() -> None:
    for build in (
        lambda e: e.with_pow2("b", max=4, overflow="extend"),
        lambda e: e.with_linear(4, "b", max=4, overflow="extend"),
        lambda e: e.with_exponential(2, "b", max=4, overflow="extend"),
        lambda e: e.with_buckets([4], "b", overflow="extend"),
        lambda e: e.with_strategy(strategies.Boundaries([4]), "b", overflow="extend"),
        lambda e: e.with_overflow("extend", "b").with_buckets([4], "b"),
    ):
        executor = build(BucketedExec(total, dynamic_axes="b"))
        assert_like_jit(executor, total, ramp(7))
        assert buckets(executor) == [{"b": 8}]


@pytest.mark.parametrize("policy", ["EXTEND", "grow", None, 3])
def test_there_is_no_other_policy(policy: Any) -> None:
    with pytest.raises(SpecError, match="'error', 'extend', 'exact', 'split', got"):
        BucketedExec(total).with_overflow(policy)


def test_a_policy_is_for_a_variable_there_is() -> None:
    with pytest.raises(SpecError, match="dim must be the name"):
        BucketedExec(total).with_overflow("split", 0)  # type: ignore[arg-type]
    executor = BucketedExec(total, dynamic_axes="n").with_pow2().with_overflow("split", "m")
    with pytest.raises(SpecError, match="an overflow policy for dimension 'm'"):
        executor(ramp(3))


# --- split: what can be -----------------------------------------------------------------------


def floats(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def mlp(x: Any, w: Any) -> Any:
    return jax.nn.softmax(jax.nn.gelu(x @ w) @ w.T), jnp.argmax(x, axis=1)


def cnn(x: Any, k: Any) -> Any:
    y = lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    y = lax.reduce_window(jax.nn.relu(y), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    return y.reshape(x.shape[0], -1)


def attention(x: Any, mask: Any) -> Any:
    q = x.reshape(*x.shape[:2], 2, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, q)
    scores = jnp.where(mask[:, None, None], scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), q).reshape(x.shape)


def embedded(tokens: Any, table: Any) -> Any:
    x = table[tokens]
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x, jnp.sort(tokens, axis=1), table * 2


def recurrent(x: Any, w: Any) -> Any:
    def step(carry: Any, now: Any) -> Any:
        carry = jnp.tanh(now @ w + carry)
        return carry, carry.max(-1)

    return lax.scan(step, jnp.zeros((x.shape[0], w.shape[1])), x.swapaxes(0, 1))


def per_example_gradients(x: Any, w: Any) -> Any:
    def loss(w: Any, row: Any) -> Any:
        return jnp.sum(jax.checkpoint(jnp.tanh)(row @ w) ** 2)

    return jax.vmap(jax.grad(loss), (None, 0))(w, x)


def loops(x: Any) -> Any:
    def row(v: Any) -> Any:
        grown = lax.while_loop(lambda y: jnp.sum(y) < 50, lambda y: 2 * y + 1, jnp.abs(v))
        return lax.cond(v[0] > 0, jnp.cumsum, lambda y: y[::-1], grown)

    return jax.vmap(row)(x), lax.map(jnp.max, x)


def indexed(x: Any, i: Any) -> Any:
    taken = jnp.take_along_axis(x, i[:, None], 1), jax.vmap(lambda row, j: row[j])(x, i)
    written = jax.vmap(lambda row, j: row.at[j].add(1))(x, i), x.at[:, 1].set(0)
    return taken, written, jnp.pad(x[:, 1:], ((0, 0), (2, 1))), tuple(lax.top_k(x, 2))


def drawn(x: Any, keys: Any) -> Any:
    def row(v: Any, key: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.5, v.shape), v, 0), jax.random.split(key)

    return jax.vmap(row)(x, jax.random.wrap_key_data(keys))


def flattened(x: Any, w: Any) -> Any:
    flat = x.reshape(-1, x.shape[-1])
    return (flat @ w).reshape(*x.shape[:-1], -1), flat, jnp.repeat(x, 2, axis=0)


def solved(a: Any) -> Any:
    positive = a @ a.swapaxes(1, 2) + 3 * jnp.eye(a.shape[1])
    return jnp.linalg.cholesky(positive), jnp.linalg.solve(positive, a), jnp.fft.rfft(a)


def keys_for(n: int) -> Any:
    return np.random.default_rng(1).integers(0, 2**32, (n, 2), np.uint32)


def ids(n: int, below: int, *more: int) -> Any:
    return np.random.default_rng(2).integers(0, below, (n, *more)).astype(np.int32)


SPLITS: dict[str, tuple[Callable[..., Any], Any, Callable[[int], tuple[Any, ...]]]] = {
    "mlp": (mlp, ("b, _", None), lambda n: (floats(n, 4), floats(4, 8))),
    "cnn": (cnn, ("b, ...", None), lambda n: (floats(n, 8, 8, 3), floats(3, 3, 3, 4))),
    "attention": (attention, ("b, s, _", "b, s"), lambda n: (floats(n, 5, 4), ids(n, 2, 5) > 0)),
    "embedding": (embedded, ("b, _", None), lambda n: (ids(n, 7, 3), floats(7, 4))),
    "scan": (recurrent, ("b, _, _", None), lambda n: (floats(n, 5, 4), floats(4, 4))),
    "gradients": (per_example_gradients, ("b, _", None), lambda n: (floats(n, 4), floats(4, 3))),
    "loops": (loops, "b, _", lambda n: (floats(n, 4),)),
    "indexing": (indexed, ("b, _", "b"), lambda n: (floats(n, 4), ids(n, 4))),
    "keys": (drawn, ("b, _", "b, _"), lambda n: (floats(n, 4), keys_for(n))),
    "flattened": (flattened, ("b, s, _", None), lambda n: (floats(n, 3, 4), floats(4, 2))),
    "linear algebra": (solved, "b, ...", lambda n: (floats(n, 3, 3),)),
    "not leading": (lambda x: x.T * 2, "_, b", lambda n: (floats(3, n),)),
    "weak": (lambda x: jnp.where(x > 0, 1.0, 2.0), "b", lambda n: (floats(n),)),
}


@pytest.mark.parametrize("name", SPLITS)
def test_split_is_as_exact(name: str, xla_compiles: Callable[[], int]) -> None:
    fn, axes, args = SPLITS[name]
    executor = BucketedExec(fn, dynamic_axes=axes).with_pow2(min=8).with_overflow("split", "b")
    executor = executor.with_buckets([2, 6], "b")
    for n in (13, 1, 6, 7, 12):
        got, given = executor(*args(n)), args(n)
        assert_same(got, jax.jit(fn)(*given), rtol=2e-5)
    assert {b["b"] for b in buckets(executor)} <= {6, 2, 1}  # 1 is a program of its own for some
    executor(*args(20))  # its sizes are new, and nothing is compiled for them
    before = xla_compiles()
    executor(*args(25))
    assert xla_compiles() == before
    assert executor.stats().fallback_calls == 0


def test_the_largest_bucket_of_any_strategy() -> None:
    for strategy in (
        strategies.Pow2(max=5),
        strategies.Boundaries([2, 5]),
    ):
        executor = BucketedExec(rows).with_strategy(strategy, overflow="split")
        assert_like_jit(executor, rows, ramp(12, 3) / 20)
        assert max(b["batch"] for b in buckets(executor)) == 5


def test_split_along_two_variables() -> None:
    def outer(x: Any, y: Any) -> Any:
        return x[:, None] * y, x + 1, y * 2, jnp.float32(3)

    executor = BucketedExec(outer, dynamic_axes=("b", "s")).with_pow2(max=4).with_overflow("split")
    for b, s in ((9, 6), (3, 6), (9, 2), (2, 2)):
        assert_like_jit(executor, outer, ramp(b), ramp(s))
    told = executor.explain(ramp(9), ramp(6))
    assert told.splits == (("b", (4, 4, 1)), ("s", (4, 2)))
    assert dict(told.sizes) == {"b": 9, "s": 6} and dict(told.bucket) == {"b": 4, "s": 4}
    assert "in 3 chunks along b: 4, 4, 1" in str(told)


def test_expressions_and_sizes_as_arguments() -> None:
    def fn(x: Any, pairs: Any, n: Any) -> Any:
        return x + jnp.ones(n), pairs.reshape(n, 2) * x[:, None]

    executor = BucketedExec(fn, dynamic_axes=("b", "2*b", "b")).with_pow2(max=4, overflow="split")
    got = executor(ramp(9), ramp(18), 9)
    assert_same(got, jax.jit(fn, static_argnums=2)(ramp(9), ramp(18), 9))


def test_named_and_nested_arguments() -> None:
    def fn(batch: Any, *, scale: Any) -> Any:
        return {"y": batch["x"] * scale, "none": None, "mask": [batch["ok"]]}

    executor = BucketedExec(fn, dynamic_axes=({"x": "b, _", "ok": "b"}, {"scale": None})).with_pow2(
        max=4, overflow="split"
    )
    batch = {"x": ramp(7, 2), "ok": ramp(7) > 3}
    assert_same(executor(batch, scale=2.0), jax.jit(fn)(batch, scale=2.0))


@pytest.mark.parametrize("committed", [False, True])
def test_arrays_of_jax(committed: bool) -> None:
    executor = BucketedExec(rows).with_pow2(max=4, overflow="split")
    x = jnp.asarray(ramp(11, 3) / 20)
    x = jax.device_put(x, jax.devices()[0]) if committed else x
    assert_like_jit(executor, rows, x)
    weak = BucketedExec(lambda x: x * 2).with_pow2(max=4, overflow="split")
    value = jnp.broadcast_to(jnp.asarray(1.5), (9,)) if committed else lax.full((9,), 1.5)
    assert_like_jit(weak, lambda x: x * 2, value)


def test_typed_keys() -> None:
    def fn(keys: Any, x: Any) -> Any:
        return jax.vmap(jax.random.fold_in, (0, None))(keys, 3), jax.vmap(
            lambda k, v: v + jax.random.normal(k)
        )(keys, x)

    executor = BucketedExec(fn, dynamic_axes=("b", "b")).with_pow2(max=4, overflow="split")
    assert_like_jit(executor, fn, jax.random.split(jax.random.key(0), 9), ramp(9))


def test_forms_of_results() -> None:
    def fn(x: Any, table: Any) -> Any:
        return jnp.tanh(x), table + 1, x.shape[1] * jnp.ones(x.shape[1])

    x, table = ramp(7, 3) / 20, ramp(2)
    want = jax.tree.map(np.asarray, jax.jit(fn)(x, table))
    for out in ("numpy", "padded"):
        executor = BucketedExec(fn, dynamic_axes=("b, s", None), out=out)
        executor = executor.with_pow2(max=4, overflow="split")
        got = executor(x, table)
        for y, exact in zip(got, want, strict=True):
            np.testing.assert_allclose(np.asarray(y), exact, rtol=1e-6)
        if out == "numpy":
            assert all(type(y) is np.ndarray for y in got)
        else:
            assert [type(y) for y in got][::2] == [Padded, Padded]
            again = BucketedExec(rows, dynamic_axes="b, s").with_pow2(max=4, overflow="split")
            np.testing.assert_allclose(again(got[0]), rows(want[0]), rtol=1e-5)


def test_padded_arguments() -> None:
    executor = BucketedExec(rows).with_pow2(max=4, overflow="split")
    x = ramp(16, 3) / 20
    got = executor(Padded(jnp.asarray(x), {0: 9}))
    assert_same(got, jax.jit(rows)(x[:9]))


def test_what_is_donated_is_given_away() -> None:
    def fn(state: Any, x: Any) -> Any:
        return state + 1, x * 2

    executor = BucketedExec(fn, dynamic_axes=(None, "b"), donate_argnums=(0, 1))
    executor = executor.with_pow2(max=4, overflow="split")
    for x in (ramp(11), jnp.asarray(ramp(8))):
        state = jnp.asarray(ramp(3))
        want = jax.jit(fn)(state, x)
        assert_same(executor(state, x), want)
        assert state.is_deleted()
        assert not isinstance(x, jax.Array) or x.is_deleted()
    small = jnp.asarray(ramp(3))
    executor(small, ramp(4))  # not split: donated as ever
    assert small.is_deleted()


def test_derivatives_are_split_where_they_can_be() -> None:
    executor = BucketedExec(lambda x, w: jnp.tanh(x * w), dynamic_axes=("b", None))
    executor = executor.with_pow2(max=4, overflow="split")
    x, w = jnp.asarray(ramp(9) / 9), jnp.float32(0.5)
    got = jax.grad(lambda x: jnp.sum(executor(x, w)))(x)
    np.testing.assert_allclose(got, jax.grad(lambda x: jnp.sum(jnp.tanh(x * w)))(x), rtol=1e-6)
    with pytest.raises(SplitError, match="reduce_sum"):
        jax.grad(lambda w: jnp.sum(executor(x, w)))(w)


@pytest.mark.parametrize("check", [Check.POISON, Check.EXACT, Check.EXACT_ALWAYS])
def test_checked(check: Check) -> None:
    executor = BucketedExec(rows, check=check).with_pow2(max=4, overflow="split")
    assert_like_jit(executor, rows, ramp(9, 3) / 20)


# --- chunks and guards ------------------------------------------------------------------------


def test_chunks_keep_the_guards_of_the_program() -> None:
    """A row alone takes another branch, so the last chunk borrows one."""

    def fn(x: Any) -> Any:
        return x * 100 if x.shape[0] == 1 else x + 1

    executor = BucketedExec(fn).with_pow2(max=4, overflow="split")
    assert_like_jit(executor, fn, ramp(9))
    assert executor.explain(ramp(9)).splits == (("batch", (4, 3, 2)),)

    def by_parity(x: Any) -> Any:
        return x * 2 if x.shape[0] % 2 == 0 else x + 1

    executor = BucketedExec(by_parity).with_buckets([5], overflow="split")
    assert_like_jit(executor, by_parity, ramp(14))
    assert executor.explain(ramp(14)).splits == (("batch", (4, 4, 4, 2)),)
    assert_like_jit(executor, by_parity, ramp(13))
    assert executor.explain(ramp(13)).splits == (("batch", (5, 5, 3)),)


def test_a_branch_by_size_is_refused() -> None:
    def fn(x: Any) -> Any:
        return x * 2 if x.shape[0] > 6 else x

    executor = BucketedExec(fn).with_pow2(max=4, overflow="split")
    assert_like_jit(executor, fn, ramp(4))
    with pytest.raises(SplitError, match=r"traced where batch >= 7, and may .* for chunks of 4"):
        executor(ramp(9))
    what_is_left = BucketedExec(lambda x: x * 2 if x.shape[0] > 2 else x)
    with pytest.raises(SplitError, match=r"traced where batch >= 3, and may .* for chunks of 1"):
        what_is_left.with_pow2(max=4, overflow="split")(ramp(5))


def test_numbers_made_of_sizes() -> None:
    """They are constants, of which the program does not tell what sizes they depend on."""

    def scaled(x: Any) -> Any:
        return x / math.sqrt(x.shape[1]) + np.arange(x.shape[1])

    executor = BucketedExec(scaled, dynamic_axes="b, s").with_pow2(max=4, overflow="split")
    executor = executor.with_pow2("s")
    for shape in ((9, 3), (9, 5), (3, 5)):
        assert_like_jit(executor, scaled, ramp(*shape))
    for fn, message in (
        (lambda x: x * math.sqrt(x.shape[0]), "a number that the function computes of sizes"),
        (lambda x: x.T + np.arange(x.shape[0]), "size_constant: a constant .* has b along an axis"),
    ):
        executor = BucketedExec(fn, dynamic_axes="b, s").with_pow2(max=4, overflow="split")
        assert_like_jit(executor, fn, ramp(4, 3))
        with pytest.raises(SplitError, match=message):
            executor(ramp(9, 3))


def test_constraints_hold_of_chunks() -> None:
    executor = BucketedExec(rows, dynamic_axes="b, _", constraints="b >= 3")
    executor = executor.with_pow2(max=8, overflow="split")
    assert_like_jit(executor, rows, ramp(17, 2) / 20)
    assert executor.explain(ramp(17, 2)).splits == (("b", (8, 6, 3)),)
    with pytest.raises(SplitError, match="traced where mod"):
        BucketedExec(rows, dynamic_axes="b, _", constraints="mod(b, 32) == 0").with_pow2(
            max=8, overflow="split"
        )(ramp(32, 2))


# --- split: what cannot be ---------------------------------------------------------------------


def batch_norm(x: Any) -> Any:
    return (x - jnp.mean(x, 0)) / jnp.sqrt(jnp.var(x, 0) + 1e-5)


def dropout(x: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(jax.random.wrap_key_data(key), 0.5, x.shape), x, 0)


def contrastive(x: Any) -> Any:
    return -jnp.diagonal(jax.nn.log_softmax(x @ x.T))


def shuffled(x: Any, key: Any) -> Any:
    return jax.random.permutation(jax.random.wrap_key_data(key), x)


def scanned(x: Any) -> Any:
    return lax.scan(lambda c, row: (c + row, c), jnp.zeros(x.shape[1]), x)[1]


def printing(x: Any) -> Any:
    jax.debug.print("{}", x[0, 0])
    return x


def window_of_features(x: Any) -> Any:
    """Its shape does not tell that it depends on the batch size; its padding does."""
    return lax.pad(x, jnp.float32(0), [(0, 0, 0), (x.shape[0] - 4, 4 - x.shape[0], 0)])


KEY = np.zeros(2, np.uint32)

REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "batch norm": (batch_norm, (), "the size b is used as a number|reduce_sum: it reduces over b"),
    "mean loss": (lambda x: jnp.mean(x**2), (), "return a value for each position"),
    "sum": (lambda x: jnp.sum(x), (), r"reduce_sum: it reduces over b \[.*test_buckets.py"),
    "softmax": (lambda x: jax.nn.softmax(x, 0), (), "reduce_max: it reduces over b"),
    "cumsum": (lambda x: jnp.cumsum(x, 0), (), r"cumsum: it accumulates along b \[.*test_buckets"),
    "sort": (lambda x: jnp.sort(x, 0), (), "sort: it sorts along b"),
    "argmax": (lambda x: jnp.argmax(x, 0), (), "argmax: it reduces over b"),
    "contrastive": (contrastive, (), r"an array of shape \(b, b\) has b along two axes"),
    "gram": (lambda x: x.T @ x, (), "dot_general: it adds up products along b"),
    "dropout": (dropout, (KEY,), "random_bits: one key is used for all of b.*pass a key for each"),
    "shuffle": (shuffled, (KEY,), "b"),
    "reverse": (lambda x: x[::-1], (), "b"),
    "flip": (lambda x: jnp.flip(x, 0), (), "rev: it reverses b"),
    "first": (lambda x: x[0], (), "b"),
    "shifted": (lambda x: x[1:] - x[:-1], (), "b"),
    "roll": (lambda x: jnp.roll(x, 1, 0), (), "b"),
    "twice": (lambda x: jnp.concatenate([x, x]), (), "concatenate: .* puts parts along b together"),
    "tiled": (lambda x: jnp.tile(x, (2, 1)), (), "tile: it repeats what is along b"),
    "padded": (lambda x: jnp.pad(x, ((1, 0), (0, 0))), (), "no multiple of b"),
    "positions": (lambda x: x + jnp.arange(x.shape[0])[:, None], (), "iota: it counts along b"),
    "size": (lambda x: x * x.shape[0], (), "dim_as_value: the size b is used as a number"),
    "power": (lambda x: lax.integer_pow(x, x.shape[0]), (), "parameter y depends on b"),
    "window": (window_of_features, (), "pad: "),
    "scan": (scanned, (), "scan: it carries values from step to step along b"),
    "minor": (lambda x: x.T.reshape(-1), (), "reshape: it mixes b with an axis before it"),
    "index": (lambda x: x[x[:, 0].astype(np.uint32)], (), "gather: each part along b may read"),
    "scatter": (lambda x: jnp.zeros(5).at[x[:, 0].astype(int)].add(1), (), "scatter-add: what"),
    "effects": (printing, (), "effects"),
    "convolution": (lambda x: jnp.convolve(x[:, 0], jnp.ones(3), "same"), (), "b"),
    "inside": (lambda x: jax.jit(lambda y: jnp.max(y, 0))(x), (), "reduce_max: it reduces over b"),
    "callback": (
        lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
        (),
        "pure_callback: nothing is known of what it does along b",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_split_is_refused(name: str) -> None:
    fn, more, message = REFUSED[name]
    axes = ("b, _", *(None for _ in more))
    executor = BucketedExec(fn, dynamic_axes=axes).with_pow2(max=8, overflow="split")
    with pytest.raises(SplitError, match=message) as raised:
        executor(floats(17, 4), *more)
    error = raised.value
    assert (error.size, error.largest, error.dim) == (17, 8, "b")
    assert "choose overflow='extend' or 'exact'" in str(error)
    assert executor.cache_size() == 0
    with pytest.raises(SplitError, match=message):
        executor.explain(floats(17, 4), *more)
