"""Results that the next call takes again: they come back in the buffers of its bucket."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec, Padded, strategies
from bucketjit.errors import BucketOverflowError
from tests.comparison import assert_close, in_threads

WIDTH = 4
AXES = ("_, _", "_, s, _", "_, s, _")


def step(token: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """An attention of one token to a cache that grows by it."""
    k = jnp.concatenate([k, jnp.sin(token)[:, None]], axis=1)
    v = jnp.concatenate([v, jnp.cos(token)[:, None]], axis=1)
    weights = jax.nn.softmax(jnp.einsum("bd,bsd->bs", token, k))
    return jnp.einsum("bs,bsd->bd", weights, v), k, v


def caches(length: int, batch: int = 2) -> tuple[Any, ...]:
    rng = np.random.default_rng(length)
    shapes = ((batch, WIDTH), *[(batch, length, WIDTH)] * 2)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


class OfThrees:
    """A strategy of a user."""

    def bucket(self, n: int) -> int:
        return -(-n // 3) * 3


def generated(fn: Callable[..., Any], state: Any, tokens: int) -> list[Any]:
    every = []
    for _ in range(tokens):
        state = fn(*state)
        every.append(state)
    return every


STRATEGIES = [
    pytest.param("pow2", 8, id="pow2"),
    pytest.param(strategies.Linear(6), 6, id="linear"),
    pytest.param([7, 8, 24, 48], 7, id="boundaries"),
    pytest.param(OfThrees(), 6, id="custom"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("donate", [(), (1, 2)], ids=["kept", "donated"])
@pytest.mark.parametrize(("buckets", "first"), STRATEGIES)
def test_chained_caches_are_those_of_jit(
    buckets: Any, first: int, donate: Any, xla_compiles: Callable[[], int]
) -> None:
    fn = bucketjit.jit(
        *(step,), dynamic_axes=AXES, buckets=buckets, out="padded", donate_argnums=donate
    )
    want = generated(jax.jit(step), caches(5), 40)
    got = generated(fn, jax.tree.map(jnp.asarray, caches(5)), 40)
    strategy = fn._engine.config.strategy_of("s")
    for i, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert ours[1].array.shape == (2, strategy.bucket(6 + i), WIDTH)
        if not donate or i == 39:
            assert_close(ours, theirs)
    assert got[0][1].array.shape[1] == first
    assert fn.stats().fallback_calls == 0
    # A bucket's first call takes buffers of the one before, and nothing else is copied.
    edges = {bucket for bucket in (strategy.bucket(6 + i) for i in range(40))}
    assert fn.cache_size() == len(edges)
    made = xla_compiles()
    again = generated(fn, jax.tree.map(jnp.asarray, caches(5)), 40)
    assert xla_compiles() == made
    assert_close(again[-1], want[-1])


def test_a_call_takes_a_chained_buffer_as_it_is() -> None:
    fn = BucketedExec(step, dynamic_axes=AXES, out="padded", donate_argnums=(1, 2)).with_pow2()
    state = fn(*jax.tree.map(jnp.asarray, caches(9)))
    for _ in range(5):
        k = state[1].array
        place = k.unsafe_buffer_pointer()
        state = fn(*state)
        assert k.is_deleted()
        assert state[1].array.unsafe_buffer_pointer() == place  # written in place


def grown(x: Any) -> Any:
    return jnp.concatenate([jnp.ones((2, *x.shape[1:])), x])


def shrunk(x: Any) -> Any:
    return x[1:] * 2


def joined(x: Any, chunk: Any) -> Any:
    return jnp.concatenate([x, jnp.tanh(chunk)[:, 0]])


def twice(x: Any) -> Any:
    return jnp.repeat(x, 2, axis=0)


def both(x: Any, y: Any) -> Any:
    return jnp.concatenate([x, y])


# The function, its open axes, the sizes of arguments, and the padded size of the result.
EXPRESSIONS = [
    (grown, ("s, _",), [(5, 3)], 8),
    (grown, ("s, _",), [(6, 3)], 8),
    (grown, ("s, _",), [(7, 3)], 16),
    (shrunk, ("s, _",), [(9, 3)], 16),
    (shrunk, ("s, _",), [(8, 3)], 8),
    (joined, ("s, _", "t, _, _"), [(5, 3), (3, 1, 3)], 16),  # 5 and room for 4
    (joined, ("s, _", "t, _, _"), [(4, 3), (3, 1, 3)], 8),
    (twice, ("s, _",), [(5, 3)], 16),  # as it is: the bucket of twice 8
    (both, ("s, _", "t, _"), [(5, 3), (5, 3)], 16),  # either may take it
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("fn", "axes", "shapes", "padded"), EXPRESSIONS)
def test_a_result_has_the_bucket_of_its_size(fn: Any, axes: Any, shapes: Any, padded: int) -> None:
    args = [np.random.default_rng(0).standard_normal(s).astype(np.float32) for s in shapes]
    executor = BucketedExec(fn, dynamic_axes=axes, out="padded").with_pow2()
    got, want = executor(*args), jax.jit(fn)(*args)
    assert got.array.shape[0] == padded
    assert_close(got, want)
    assert not np.asarray(got.array)[want.shape[0] :].any()
    for check in ("poison", "exact"):
        assert_close(
            BucketedExec(fn, dynamic_axes=axes, out="padded", check=check).with_pow2()(*args), want
        )
    # Where a call does not chain, nothing changes.
    plain = BucketedExec(fn, dynamic_axes=axes).with_pow2()
    plain(*args)
    assert [b.sizes["s"] for b in plain.stats().buckets] == [strategies.Pow2().bucket(len(args[0]))]


@pytest.mark.parametrize("garbage", [7.0, np.nan, np.inf])
def test_padding_of_a_buffer_may_hold_anything(garbage: float) -> None:
    fn = BucketedExec(step, dynamic_axes=AXES, out="padded").with_pow2()
    ours, theirs = caches(5), caches(5)
    for _ in range(6):
        ours, theirs = fn(*ours), jax.jit(step)(*theirs)
        assert_close(ours, theirs)
        token, *held = ours
        ours = (token, *(Padded(_with_garbage(x, garbage), x.sizes) for x in held))


def _with_garbage(x: Padded, value: float) -> np.ndarray:
    array = np.full(x.array.shape, value, np.float32)
    array[tuple(map(slice, x.sizes))] = np.asarray(x)
    return array


def test_sizes_beyond_the_largest_bucket() -> None:
    state = jax.tree.map(jnp.asarray, caches(6))
    fn = BucketedExec(step, dynamic_axes=AXES, out="padded").with_pow2(max=8)
    states = generated(fn, state, 3)  # the last call takes 8, and makes 9
    assert [s[1].array.shape[1] for s in states] == [8, 8, 9]
    assert_close(states, generated(jax.jit(step), state, 3))
    with pytest.raises(BucketOverflowError):
        fn(*states[-1])
    for overflow in ("extend", "exact"):
        fn = bucketjit.jit(
            step, dynamic_axes=AXES, buckets=strategies.Pow2(max=8), out="padded", overflow=overflow
        )
        assert_close(generated(fn, state, 6), generated(jax.jit(step), state, 6))


def test_an_open_batch_beside_it() -> None:
    axes = ("b, _", "b, s, _", "b, s, _")
    fn = BucketedExec(step, dynamic_axes=axes, out="padded").with_pow2()
    for batch in (3, 5):
        state = caches(6, batch)
        got = generated(fn, state, 4)
        assert_close(got, generated(jax.jit(step), state, 4))
        assert got[-1][1].array.shape == (8 if batch > 4 else 4, 16, WIDTH)
        for x in jax.tree.leaves(got[-1]):
            assert not np.asarray(x.array)[batch:].any()


def test_results_are_used_elsewhere() -> None:
    fn = BucketedExec(step, dynamic_axes=AXES, out="padded").with_pow2()
    _, k, v = fn(*caches(5))
    want = jax.jit(step)(*caches(5))[1]
    assert_close(np.asarray(k), want)
    for length in (fn, fn.with_linear(5), BucketedExec(step, dynamic_axes=AXES).with_linear(5)):
        token = jnp.ones((2, WIDTH))
        assert_close(length(token, k, v)[1], jax.jit(step)(token, np.asarray(k), np.asarray(v))[1])
    total = BucketedExec(lambda x: x.sum(1), dynamic_axes=("_, n, _",)).with_pow2()
    np.testing.assert_allclose(total(k), want.sum(1), rtol=1e-5)
    loss = BucketedExec(lambda k: (k**2).sum(), dynamic_axes=("_, n, _",)).with_pow2()
    np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(np.asarray(k))), 2 * want, rtol=1e-5)


def test_gradients_where_results_have_room() -> None:
    fn = BucketedExec(step, dynamic_axes=AXES, out="padded").with_pow2()

    def loss(fn: Any, token: Any, k: Any, v: Any) -> Any:
        return sum((x**2).sum() for x in fn(token, k, v))

    args = jax.tree.map(jnp.asarray, caches(5))
    assert_close(
        jax.grad(lambda *xs: loss(fn, *xs), (0, 1, 2))(*args),
        jax.grad(lambda *xs: loss(step, *xs), (0, 1, 2))(*args),
    )


def test_threads_generate_at_the_same_time() -> None:
    fn = BucketedExec(step, dynamic_axes=AXES, out="padded", donate_argnums=(1, 2)).with_pow2()
    firsts = (3, 4, 9, 14)
    last = in_threads(
        lambda first: generated(fn, jax.tree.map(jnp.asarray, caches(first)), 12)[-1], firsts
    )
    for first, got in zip(firsts, last, strict=True):
        assert_close(got, generated(jax.jit(step), caches(first), 12)[-1])
    assert fn.cache_size() == 4  # up to 4, 8, 16 and 32


def test_what_is_said_of_it() -> None:
    fn = BucketedExec(step, dynamic_axes=AXES, out="padded").with_pow2(min=8)
    told = fn.explain(*caches(8))
    assert dict(told.bucket) == {"s": 15} and not told.compiled  # 15, and room for one more
    report = fn.warmup(*caches(1), sizes={"s": strategies.Pow2(min=8, max=32)})
    assert sorted(b.sizes["s"] for b in fn.stats().buckets) == [7, 15, 31, 63], report
    before = fn.stats().compiles
    assert_close(generated(fn, caches(1), 30), generated(jax.jit(step), caches(1), 30))
    assert fn.stats().compiles == before
    compiled = fn.lower(*caches(5)).compile()
    assert_close(compiled(*caches(6)), jax.jit(step)(*caches(6)))
    assert compiled(*caches(6))[1].array.shape[1] == 8


def test_a_file_keeps_the_room(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    fn = BucketedExec(step, dynamic_axes=AXES, out="padded").with_pow2()
    fn.save(tmp_path / "step.bkt", *caches(5), sizes={"s": [8, 16, 32]})
    loaded = bucketjit.load(tmp_path / "step.bkt")
    got = generated(loaded, caches(5), 20)
    assert_close(got, generated(jax.jit(step), caches(5), 20))
    assert [s[1].array.shape[1] for s in got[::4]] == [
        strategies.Pow2().bucket(6 + i) for i in range(0, 20, 4)
    ]


def test_executables_in_files_know_of_the_room(tmp_path: Path) -> None:
    for out in ("padded", "jax", "padded"):
        fn = BucketedExec(step, dynamic_axes=AXES, out=out).with_pow2().with_persistence(tmp_path)
        assert_close(generated(fn, caches(5), 6), generated(jax.jit(step), caches(5), 6))
    assert fn.stats().compiles == 0
