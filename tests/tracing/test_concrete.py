"""Programs of concrete traces: what they serve, what they refuse, what they cost."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec, Check, Fallback
from bucketjit._ir.program import Leaf, TraceRefused
from bucketjit._tracing.concrete import Tracer
from bucketjit._tracing.pairing import pair
from bucketjit.errors import FallbackError, FallbackWarning
from tests.comparison import assert_like_jit, assert_same, in_threads, ramp

SIZES = (5, 7, 3, 5, 9)


def _executor(fn: Callable[..., Any], axes: Any = "n") -> BucketedExec:
    return BucketedExec(fn, dynamic_axes=axes).with_pow2()


def _serves(fn: Callable[..., Any], compiles: int, axes: Any = "n", rank: int = 1) -> None:
    executor = _executor(fn, axes)
    for n in SIZES:
        assert_like_jit(executor, fn, ramp(n, *(3,) * (rank - 1)) / n)
    stats = executor.stats()
    assert stats.fallback_calls == 0
    assert stats.compiles <= compiles


@pytest.mark.sampled(3, "<lambda>1", "<lambda>6")
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * math.sqrt(x.shape[0]),
        lambda x: jax.pure_callback(lambda v, n=int(x.shape[0]): np.asarray(v) / n, x, x),
        lambda x: x * len(str(int(x.shape[0]))),
        lambda x: x + np.arange(x.shape[0], dtype=np.float32),
        lambda x: x @ np.eye(x.shape[0], dtype=np.float32)[::-1],
        lambda x: x * jnp.linspace(0, 1, int(x.shape[0])),
        lambda x: x[: int(x.shape[0] * 0.7)],
        lambda x: lax.fori_loop(0, int(x.shape[0]), lambda i, c: c + x[i] * i, 0.0),
        lambda x: lax.scan(lambda c, _: (c / 2 + x[0], c), 1.0, None, length=int(x.shape[0])),
        lambda x: jax.jit(lambda y: y * math.log(y.shape[0]))(x),
        lambda x: jax.grad(lambda y: (jnp.sin(y) * np.arange(y.shape[0])).sum())(x),
        lambda x: (x, x.shape[0], float(x.shape[0])),
        lambda x: x * {n: n * n for n in range(99)}[x.shape[0]],
        lambda x: x * (2 if type(int(x.shape[0])) is int else 3),
        lambda x: x[jax.random.permutation(jax.random.key(1), int(x.shape[0]))],
    ],
)
def test_sizes_as_python_numbers(fn: Callable[..., Any]) -> None:
    _serves(fn, compiles=3)


def test_what_differs_by_parity_has_two_programs() -> None:
    _serves(lambda x: x.sum() if int(x.shape[0]) % 2 else x.max(), compiles=6)
    _serves(lambda x: x.sum(axis=int(x.shape[0]) % 2), compiles=6, axes="n, _", rank=2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("static", [4, 5, 16])
def test_an_axis_that_happens_to_have_the_size_of_another(static: int) -> None:
    """Coincidences of the sizes traced at must not matter."""

    def fn(x: Any, w: Any) -> Any:
        scaled = (x @ w) * math.sqrt(x.shape[0])
        return scaled.sum(0), scaled.max(1), jnp.arange(static) * w.sum(0), x.mean()

    executor = _executor(fn, ("b, _", None))
    for n in (3, 4, 5, 7, 8, 6, 16):
        assert_like_jit(executor, fn, ramp(n, static) / n, ramp(static, static) / 50)
    assert executor.stats().fallback_calls == 0
    assert executor.stats().compiles <= 3


@pytest.mark.parametrize("floor", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_what_is_one_at_some_sizes_broadcasts_there(floor: int) -> None:
    """``x - s`` is one equation, whether an axis of ``s`` is as long as that of ``x`` or 1."""

    def scaled(x: Any, y: Any) -> Any:
        return (x - y) * math.sqrt(x.shape[0])

    def spread(x: Any) -> Any:
        n = int(x.shape[0])
        few = jnp.concatenate([x, 2 * x])[: 1 if n % 2 else n]
        return jnp.broadcast_to(few[None, :, None], (2, n, 3))

    shapes = ((5, 1), (5, 5), (1, 5), (6, 6), (6, 1), (1, 1), (3, 3), (3, 1), (7, 1), (7, 7))
    # At (6, 6) nothing tells whose size is whose, once they have differed.
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        for fn, axes in ((lambda x, y: x - y, None), (scaled, ("b", "c"))):
            executor = BucketedExec(fn, dynamic_axes=axes).with_pow2(min=floor)
            for n, m in shapes:
                assert_like_jit(executor, fn, ramp(n) / 3, ramp(m))
        executor = BucketedExec(spread, dynamic_axes="n").with_pow2(min=floor)
        for n in (5, 7, 4, 5, 2, 1):
            assert_like_jit(executor, spread, ramp(n))


def test_tables_kept_by_size() -> None:
    """Traced twice at one size, such code would meet a tracer of the first trace."""
    tables: dict[int, Any] = {}

    def fn(x: Any) -> Any:
        n = int(x.shape[0])
        if n not in tables:
            tables[n] = jnp.arange(n) * 2.0
        return x * tables[n] * math.sqrt(n)

    executor = _executor(fn)
    for n in (5, 6, 5, 7, 6):
        want = ramp(n) * np.arange(n) * 2 * math.sqrt(n)
        np.testing.assert_allclose(np.asarray(executor(ramp(n))), want, rtol=1e-6)


def test_a_constant_that_happens_to_be_equal() -> None:
    """At 5 to 8 the constant is the same; at 9 it is not, and that must be seen."""
    fn = lambda x: x * (1.0 if int(x.shape[0]) <= 8 else 2.0) * math.sqrt(x.shape[0])  # noqa: E731
    executor = _executor(fn)
    for n in (5, 6, 7, 8, 9, 12, 5, 16, 17, 40):
        assert_like_jit(executor, fn, ramp(n))
    assert executor.stats().fallback_calls == 0


def test_a_size_that_happens_to_be_linear() -> None:
    fn = lambda x: x[: (int(x.shape[0]) if int(x.shape[0]) < 20 else 20)]  # noqa: E731
    executor = _executor(fn)
    for n in (5, 6, 8, 19, 20, 21, 30, 5, 40, 17):
        assert_like_jit(executor, fn, ramp(n))


def test_one_trace_for_each_logical_size_and_none_when_warm() -> None:
    traced = []

    def fn(x: Any) -> Any:
        traced.append(x.shape[0])
        return x * math.sqrt(x.shape[0])

    executor = _executor(fn)
    executor(ramp(5))
    executor(ramp(6))
    count = len(traced)
    for n in (6, 5, 6, 5):
        executor(ramp(n))
        executor(jnp.asarray(ramp(n)))
    assert len(traced) == count
    executor(ramp(7))
    executor(ramp(7))
    assert len(traced) <= count + 1
    assert executor.cache_size() == 1


@pytest.mark.parametrize(
    "size, traced",
    [(lambda n: 2 * n + 3, [5, 6, 10]), (lambda n: int(n * 0.7), [5, 6, 10, 4, 8, 9])],
    ids=["a line", "another function"],
)
def test_traces_are_made_until_they_predict_the_next(size: Any, traced: list[int]) -> None:
    sizes = []

    def fn(x: Any) -> Any:
        sizes.append(int(x.shape[0]))
        return jnp.concatenate([x, np.ones(size(sizes[-1]), np.float32)])

    executor = _executor(fn)
    assert_same(executor(ramp(5)), fn(ramp(5)))
    assert sizes == [*traced, 5]


def test_sizes_that_change_alone_tell_nothing_of_products() -> None:
    def fn(x: Any) -> Any:
        a, b = map(int, x.shape)
        if a > 9:
            raise ValueError("too long")  # so the first trace at other sizes of both fails
        return jnp.ones(a * b + a + 100).sum() + 0 * x.sum()

    exported = _executor(fn, "a, b").export_dynamic(ramp(6, 4))
    for shape in ((7, 9), (9, 20)):
        assert float(exported.call(ramp(*shape))) == float(fn(ramp(*shape)))


def test_a_function_that_fails_at_other_sizes() -> None:
    table = ramp(6)

    def fn(x: Any) -> Any:
        return (x.reshape(int(x.shape[0])) + table[: x.shape[0]]) * math.sqrt(x.shape[0])

    executor = _executor(fn)
    for n in (4, 5, 6, 4):
        assert_like_jit(executor, fn, ramp(n))
    with pytest.raises(TypeError, match=r"add got incompatible shapes|Incompatible shapes"):
        executor(ramp(7))
    assert_like_jit(executor, fn, ramp(5))


def test_a_size_that_decides_what_is_done_keeps_its_value() -> None:
    """A loop over positions is a program for every length, and each serves all batches."""

    def fn(x: Any) -> Any:
        h = jnp.zeros(x.shape[0])
        for t in range(x.shape[1]):
            h = jnp.tanh(h + x[:, t])
        return h

    executor = _executor(fn, "b, s")
    for b, s in ((3, 5), (4, 5), (7, 5), (4, 3), (3, 3), (6, 5)):
        assert_like_jit(executor, fn, ramp(b, s) / 9)
    stats = executor.stats()
    assert stats.fallback_calls == 0
    assert {tuple(dict(b.sizes).values()) for b in stats.buckets} == {(4, 5), (8, 5), (4, 3)}


def test_refusals_name_the_difference() -> None:
    leaf = Leaf("x", ("n",), np.dtype(np.float32))
    tree = jax.tree_util.tree_structure(((0,), {}))
    for fn, said in [
        (lambda x: sum(x[i] for i in range(x.shape[0])), "different things at different sizes"),
        (lambda x: [x] * int(x.shape[0]), "more arrays at one size"),
    ]:
        with pytest.raises(TraceRefused, match=said):
            pair(Tracer(fn, tree, [leaf]), {"n": 5})


def test_errors_and_the_strict_policy() -> None:
    executor = BucketedExec(lambda x: sum(x[i] for i in range(x.shape[0])), fallback=Fallback.ERROR)
    executor = executor.with_pow2()
    with pytest.raises(FallbackError, match="^a Python loop"):
        executor(ramp(5))
    with pytest.raises(ZeroDivisionError):
        _executor(lambda x: x * (1 / (int(x.shape[0]) - 5)))(ramp(5))


@pytest.mark.parametrize("check", [Check.POISON, Check.EXACT, Check.EXACT_ALWAYS])
def test_checked_execution(check: Check) -> None:
    fn = lambda x: (x * np.arange(x.shape[0], dtype=np.float32)).sum() / math.sqrt(len(x))  # noqa: E731
    executor = BucketedExec(fn, dynamic_axes="n", check=check).with_pow2()
    for n in (5, 6, 5, 3):
        assert_like_jit(executor, fn, ramp(n))


def test_several_threads() -> None:
    fn = lambda x: x * np.arange(x.shape[0], dtype=np.float32) / math.sqrt(x.shape[0])  # noqa: E731
    executor = _executor(fn)

    def work(start: int) -> None:
        for n in range(start, start + 12):
            assert_same(executor(ramp(n)), jax.jit(fn)(ramp(n)))

    in_threads(work, (3, 5, 7, 9))
    assert executor.stats().compiles == 4  # 4, 8, 16, 32
