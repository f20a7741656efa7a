"""The forms of results, arrays that keep their padding, and what a call waits for."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bucketjit
from bucketjit import BucketedExec, Check, Padded
from bucketjit._arrays.padding import pad, padder, plain
from bucketjit.errors import ArgumentError, SpecError
from tests.comparison import assert_same, ramp, unrolled

SIZES = (3, 5, 4, 8, 1, 3, 5)


class Pair(NamedTuple):
    first: Any
    second: Any


def nested(x: Any) -> Any:
    return {
        "list": [x * 2, x.sum()],
        "pair": Pair(x[::-1], jnp.arange(3)),
        "none": None,
        "deep": ({"y": jnp.stack([x, x], 1)}, jnp.float32(1)),
    }


# --- forms -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_host_arrays(kind: str) -> None:
    executor = BucketedExec(nested, out="numpy").with_pow2()
    for n in SIZES:
        x = ramp(n) if kind == "numpy" else jnp.asarray(ramp(n))
        got = executor(x)
        leaves = jax.tree_util.tree_leaves(got)
        assert leaves and all(type(leaf) is np.ndarray for leaf in leaves)
        assert_same(jax.tree.map(jnp.asarray, got), jax.tree.map(jnp.asarray, jax.jit(nested)(x)))
    assert executor.cache_size() == 3


def test_padded_results() -> None:
    executor = BucketedExec(nested, out="padded").with_pow2()
    for n in SIZES:
        got, want = executor(ramp(n)), jax.jit(nested)(ramp(n))
        bucket = 1 << (n - 1).bit_length()
        assert isinstance(got["list"][1], jax.Array)
        assert isinstance(got["pair"].second, jax.Array)
        y = got["deep"][0]["y"]
        assert type(y) is Padded and y.array.shape == (bucket, 2)
        assert y.sizes == y.shape == (n, 2) and y.size == 2 * n and len(y) == n
        np.testing.assert_array_equal(y, want["deep"][0]["y"])
        np.testing.assert_array_equal(np.asarray(y.array)[n:], 0)
        np.testing.assert_array_equal(got["pair"].first, want["pair"].first)
        assert y.block_until_ready() is y


def test_forms_by_decorator_and_their_refusal() -> None:
    @bucketjit.jit(out="numpy")
    def double(x: Any) -> Any:
        return x * 2

    assert type(double(ramp(3))) is np.ndarray
    with pytest.raises(SpecError, match="out must be one of 'jax', 'numpy', 'padded', got 'torch'"):
        BucketedExec(nested, out="torch")


@pytest.mark.parametrize("check", [Check.POISON, Check.EXACT])
@pytest.mark.parametrize(("out", "kind"), [("numpy", np.ndarray), ("padded", Padded)])
def test_forms_of_checked_runs(check: Check, out: str, kind: type) -> None:
    executor = BucketedExec(lambda x: x + 1, check=check, out=out).with_pow2()
    for n in (3, 4):
        assert type(executor(ramp(n))) is kind
        np.testing.assert_array_equal(executor(ramp(n)), ramp(n) + 1)


@pytest.mark.parametrize("out", ["numpy", "padded"])
def test_forms_are_for_the_outside(out: str) -> None:
    """Under a transformation results are what the transformation knows."""
    executor = BucketedExec(lambda x: (x**2).sum(), out=out).with_pow2()
    rows = BucketedExec(lambda x: x**2, out=out).with_pow2()
    for n in (3, 5):
        np.testing.assert_allclose(jax.grad(executor)(jnp.asarray(ramp(n))), 2 * ramp(n))
        np.testing.assert_allclose(jax.jit(rows)(ramp(n)), ramp(n) ** 2)


def test_host_arrays_of_keys_and_small_floats() -> None:
    executor = BucketedExec(
        lambda k, x: (k, x.astype(jnp.bfloat16)), dynamic_axes=("b", "b"), out="numpy"
    ).with_pow2()
    keys = jax.random.split(jax.random.key(0), 3)
    same, small = executor(keys, ramp(3))
    np.testing.assert_array_equal(jax.random.key_data(same), jax.random.key_data(keys))
    assert type(small) is np.ndarray and small.dtype == jnp.bfloat16


# --- padded arrays as arguments ------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["pow2", [16, 64], "exact"])
def test_a_padded_array_is_taken_as_what_it_holds(strategy: Any) -> None:
    fn = lambda x: (jnp.sort(x), x.mean())  # noqa: E731
    executor = bucketjit.jit(fn, buckets=strategy)
    for n, room in ((3, 4), (3, 8), (5, 8), (4, 4), (9, 30), (3, 4), (1, 64), (3, 8)):
        held = np.full(room, np.nan, np.float32)
        held[:n] = ramp(n)
        for array in (held, jnp.asarray(held)):
            got = executor(Padded(array, (n,)))
            assert_same(got, jax.jit(fn)(ramp(n)))


def test_stages_share_padding(xla_compiles: Callable[[], int]) -> None:
    first = BucketedExec(lambda x: jnp.stack([x, -x], 1), out="padded").with_pow2()
    second = BucketedExec(lambda y, z: (y.sum(0), y * z), dynamic_axes=("b, 2", "b, 2")).with_pow2()
    before = xla_compiles()
    for n in (3, 4, 5, 7, 3, 6):
        y = first(ramp(n))
        total, square = second(y, y)
        np.testing.assert_allclose(total, [ramp(n).sum(), -ramp(n).sum()])
        np.testing.assert_allclose(square, np.stack([ramp(n), -ramp(n)], 1) ** 2)
    assert xla_compiles() - before == first.cache_size() + second.cache_size() == 4


def test_padded_arrays_without_padding_compile_nothing(xla_compiles: Callable[[], int]) -> None:
    executor = BucketedExec(jnp.sum).with_pow2()
    executor(ramp(64))
    arrays = [jax.device_put(ramp(n)) for n in range(33, 65)]
    before = xla_compiles()
    for x in arrays:
        assert float(executor(Padded(x, x.shape))) == x.size * (x.size + 1) / 2
    assert xla_compiles() == before


def test_padded_arrays_in_containers_keywords_and_transformations() -> None:
    fn = lambda d, *, y: d["x"].sum() + y.max()  # noqa: E731
    executor = BucketedExec(fn, dynamic_axes={"d": {"x": "n"}, "y": "n"}).with_pow2()
    for n in (3, 4, 3, 5):
        x = Padded(np.append(ramp(n), np.nan), (n,))
        for _ in range(2):
            assert float(executor({"x": x}, y=ramp(n))) == ramp(n).sum() + n
    total = BucketedExec(lambda x, w: (x * w).sum()).with_pow2()
    grad = jax.grad(lambda w: total(Padded(np.append(ramp(3), np.nan), (3,)), w))
    np.testing.assert_allclose(grad(jnp.ones(3)), ramp(3))


@pytest.mark.parametrize(
    ("array", "sizes", "message"),
    [
        ([1, 2], (1,), "expected an array, got list"),
        (np.zeros((3, 2)), (4, 2), r"0 to the padded one for each axis of \(3, 2\), got \(4, 2\)"),
        (np.zeros((3, 2)), (1,), r"got \(1,\)"),
        (np.zeros((3, 2)), (-1, 2), r"got \(-1, 2\)"),
        (np.zeros((3, 2)), {2: 1}, "no axis 2"),
        (np.zeros(3), (True,), "got"),
    ],
)
def test_wrong_padding_is_refused(array: Any, sizes: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Padded(array, sizes)


def test_what_padded_arrays_say() -> None:
    held = Padded(jnp.zeros((4, 2), jnp.int8), {0: 3})
    assert repr(held) == "Padded(int8[3, 2] in [4, 2])"
    assert np.asarray(held, np.float32).dtype == np.float32
    with pytest.raises(TypeError, match="without axes"):
        len(Padded(jnp.float32(1), ()))
    with pytest.raises(TypeError, match=r"not indexed: cut its padding first, by jnp.asarray"):
        held[0]
    assert jnp.asarray(held)[2].shape == (2,)


# --- donation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["bare", "container", "padded"])
def test_padded_copies_are_donated(where: str) -> None:
    """Whether an argument is padded or not, donating it gives it away, without a warning."""

    def step(x: Any, w: Any) -> Any:
        inner = x["x"] if where == "container" else x
        return inner * 2, w + 1

    axes = ({"x": "b"}, None) if where == "container" else ("b", None)
    executor = BucketedExec(step, dynamic_axes=axes, donate_argnums=(0, 1)).with_pow2()
    with warnings.catch_warnings(action="error"):
        for n in (3, 4, 3, 5, 8):
            x: Any = jnp.asarray(ramp(n))
            if where == "padded":
                x = Padded(jnp.pad(x, (0, 8 - n)), (n,))
            w = jnp.zeros(4)
            doubled, more = executor({"x": x} if where == "container" else x, w)
            np.testing.assert_array_equal(doubled, 2 * ramp(n))
            np.testing.assert_array_equal(more, np.ones(4))
            assert x.is_deleted() and w.is_deleted()


def _square(n: int) -> Any:
    return jnp.ones((n, 4), jnp.float32)


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (lambda x: (x * 2).reshape(-1), 1),
        (lambda x: x.astype(jnp.int32), 1),
        (lambda x: x.sum(), 1),
        (lambda x: x[1:] * 2, 1),
        (lambda x: x.astype(jnp.float16), 1),  # as many elements, but fewer bytes
        (lambda x, y: (x + y, (x - y).reshape(-1)), 2),
        (lambda x, y: y + 1, 2),  # what is not read is left out
        (lambda t: {"a": t["a"].T, "b": t["b"].sum()}, 0),
    ],
)
def test_donated_memory_is_reused_as_by_jit(fn: Any, count: int) -> None:
    """The same arguments are deleted, and JAX warns of the same ones, in the slow and fast path."""

    def given(n: int) -> Any:
        if count == 0:
            return ({"a": _square(n), "b": _square(n)},)
        return tuple(_square(n) for _ in range(count))

    def told(call: Any, n: int) -> Any:
        args = given(n)
        with warnings.catch_warnings(record=True, action="always") as caught:
            jax.block_until_ready(call(*args))
        deleted = [x.is_deleted() for x in jax.tree.leaves(args)]
        return deleted, [str(w.message).partition("\n")[0] for w in caught]

    donated = tuple(range(max(count, 1)))
    executor = BucketedExec(fn, donate_argnums=donated).with_pow2()
    wanted, warned = told(jax.jit(fn, donate_argnums=donated), 8)
    assert told(executor, 7) == (wanted, warned)
    for n in (7, 8, 6, 8):
        assert told(executor, n) == (wanted, [])
    result, *_ = jax.tree.leaves(executor(*given(7)))
    np.testing.assert_array_equal(result, jax.tree.leaves(jax.jit(fn)(*given(7)))[0])


def test_host_arrays_can_be_donated() -> None:
    executor = BucketedExec(lambda x: x * 2, donate_argnums=0).with_pow2()
    for n in (3, 4, 3, 4):
        x = ramp(n)
        np.testing.assert_array_equal(executor(x), 2 * ramp(n))
        np.testing.assert_array_equal(x, ramp(n))


# --- what a call waits for -----------------------------------------------------------------------


def slow(x: Any) -> Any:
    """Takes a good part of a second."""
    w = jnp.eye(64) * 0.5
    busy = lax.fori_loop(0, 10_000, lambda _, m: jnp.sin(m @ w), jnp.full((64, 64), x.sum()))
    return busy.min()


@pytest.mark.parametrize("out", ["jax", "padded"])
def test_a_call_does_not_wait_for_its_results(out: str) -> None:
    """Those without open axes as arrays; those with open axes as padded ones."""
    fn = slow if out == "jax" else lambda x: (slow(x), x + slow(x))
    executor = BucketedExec(fn, out=out).with_pow2()
    inputs = [jnp.asarray(ramp(n)) for n in (3, 4)]
    jax.block_until_ready([executor(x) for x in inputs])
    for x in inputs:
        leaves = jax.tree_util.tree_leaves(executor(x))
        arrays = [y.array if type(y) is Padded else y for y in leaves]
        assert not any(y.is_ready() for y in arrays)
        jax.block_until_ready(arrays)


# --- the warm path -------------------------------------------------------------------------------


def _scan_free(x: Any) -> Any:
    return lax.cumsum(x) * 2


@pytest.mark.parametrize(
    ("fn", "options", "call"),
    [
        (_scan_free, {}, lambda n: ((ramp(n),), {})),
        (_scan_free, {}, lambda n: ((), {"x": jnp.asarray(ramp(n))})),
        (jnp.matmul, {"dynamic_axes": ("a, b", "b, a")}, lambda n: ((ramp(n, 3), ramp(3, n)), {})),
        (
            lambda d, w: (d["x"] * w, d["k"]),
            {"dynamic_axes": ({"x": "n", "k": None}, None)},
            lambda n: (({"x": ramp(n), "k": 1.5}, np.float32(2)), {}),
        ),
        (
            lambda x, how, k: x * 2 if how == "a" else x * k,
            {"static_argnames": ("how", "k"), "dynamic_axes": "n"},
            lambda n: ((ramp(n), "ab"[n % 2]), {"k": n % 3}),
        ),
        (
            lambda n, x: jnp.arange(n) + x.sum(),
            {"dynamic_axes": ("n", "m")},
            lambda n: ((n, ramp(2 * n)), {}),
        ),
        (lambda x: x * 2, {"dynamic_axes": "2*n"}, lambda n: ((ramp(2 * n),), {})),
        (unrolled, {}, lambda n: ((ramp(n),), {})),
        (lambda x: x + 1, {"buckets": "exact"}, lambda n: ((ramp(n),), {})),
    ],
    ids=[
        *("bare", "keyword", "two axes", "container", "static", "size", "expression"),
        *("fallback", "no strategy"),
    ],
)
@pytest.mark.filterwarnings("ignore::bucketjit.errors.FallbackWarning")
def test_calls_like_an_earlier_one_take_the_warm_path(
    fn: Any, options: dict[str, Any], call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = bucketjit.jit(fn, **{"buckets": "pow2", **options})
    wanted = {}
    for n in SIZES:
        args, kwargs = call(n)
        wanted[n] = executor(*args, **kwargs)
    stats = executor.stats()
    assert stats.calls == len(SIZES)
    monkeypatch.setattr(type(executor._engine), "serve", None)
    for n in SIZES:
        args, kwargs = call(n)
        assert_same(executor(*args, **kwargs), wanted[n])
    after = executor.stats()
    assert after.calls == 2 * len(SIZES) and after.hits == stats.hits + len(SIZES)
    assert after.padding_waste == pytest.approx(stats.padding_waste)
    assert after.fallback_calls == 2 * stats.fallback_calls
    assert after.hits + after.misses == after.calls
    assert sum(b.hits for b in after.buckets) == after.hits


def test_an_array_that_is_none_on_the_warm_path() -> None:
    executor = BucketedExec(lambda x: x * 2).with_pow2()
    executor(ramp(3))
    for wrong in (["a"], np.array(["a", "b", "c"]), np.ma.array([1.0, 2.0, 3.0])):
        with pytest.raises(ArgumentError):
            executor(wrong)
    np.testing.assert_array_equal(executor(ramp(3)), 2 * ramp(3))


@pytest.mark.parametrize("shape", [(5, 3), (5,), (5, 0)])
def test_where_warm_results_are(shape: tuple[int, ...]) -> None:
    """Each is committed to its device where its own argument was, whatever those before were."""
    executor = BucketedExec(lambda x: (x + 1, x.T), dynamic_axes="n, ...").with_pow2()
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    placed = jax.device_put(x, jax.devices()[0])
    for given in (x, placed, jnp.asarray(x), placed, x, jnp.asarray(x), placed) * 2:
        results = executor(given)
        assert_same(results, jax.jit(lambda x: (x + 1, x.T))(given))
        assert [r.committed for r in results] == [given is placed] * 2


@pytest.mark.parametrize(
    "dtype", [bool, np.int8, np.complex64, jnp.bfloat16, jnp.int4, jax.dtypes.float0]
)
def test_rows_are_added_to_any_dtype(dtype: Any) -> None:
    host = np.ones((5, 3), bool).astype(dtype) if dtype != jax.dtypes.float0 else None
    if host is None:
        host = np.zeros((5, 3), dtype)
    padded = pad(host, (8, 3))
    assert padded.shape == (8, 3) and padded.dtype == host.dtype
    np.testing.assert_array_equal(padded[:5], host)
    np.testing.assert_array_equal(padded[5:], np.zeros((3, 3), host.dtype))
    again = padder(host, (8, 3))(host)
    np.testing.assert_array_equal(again, padded)
    assert again.dtype == padded.dtype and not np.shares_memory(again, padded)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("out", ["jax", "numpy", "padded"])
def test_typed_keys_take_the_short_way(out: str) -> None:
    """Also those of two generators, and raw ones, one after the other."""

    def fold(keys: Any) -> Any:
        return jax.vmap(lambda key: jax.random.fold_in(key, 7))(keys), keys

    executor = BucketedExec(fold, out=out).with_pow2()
    for n in (3, 5, 3, 4, 5):
        for impl in ("threefry2x32", "rbg"):
            keys = jax.random.split(jax.random.key(n, impl=impl), n)
            for _ in range(2):
                for got, want in zip(map(plain, executor(keys)), jax.jit(fold)(keys), strict=True):
                    assert (got.dtype, got.shape) == (want.dtype, want.shape)
                    words = map(jax.random.key_data, (got, want))
                    np.testing.assert_array_equal(*words)
    tables = executor._engine.memory.fast_path.tables
    assert len({key[1] for table in tables for key in table.by_key}) == 2
    assert executor.stats().compiles == 4


def step(w: Any, x: Any) -> Any:
    return w - 0.1 * (x.T @ (x @ w)), x @ w


def by_rows(w: Any, x: Any) -> Any:
    return w + sum(x[i] for i in range(x.shape[0])), x * w


@pytest.mark.parametrize("strategy", ["pow2", "none"])
@pytest.mark.parametrize("fn", [step, by_rows])
@pytest.mark.filterwarnings("ignore::bucketjit.errors.FallbackWarning")
def test_padded_is_what_has_open_axes_also_without_a_program(fn: Any, strategy: str) -> None:
    executor = BucketedExec(fn, out="padded", dynamic_axes=(None, "b, _"))
    executor = executor if strategy == "none" else executor.with_pow2()
    for n in (3, 0, 5):
        w, y = executor(np.ones(2, np.float32), np.ones((n, 2), np.float32))
        assert (type(w), type(y)) == (type(jnp.ones(1)), Padded)
        np.testing.assert_allclose(w, fn(np.ones(2), np.ones((n, 2)))[0], rtol=1e-6)
