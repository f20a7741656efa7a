"""A call of the executor returns what a call of `jax.jit` returns."""

import copy
import dataclasses
import functools
import operator
import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec, CompileBudget, Fallback, strategies
from bucketjit._runtime import buckets
from bucketjit.errors import FallbackError, FallbackWarning, MaskingError, SpecError
from bucketjit.types import CacheInfo
from tests.comparison import assert_as_jit, assert_like_jit, assert_same, ramp, unrolled

SIZES = (1, 3, 4, 5, 3)


class Point(NamedTuple):
    x: Any
    y: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "n"], meta_fields=["name"])
@dataclasses.dataclass
class State:
    w: Any
    n: Any
    name: str = "state"


# --- outputs -----------------------------------------------------------------------------------

OUTPUTS: dict[str, Callable[[Any], Any]] = {
    "same shape": lambda x: x * 2,
    "returned unchanged": lambda x: x,
    "returned twice": lambda x: (x, x, x + 1),
    "scalar": lambda x: x.sum(),
    "static array next to it": lambda x: (jnp.arange(3), x + 1),
    "larger": lambda x: jnp.concatenate([x, x, jnp.ones(1)]),
    "smaller": lambda x: x[: x.shape[0] // 2 + 1],
    "product of sizes": lambda x: jnp.outer(x, x),
    "its size": lambda x: x.shape[0],
    "expression of its size": lambda x: (2 * x.shape[0] + 1, x.size),
    "size as an array": lambda x: jnp.asarray(x.shape[0]) * x.dtype.type(0.5),
    "Python numbers": lambda x: (1, 2.5, True, x),
    "NumPy arrays": lambda x: (np.arange(3), np.float64(2.0), x),
    "nothing": lambda x: None,
    "empty containers": lambda x: ((), [], {}, None),
    "dataclass": lambda x: State(x * 3, x.shape[0], "other"),
    "booleans": lambda x: (x > 2, (x > 2).any()),
    "weakly typed": lambda x: jnp.broadcast_to(1.5, x.shape),
    "weakly typed scalar": lambda x: jnp.asarray(2.0) * 3,
    "constant of its shape": lambda x: jnp.zeros(x.shape, jnp.bfloat16),
    "typed keys": lambda x: jax.random.split(jax.random.key(3), 2),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name: str) -> None:
    fn = OUTPUTS[name]
    executor = BucketedExec(fn).with_pow2()
    for n in SIZES:
        assert_like_jit(executor, fn, ramp(n))
    assert executor.cache_size() == 3


# --- inputs ------------------------------------------------------------------------------------

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn"),
]


def _double(x: Any) -> Any:
    return x if x.dtype == bool else x + x


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", ["numpy", "jax"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: str, kind: str) -> None:
    executor = BucketedExec(_double).with_pow2()
    for n in (1, 3, 4, 3):
        x = ramp(n, dtype=jnp.dtype(dtype))
        assert_like_jit(executor, _double, x if kind == "numpy" else jnp.asarray(x))
    assert executor.cache_size() == 2


@pytest.mark.parametrize(
    ("axes", "shapes"),
    [
        ("b, s", [(3, 5), (4, 8), (1, 7), (3, 8), (4, 5)]),
        ("b, s", [(0, 2), (3, 2), (0, 2), (4, 2), (0, 2)]),
        ("b, _", [(3, 0), (4, 0), (5, 0)]),
    ],
    ids=["two open axes", "size zero", "a static axis without elements"],
)
def test_shapes(axes: str, shapes: list[tuple[int, int]]) -> None:
    fn = lambda x: (x * 2, x.sum(1), x.T, x.shape[0], jnp.concatenate([x, x]))  # noqa: E731
    executor = BucketedExec(fn, dynamic_axes=axes).with_pow2()
    for shape in shapes:
        assert_like_jit(executor, fn, ramp(*shape))
    assert executor.stats().fallback_calls == 0


def test_scalar_arrays_of_every_kind() -> None:
    executor = BucketedExec(lambda x, c: (x * c, c + 1)).with_pow2()
    scalars = [np.array(2.0), np.float32(2), np.float16(2), jnp.asarray(2.0), jnp.float32(2)]
    for c in [*scalars, np.int64(2), np.bool_(True), np.array(2, np.uint8)]:
        for n in (3, 4):
            assert_as_jit(executor, ramp(n), c)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("scalar", [2, 2.5, True, 1 + 2j, -7])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "bool", "complex64"])
def test_python_scalars_stay_weakly_typed(scalar: Any, dtype: str) -> None:
    executor = BucketedExec(lambda x, c: (x * c, c, c + 1)).with_pow2()
    for n in (3, 4, 3):
        assert_as_jit(executor, ramp(n, dtype=jnp.dtype(dtype)), scalar)


def test_committed_arrays_give_committed_results() -> None:
    executor = BucketedExec(lambda x, c: (x * c, c + 1, x.sum())).with_pow2()
    device = jax.devices()[0]
    for n in (3, 4):
        for x in (ramp(n), jnp.asarray(ramp(n)), jax.device_put(ramp(n), device)):
            for c in (np.float32(1), jax.device_put(np.float32(1), device)):
                assert_as_jit(executor, x, c)


# --- keys --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_one_key_as_an_argument(make: Callable[[int], Any]) -> None:
    fn = lambda key, x: (jax.random.uniform(key), x, jax.random.fold_in(key, 3))  # noqa: E731
    executor = BucketedExec(fn, dynamic_axes=(None, "b")).with_pow2()
    for n in (1, 3, 4):
        assert_like_jit(executor, fn, make(n), ramp(n))
    assert executor.cache_size() == 2


@pytest.mark.parametrize("kind", ["typed", "raw", "raw on the host"])
def test_a_batch_of_keys(kind: str) -> None:
    executor = BucketedExec(lambda keys, x: (keys, x), dynamic_axes=("b, ...", "b")).with_pow2()
    for n in (1, 3, 4, 5):
        keys = jax.random.split(jax.random.key(n), n)
        if kind != "typed":
            keys = jax.random.key_data(keys)
        assert_as_jit(executor, np.asarray(keys) if "host" in kind else keys, ramp(n))
    assert executor.cache_size() == 3


def test_keys_of_every_generator() -> None:
    executor = BucketedExec(lambda keys: (keys, jnp.arange(3))).with_pow2()
    for impl in ("threefry2x32", "rbg", "unsafe_rbg", "threefry2x32"):
        for n in (3, 4):
            assert_as_jit(executor, jax.random.split(jax.random.key(0, impl=impl), n))


# --- trees and keyword arguments ---------------------------------------------------------------


def test_containers_as_arguments() -> None:
    def fn(state: State, point: Point, extra: Any) -> Any:
        return {"s": State(state.w * point.x, state.n, state.name), "p": point, "e": extra}

    executor = BucketedExec(fn, dynamic_axes=(None, "b", None)).with_pow2()
    for n in (1, 3, 4, 5):
        args = (
            State(np.float32(3), jnp.arange(2), "a"),
            Point(ramp(n), ramp(n, dtype=int)),
            [None, {"k": (1, 2.0)}, ()],
        )
        assert_like_jit(executor, fn, *args)
    assert executor.cache_size() == 3


def test_static_fields_of_a_dataclass_are_part_of_the_signature() -> None:
    executor = BucketedExec(lambda s, x: x * len(s.name)).with_pow2()
    for n in (3, 4):
        for name in ("a", "ab", "a"):
            assert_as_jit(executor, State(1, 2, name), ramp(n))
    assert executor.cache_size() == 2


def test_a_tree_that_changes() -> None:
    executor = BucketedExec(lambda trees, x: (jax.tree.map(lambda a: a + 1, trees), x)).with_pow2()
    for trees in ((), (1.0,), {"a": 1.0}, {"b": 1.0}, None, [None, 1], {"a": 1.0}):
        for n in (3, 4):
            assert_as_jit(executor, trees, ramp(n))


def test_keyword_arguments() -> None:
    def fn(x: Any, *, scale: Any = 2.0, shift: Any = None) -> Any:
        return x * scale if shift is None else x * scale + shift

    executor = BucketedExec(fn).with_pow2()
    for n in (3, 4, 5):
        x = ramp(n)
        assert_like_jit(executor, fn, x)
        assert_like_jit(executor, fn, x=x)
        assert_like_jit(executor, fn, x, scale=3)
        assert_like_jit(executor, fn, x, shift=ramp(n), scale=jnp.float32(2))
        assert_like_jit(executor, fn, x, scale=jnp.float32(2), shift=ramp(n))
    assert executor.cache_size() == 8  # four ways to call it, two buckets


def test_defaults_and_variadic_parameters() -> None:
    def fn(x: Any, *rest: Any, factor: Any = 2, **named: Any) -> Any:
        return [factor * a for a in (x, *rest, *named.values())]

    executor = BucketedExec(fn).with_pow2()
    for n in (3, 4):
        x = ramp(n)
        assert_like_jit(executor, fn, x)
        assert_like_jit(executor, fn, x, x + 1, 3.0)
        assert_like_jit(executor, fn, x, b=x, a=x + 2)


CALLABLES: dict[str, Callable[[], Callable[..., Any]]] = {
    "partial": lambda: functools.partial(lambda a, x: x + a, 2.0),
    "partial with a keyword": lambda: functools.partial(lambda x, a: x + a, a=2.0),
    "partial of JAX": lambda: jax.tree_util.Partial(lambda x, a: x + a, a=jnp.float32(2)),
    "jax.numpy function": lambda: jnp.exp,
    "ufunc": lambda: jnp.negative,
    "jitted": lambda: jax.jit(lambda x: x + 1),
    "bound method": lambda: _Model(3.0).apply,
    "object": lambda: _Model(3.0),
    "gradient": lambda: jax.grad(lambda x: (x * x).sum()),
    "checkpointed": lambda: jax.checkpoint(lambda x: x * 2),
    "another executor": lambda: BucketedExec(lambda x: x * 2).with_linear(8),
}


class _Model:
    """Has attributes that an executor might call its own."""

    def __init__(self, factor: float) -> None:
        self._config = self._cache = self._lock = self._routes = self._signer = factor
        self._counters = self._refused = factor

    def apply(self, x: Any) -> Any:
        return x * self._config

    __call__ = apply


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", CALLABLES)
def test_everything_that_can_be_called(name: str) -> None:
    fn = CALLABLES[name]()
    executor = BucketedExec(fn).with_pow2()
    for n in (3, 4, 5):
        assert_like_jit(executor, fn, ramp(n))
    assert executor.cache_size() == 2
    assert "BucketedExec" in repr(executor)
    assert_like_jit(BucketedExec(fn), fn, ramp(3))


def test_a_closure_over_arrays() -> None:
    w, keys = jnp.asarray(ramp(3)), jax.random.key(1)
    host = ramp(3)

    executor = BucketedExec(lambda x: (x @ w + host.sum(), jax.random.uniform(keys))).with_pow2()
    for n in (1, 3, 4):
        assert_as_jit(executor, ramp(n, 3))


# --- static arguments --------------------------------------------------------------------------


def _static(x: Any, how: Any, power: Any = 1) -> Any:
    return (x.sum() if how == "sum" else x.max()) * x**power


@pytest.mark.parametrize(
    "options", [{"static_argnums": (1, 2)}, {"static_argnames": ("how", "power")}], ids=str
)
def test_static_arguments(options: dict[str, Any]) -> None:
    executor = BucketedExec(_static, **options).with_pow2()
    jitted = jax.jit(_static, **options)
    for n in (3, 4, 3):
        for how in ("sum", "max"):
            for power in (1, 2, 1):
                x = ramp(n)
                assert_same(executor(x, how, power), jitted(x, how, power))
                assert_same(executor(x, how, power=power), jitted(x, how, power=power))
                assert_same(executor(x, power=power, how=how), jitted(x, power=power, how=how))
        assert_same(executor(x, "sum"), jitted(x, "sum"))


def test_negative_static_argnums() -> None:
    executor = BucketedExec(_static, static_argnums=(-2, -1)).with_pow2()
    for n in (3, 4):
        assert_same(executor(ramp(n), "max", 2), jax.jit(lambda x: _static(x, "max", 2))(ramp(n)))


def test_static_arguments_may_be_anything_hashable() -> None:
    executor = BucketedExec(lambda x, f: f(x), static_argnums=1).with_pow2()
    for f in (jnp.exp, operator.neg, functools.partial(jnp.power, 2.0), jnp.exp):
        assert_same(executor(ramp(3), f), jax.jit(f)(ramp(3)), rtol=1e-5)


def test_static_values_that_are_equal_but_of_other_types_are_told_apart() -> None:
    executor = BucketedExec(lambda x, s: x * (2 if type(s) is float else 3), static_argnums=1)
    executor = executor.with_pow2()
    for n in (3, 4, 3):
        for static, factor in ((1, 3), (1.0, 2), (True, 3), (1, 3), (1.0, 2)):
            np.testing.assert_array_equal(executor(ramp(n), static), factor * ramp(n))


# --- donation ----------------------------------------------------------------------------------


def _train(state: Any, x: Any) -> Any:
    return {"w": state["w"] + x.sum(), "n": state["n"] + 1}, x * 2


@pytest.mark.parametrize("strategy", [strategies.Pow2(), strategies.Exact()], ids=str)
def test_donated_arguments_are_given_away(strategy: Any) -> None:
    executor = BucketedExec(_train, donate_argnums=0, dynamic_axes=(None, "b"))
    executor = executor.with_strategy(strategy)
    state = {"w": jnp.zeros(8), "n": jnp.zeros((), int)}
    total = 0.0
    with warnings.catch_warnings(action="error"):
        for n in (3, 4, 3, 5, 4):
            given = state
            state, doubled = executor(given, ramp(n))
            total += float(ramp(n).sum())
            assert given["w"].is_deleted() and given["n"].is_deleted()
            np.testing.assert_array_equal(doubled, 2 * ramp(n))
        for rows in (3, 5):
            with pytest.raises((RuntimeError, ValueError), match="deleted|donated"):
                executor(given, ramp(rows))
    np.testing.assert_array_equal(state["w"], np.full(8, total))
    assert int(state["n"]) == 5


def test_a_fallback_donates_too() -> None:
    fn = lambda w, x: (w + x.sum(), unrolled(x))  # noqa: E731
    executor = BucketedExec(fn, donate_argnums=0, dynamic_axes=(None, "b")).with_pow2()
    with pytest.warns(FallbackWarning):
        executor(jnp.zeros(4), ramp(3))
    w = jnp.zeros(4)
    executor(w, ramp(3))
    assert w.is_deleted()


# --- memory ------------------------------------------------------------------------------------


def _aligned(n: int, dtype: Any = np.float32) -> np.ndarray:
    """A NumPy array that XLA may use in place: 64-byte aligned."""
    raw = np.zeros(n * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n * np.dtype(dtype).itemsize].view(dtype)


@pytest.mark.parametrize("n", [1500, 4000])
def test_a_caller_may_refill_a_buffer_after_the_call(n: int) -> None:
    """Sizes below their bucket: the executor pads into memory of its own."""

    def fn(x: Any) -> Any:
        y = x
        for _ in range(20):
            y = jnp.sin(y) + x
        return y, x

    executor = BucketedExec(fn).with_pow2()
    buffer = _aligned(n)
    results, contents = [], []
    for i in range(12):
        buffer[:] = i + 1
        contents.append(buffer.copy())
        results.append(executor(buffer))
        buffer[:] = -1000.0
    for result, x in zip(results, contents, strict=True):
        assert_same(result, jax.jit(fn)(x), rtol=1e-5)


def test_writing_into_an_input_does_not_change_a_result_that_returns_it() -> None:
    executor = BucketedExec(lambda x: (x, x + 0)).with_pow2()
    for n in (3, 1000):
        x = _aligned(n)
        x[:] = 7
        same, copy = executor(x)
        x[:] = 0
        np.testing.assert_array_equal(same, np.full(n, 7.0))
        np.testing.assert_array_equal(copy, np.full(n, 7.0))


# --- configuration -----------------------------------------------------------------------------


def test_x64_switched_between_calls() -> None:
    fn = lambda x, n: (x * 2, x.shape[0], n + 1, jnp.arange(3.0), x.sum())  # noqa: E731
    executor = BucketedExec(fn).with_pow2()
    for enabled in (False, True, False, True, True, False):
        with jax.enable_x64(enabled):
            for n in (3, 4):
                for dtype in (np.float64, np.float32, np.int64):
                    assert_like_jit(executor, fn, ramp(n, dtype=dtype), 3)


def test_debug_nans_stays_quiet_where_exact_has_none() -> None:
    def fn(x: Any) -> Any:
        z = jnp.log(x) / x  # padding: log(0) / 0
        return z, z.sum(), (1 / x).mean(), jnp.sqrt(x - 0.5)

    executor = BucketedExec(fn).with_pow2()
    with jax.debug_nans(True), jax.debug_infs(True):
        for n in (1, 3, 4, 5):
            got = executor(ramp(n))
            assert_same(got, jax.jit(fn)(ramp(n)), rtol=1e-5)


def test_debug_nans_still_finds_a_nan() -> None:
    executor = BucketedExec(lambda x: jnp.log(x)).with_pow2()
    executor(ramp(3))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        executor(-ramp(3))


# --- fallback ----------------------------------------------------------------------------------


def test_a_fallback_is_exact_warns_once_and_counts() -> None:
    executor = BucketedExec(unrolled).with_pow2()
    with warnings.catch_warnings(record=True, action="always") as caught:
        for n in (3, 4, 3, 3, 5):
            got = executor(ramp(n))
            assert_same(got, jax.jit(unrolled)(ramp(n)))
    (warning,) = caught
    assert issubclass(warning.category, FallbackWarning)
    assert warning.filename == __file__
    assert "unrolled" in str(warning.message)
    assert "Python loop" in str(warning.message)
    stats = executor.stats()
    assert stats.fallback_calls == 5
    (reason,) = stats.fallback_reasons
    assert stats.fallback_reasons[reason] == 5
    assert reason in str(warning.message)
    assert stats.compiles == executor.cache_size() == 3
    assert all(b.exact for b in stats.buckets)


def _ran(x: Any) -> Any:
    jax.debug.callback(_ran.calls.append, x.sum())  # type: ignore[attr-defined]
    return unrolled(x)


def test_fallback_error_raises_before_anything_runs() -> None:
    _ran.calls = []  # type: ignore[attr-defined]
    executor = BucketedExec(_ran, fallback=Fallback.ERROR).with_pow2()
    for n in (3, 4, 3):
        with pytest.raises(FallbackError, match="Python loop") as raised:
            executor(ramp(n))
        assert raised.value.reason and raised.value.remedy
        assert isinstance(raised.value, MaskingError)
    jax.effects_barrier()
    assert _ran.calls == []  # type: ignore[attr-defined]
    assert executor.cache_size() == 0
    assert executor.stats().fallback_calls == 0


unmasked_p = jax.extend.core.Primitive("unmasked")
unmasked_p.def_abstract_eval(lambda x: x)
unmasked_p.def_impl(lambda x: jnp.asarray(np.asarray(x) * 2))  # no JAX to look into
jax.interpreters.mlir.register_lowering(
    unmasked_p, jax.interpreters.mlir.lower_fun(lambda x: x * 2, multiple_results=False)
)


def _unmasked(x: Any) -> Any:
    return unmasked_p.bind(x) + 1


wrapped_p = jax.extend.core.Primitive("wrapped")
wrapped_p.def_abstract_eval(lambda x, *, options: jax.core.ShapedArray(x.shape[1:], x.dtype))
wrapped_p.def_impl(lambda x, *, options: (x - x.mean(0)).max(0) * len(options))
jax.interpreters.mlir.register_lowering(
    wrapped_p, jax.interpreters.mlir.lower_fun(wrapped_p.impl, multiple_results=False)
)


def test_a_primitive_of_another_library_is_looked_into() -> None:
    fn = lambda x: jax.jit(lambda y: wrapped_p.bind(y, options=("a", "b")))(x) + 1  # noqa: E731
    executor = BucketedExec(fn, fallback=Fallback.ERROR).with_pow2()
    for n in (3, 4, 5):
        assert_like_jit(executor, fn, ramp(n, 2))
    assert executor.cache_size() == 2
    # One that decides by a size makes a guard.
    decides = jax.extend.core.Primitive("decides")
    decides.def_abstract_eval(lambda x: x)
    decides.def_impl(lambda x: x * 2 if x.shape[0] == 4 else x)
    lowering = jax.interpreters.mlir.lower_fun(decides.impl, multiple_results=False)
    jax.interpreters.mlir.register_lowering(decides, lowering)
    executor = BucketedExec(decides.bind, dynamic_axes="n", fallback=Fallback.ERROR).with_pow2()
    for n in (3, 4, 2, 7):
        np.testing.assert_array_equal(executor(ramp(n)), ramp(n) * (1 + (n == 4)))


def test_with_rules_teaches_a_primitive_of_ones_own() -> None:
    executor = BucketedExec(_unmasked, fallback=Fallback.ERROR).with_pow2()
    taught = executor.with_rules({unmasked_p: lambda ctx, x: ctx.bind(x)})
    for n in (3, 4, 5):
        assert_like_jit(taught, _unmasked, ramp(n))
    assert taught.cache_size() == 2
    with pytest.raises(FallbackError):
        executor(ramp(3))


def test_with_rules_replaces_a_rule() -> None:
    seen = []

    def total(ctx: Any, operand: Any) -> Any:
        seen.append((ctx.primitive.name, operand.shape, str(ctx.in_shapes[0])))
        return ctx.bind(ctx.fill(operand, axes=ctx.params["axes"], value=0))

    executor = BucketedExec(lambda x: x.sum()).with_pow2().with_rules({lax.reduce_sum_p: total})
    assert float(executor(ramp(3))) == 6
    assert seen == [("reduce_sum", (4,), "(batch,)")]


def _raises(ctx: Any, x: Any, y: Any) -> Any:
    raise ZeroDivisionError("in the rule")


UNMASKED: dict[str, tuple[Any, Any, str]] = {
    "no rule": (_unmasked, {}, "unmasked: no masking rule"),
    "an error": (lambda x: x * 2, {lax.mul_p: _raises}, "mul: .*ZeroDivisionError: in the rule"),
    "a rule of the wrong shape": (
        lambda x: x * 2,
        {lax.mul_p: lambda ctx, x, y: x[:1]},
        r"mul: its rule gave shape \(1,\), expected \(4,\)",
    ),
}


@pytest.mark.parametrize("name", UNMASKED)
def test_what_no_rule_masks_falls_back_and_is_named(name: str) -> None:
    fn, rules, told = UNMASKED[name]
    executor = BucketedExec(fn).with_pow2().with_rules(rules)
    with pytest.warns(FallbackWarning, match=f"(?s){told}") as caught:
        assert_like_jit(executor, fn, ramp(3))
    assert "test_executor.py" in str(caught[0].message)
    for n in (4, 3):
        assert_like_jit(executor, fn, ramp(n))
    assert executor.stats().fallback_calls == 3
    strict = BucketedExec(fn, fallback=Fallback.ERROR).with_pow2().with_rules(rules)
    with pytest.raises(FallbackError, match=f"(?s){told}"):
        strict(ramp(3))


# --- functions that raise ----------------------------------------------------------------------


def test_a_function_that_raises_while_traced_leaves_everything_usable() -> None:
    broken = False

    def fn(x: Any) -> Any:
        if broken:
            raise RuntimeError("not now")
        return x * 2

    executor = BucketedExec(fn).with_pow2()
    executor(ramp(3))
    broken = True
    for n in (5, 9, 5):
        # Buckets 8 and 16 are compiled from the program that is traced already.
        np.testing.assert_array_equal(executor(ramp(n)), 2 * ramp(n))
    before = executor.stats().buckets
    with pytest.raises(RuntimeError, match="not now"):
        executor(ramp(3, dtype=int))
    assert executor.stats().buckets == before
    broken = False
    np.testing.assert_array_equal(executor(ramp(3, dtype=int)), 2 * ramp(3, dtype=int))
    np.testing.assert_array_equal(executor(ramp(3)), 2 * ramp(3))


def test_the_users_own_exception_comes_through_whatever_the_policy() -> None:
    class Own(Exception):
        pass

    def fn(x: Any) -> Any:
        raise Own("mine")

    for fallback in Fallback:
        executor = BucketedExec(fn, fallback=fallback).with_pow2()
        for _ in range(2):
            with pytest.raises(Own, match="mine"):
                executor(ramp(3))
        assert executor.cache_size() == 0


# --- builders ----------------------------------------------------------------------------------

BUILDERS: dict[str, Callable[[BucketedExec], BucketedExec]] = {
    "with_pow2": lambda e: e.with_pow2(),
    "with_pow2 of a dim": lambda e: e.with_pow2("b", min=4, max=64, multiple_of=2),
    "with_linear": lambda e: e.with_linear(8),
    "with_exponential": lambda e: e.with_exponential(1.5),
    "with_buckets": lambda e: e.with_buckets([30, 60, 90]),
    "with_strategy": lambda e: e.with_strategy(strategies.Linear(3)),
    "with_exact": lambda e: e.with_exact(),
    "with_dynamic_axes": lambda e: e.with_dynamic_axes("b"),
    "with_rules": lambda e: e.with_rules({}),
    "with_maxsize": lambda e: e.with_maxsize(3),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_builders_return_a_new_executor_with_a_cache_of_its_own(name: str) -> None:
    first = BucketedExec(lambda x: x * 2, dynamic_axes="b")
    first(ramp(3))
    second = BUILDERS[name](first)
    assert second is not first and isinstance(second, BucketedExec)
    assert (first.cache_size(), second.cache_size()) == (1, 0)
    second(ramp(3))
    second(ramp(5))
    assert first.cache_size() == 1 and first.stats().calls == 1
    second.cache_clear()
    assert first.cache_size() == 1
    np.testing.assert_array_equal(first(ramp(3)), 2 * ramp(3))


def test_builders_keep_what_was_set_before() -> None:
    executor = (
        BucketedExec(_train, donate_argnums=0, fallback=Fallback.ERROR)
        .with_dynamic_axes((None, "b"))
        .with_pow2(min=4)
        .with_maxsize(2)
        .with_rules({})
    )
    w = jnp.zeros(3)
    executor({"w": w, "n": jnp.zeros((), int)}, ramp(1))
    assert w.is_deleted()
    assert executor.cache_info().maxsize == 2
    (bucket,) = executor.stats().buckets
    assert bucket.sizes == {"b": 4}


def test_subclasses_stay_what_they_are() -> None:
    class Mine(BucketedExec):
        pass

    assert type(Mine(jnp.exp).with_pow2()) is Mine


# --- cache and statistics ----------------------------------------------------------------------


def test_cache_info_counts_like_functools() -> None:
    executor = BucketedExec(lambda x: x * 2).with_pow2()
    theirs = functools.lru_cache(maxsize=128)(abs).cache_info()
    assert executor.cache_info() == theirs and CacheInfo._fields == theirs._fields
    for n in (3, 4, 3, 5, 3):
        executor(ramp(n))
    assert executor.cache_info() == CacheInfo(hits=3, misses=2, maxsize=128, currsize=2)
    executor.cache_clear()
    assert executor.cache_info() == CacheInfo(0, 0, 128, 0)
    stats = executor.stats()
    assert (stats.calls, stats.compiles, stats.buckets) == (0, 0, ())
    np.testing.assert_array_equal(executor(ramp(3)), 2 * ramp(3))
    assert executor.cache_size() == 1


@pytest.mark.parametrize("fn", [unrolled, _unmasked])
def test_every_call_is_a_hit_or_a_miss(fn: Any) -> None:
    executor = BucketedExec(fn).with_pow2()
    with pytest.warns(FallbackWarning):
        for n in (3, 4, 0, 3, 5, 3):
            executor(ramp(n))
    stats = executor.stats()
    assert (stats.calls, stats.hits, stats.misses, stats.compiles) == (6, 2, 4, 4)


def test_the_default_bound_is_safe() -> None:
    """Some 450 executables of a small transformer end the process."""
    maxsize = BucketedExec(jnp.exp).cache_info().maxsize
    assert maxsize is not None and maxsize <= 256


# --- strategies --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "shape", "sizes"),
    [
        (
            lambda e: e.with_linear(10).with_pow2("b", min=4).with_buckets([6, 12], "s"),
            (3, 7, 5),
            {"b": 4, "s": 12, "t": 10},
        ),
        (lambda e: e.with_pow2("b"), (3, 5, 6), {"b": 4, "s": 5, "t": 6}),
        (lambda e: e.with_pow2("b").with_linear(10, "b"), (3, 5, 6), {"b": 10, "s": 5, "t": 6}),
    ],
    ids=["one for the others", "the others are exact", "the last one counts"],
)
def test_a_strategy_per_dimension(build: Any, shape: tuple[int, ...], sizes: Any) -> None:
    executor = build(BucketedExec(lambda x: x * 2, dynamic_axes="b, s, t"))
    np.testing.assert_array_equal(executor(ramp(*shape)), 2 * ramp(*shape))
    (bucket,) = executor.stats().buckets
    assert bucket.sizes == sizes


def test_bounds_may_be_ints_of_numpy() -> None:
    four = np.int64(4)
    fn = BucketedExec(jnp.sum, compile_budget=CompileBudget(compiles=four))
    fn = fn.with_maxsize(maxsize=four, max_bytes=np.int64(2**40)).with_pow2(min=four)
    assert fn.with_background_compile(four, queue=four)(np.ones(3, np.float32)) == 3
    with pytest.raises(SpecError, match="maxsize must be a positive int"):
        fn.with_maxsize(np.int64(0))


def test_snapshots_can_be_copied_pickled_and_hashed() -> None:
    executor = BucketedExec(lambda x: x * 2).with_pow2()
    executor(ramp(3))
    stats = executor.stats()
    for twin in (pickle.loads(pickle.dumps(stats)), copy.deepcopy(stats)):
        assert twin == stats and hash(twin) == hash(stats)
    assert dataclasses.asdict(stats)["buckets"][0]["sizes"] == {"batch": 4}


def test_cut_buckets_are_remembered_of_so_many_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_CUT", 4)
    executor = BucketedExec(lambda x: x * 2 if x.shape[0] > 40 else x * 3).with_pow2()
    for n in range(40, 32, -1):
        np.testing.assert_array_equal(executor(ramp(n)), 3 * ramp(n))
    assert [len(known) for known in executor._engine.buckets._cut.values()] == [4]
    assert [dict(b.sizes) for b in executor.stats().buckets] == [{"batch": 40}]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "fn",
    [
        jnp.argsort,
        lambda x: jnp.searchsorted(jnp.sort(x), x),
        lambda x: jax.random.permutation(jax.random.key(0), x.shape[0]),
        lambda x: jnp.nonzero(x > 2, size=2),
        lambda x: jnp.unique(x, size=2, return_index=True),
        lambda x: jnp.bincount(x.astype(int), length=3),
        lambda x: jax.lax.top_k(x, 1),
        jnp.argmax,
    ],
)
def test_indices_have_the_dtype_of_the_exact_run(fn: Any) -> None:
    with jax.enable_x64(True):
        executor = BucketedExec(fn).with_pow2()
        for n in (3, 5):
            assert_like_jit(executor, fn, ramp(n))
        assert executor.stats().fallback_calls == 0


@pytest.mark.parametrize("name", ["sizes", "constants", "args", "self", "fn"])
def test_a_keyword_argument_may_have_any_name(name: str) -> None:
    executor = BucketedExec(lambda x, **factors: jnp.sum(x * factors[name])).with_pow2()
    assert float(executor(np.ones(5, np.float32), **{name: np.float32(2)})) == 10
    assert executor.stats().fallback_calls == 0
