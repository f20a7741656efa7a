"""Executors inside ``jit``, ``vmap``, ``grad`` and the like."""

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec, Check, Fallback
from bucketjit.errors import FallbackError, FallbackWarning
from tests.comparison import assert_same, ramp

SIZES = (3, 5, 7, 4, 8, 1)


def _smooth(x: Any) -> Any:
    """No derivative of it is the same everywhere, and padded rows of it are infinite."""
    return jnp.cumsum(jnp.log(x * x)) * x.mean() + jnp.sqrt(jnp.abs(x))


def _square(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: (fn(*args) ** 2).sum()


def _bucketed(fn: Callable[..., Any] = _smooth, axes: Any = "n") -> BucketedExec:
    return BucketedExec(fn, dynamic_axes=axes).with_pow2()


def _close(got: Any, want: Any) -> None:
    assert_same(jax.tree.map(jnp.asarray, got), jax.tree.map(jnp.asarray, want), rtol=2e-4)


TRANSFORMED: dict[str, Callable[[Any, Any], Any]] = {
    "jit": lambda f, x: jax.jit(f)(x),
    "vmap": lambda f, x: jax.vmap(f)(jnp.stack([x, 2 * x])),
    "grad": lambda f, x: jax.grad(_square(f))(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x + 1,)),
    "vjp": lambda f, x: jax.vjp(f, x)[1](x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "hessian": lambda f, x: jax.hessian(_square(f))(x),
    "grad of grad": lambda f, x: jax.grad(lambda y: jax.grad(_square(f))(y).sum())(x),
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(_square(f)))(jnp.stack([x, 2 * x])),
    "grad of vmap": lambda f, x: jax.grad(lambda y: jax.vmap(f)(jnp.stack([y, y])).sum())(x),
    "jit of grad": lambda f, x: jax.jit(jax.grad(_square(f)))(x),
    "grad of jit": lambda f, x: jax.grad(jax.jit(_square(f)))(x),
    "checkpoint": lambda f, x: jax.grad(jax.checkpoint(_square(f)))(x),
    "scan": lambda f, x: lax.scan(lambda c, _: (f(c + 1), c.sum()), x, None, length=2),
    "fori_loop": lambda f, x: lax.fori_loop(0, 3, lambda i, c: c + f(x), x),
    "cond": lambda f, x: lax.cond(x[0] > 0, f, lambda y: y, x),
    "make_jaxpr": lambda f, x: jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(f)(x))(x),
    "grad by a scale": lambda f, x: jax.grad(lambda a: f(a * x).sum())(2.0),
    "integer tangents": lambda f, x: jax.jvp(lambda y: (f(y), y.astype(int)), (x,), (x,))[0],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_results_under_transformations(name: str) -> None:
    executor, transformed = _bucketed(), TRANSFORMED[name]
    exact = jax.jit(lambda x: transformed(_smooth, x))
    for n in (3, 5):
        x = jnp.asarray(ramp(n)) / n + 0.5
        _close(transformed(executor, x), exact(x))
    assert executor.stats().fallback_calls == 0


def test_shapes_and_programs_of_an_executor() -> None:
    executor = _bucketed()
    assert jax.eval_shape(executor, jnp.zeros(5)).shape == (5,)
    struct = jax.ShapeDtypeStruct((3,), jnp.float32)
    got = jax.eval_shape(_bucketed(lambda x: {"y": x * 2}), struct)
    assert got["y"].shape == (3,) and got["y"].dtype == jnp.float32
    assert "log" in str(jax.make_jaxpr(executor)(jnp.zeros(5)))  # the function itself is inlined
    assert executor.stats().compiles == 0


def test_an_executor_inside_another_inlines() -> None:
    inner = _bucketed()
    outer = _bucketed(lambda x: inner(x) * 2)
    for n in SIZES:
        _close(outer(ramp(n)), 2 * jax.jit(_smooth)(ramp(n)))
    assert (outer.cache_size(), inner.cache_size()) == (3, 0)


def test_static_and_keyword_arguments() -> None:
    executor = BucketedExec(lambda x, how, *, s: x.sum() * s, static_argnums=1).with_pow2()
    got = jax.grad(lambda x: executor(x, "sum", s=3.0))(jnp.ones(3))
    np.testing.assert_array_equal(got, np.full(3, 3.0))


def _loss(w: Any, x: Any, y: Any) -> Any:
    hidden = jnp.log1p(jnp.exp(x @ w["w"] + w["b"]))
    return ((hidden - y) ** 2).mean()


WEIGHTS = {"w": ramp(3, 2) / 9, "b": ramp(2)}


def test_a_loss_and_its_gradient_are_one_executable_per_bucket() -> None:
    executor = _bucketed(_loss, (None, "b, _", "b, _"))
    for n in SIZES:
        args = (WEIGHTS, ramp(n, 3) / n, ramp(n, 2) / n)
        _close(jax.value_and_grad(executor)(*args), jax.jit(jax.value_and_grad(_loss))(*args))
    assert executor.stats().compiles == executor.cache_size() == 3
    for n in SIZES:
        args = (WEIGHTS, ramp(n, 3) / n, ramp(n, 2) / n)
        got = jax.grad(lambda *a: executor(*a) / 3, argnums=(0, 1))(*args)
        _close(got, jax.jit(jax.grad(lambda *a: _loss(*a) / 3, argnums=(0, 1)))(*args))
    assert executor.cache_size() == 9  # by other arguments, then plain, and pulled back


def test_speculation_stops_where_it_does_not_pay() -> None:
    executor = _bucketed(_loss, (None, "b, _", "b, _"))
    scaled = jax.grad(lambda *a: executor(*a) * 3)
    for n in (3, 4, 3, 4, 3, 4):
        scaled(WEIGHTS, ramp(n, 3), ramp(n, 2))
    by_hits = {b.hits for b in executor.stats().buckets}
    assert executor.cache_size() == 3 and min(by_hits) == 0


def test_effects_happen_once() -> None:
    seen: list[Any] = []

    def fn(x: Any) -> Any:
        jax.debug.callback(lambda t: seen.append(float(t)), x.sum())
        return jnp.tanh(x)

    executor = _bucketed(fn)
    with pytest.warns(FallbackWarning, match="once more"):
        _close(jax.vjp(executor, ramp(3))[1](ramp(3)), jax.vjp(jnp.tanh, ramp(3))[1](ramp(3)))
    jax.effects_barrier()
    assert seen == [6.0]


def test_arguments_of_a_differentiated_call_are_not_kept() -> None:
    executor = _bucketed(_square(_smooth))
    x = jnp.asarray(ramp(5))
    alive = weakref.ref(x)
    jax.grad(executor)(x)
    del x
    gc.collect()
    assert alive() is None


DERIVATIVES: dict[str, Callable[[BucketedExec, Any], Any]] = {
    "jvp": lambda e, x: jax.jvp(e, (x,), (x,)),
    "grad": lambda e, x: jax.grad(e)(x),
    "grad of more": lambda e, x: jax.grad(lambda y: 2 * e(y))(x),
    "vjp": lambda e, x: jax.vjp(e, x)[1](jnp.float32(3)),
    "linearize": lambda e, x: jax.linearize(e, x)[1](x),
    "grad of grad": lambda e, x: jax.grad(lambda y: jax.grad(e)(y).sum())(x),
    "jit of grad": lambda e, x: jax.jit(jax.grad(e))(x),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_differentiated_executor_is_freed_with_what_it_holds(name: str) -> None:
    def differentiated() -> list[weakref.ref[Any]]:
        held = jnp.ones(3)
        executor = BucketedExec(lambda x: (x**2 * held).sum()).with_pow2()
        DERIVATIVES[name](executor, np.ones((5, 3), np.float32))
        return [weakref.ref(executor._engine), weakref.ref(held)]

    references = differentiated()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_new_size_is_not_traced_again() -> None:
    traced = []

    def loss(w: Any, x: Any) -> Any:
        traced.append(x.shape)
        return jnp.tanh(x @ w).mean()

    executor = _bucketed(loss, (None, "b, _"))
    for scale in (1, 3):
        gradient = jax.grad(lambda w, x: executor(w, x) * scale)  # noqa: B023
        for n in (5, 6, 5):
            gradient(ramp(2), ramp(n, 2))
    count = len(traced)
    for n in (7, 8):
        for gradient in (jax.grad(executor), jax.grad(lambda w, x: executor(w, x) * 3)):
            gradient(ramp(2), ramp(n, 2))
    assert len(traced) == count


def test_auxiliary_results_of_a_loss() -> None:
    def fn(w: Any, x: Any) -> Any:
        return (x @ w).sum(), {"rows": x.shape[0], "best": jnp.argmax(x, 0), "mean": x.mean(0)}

    executor = _bucketed(fn, (None, "b, _"))
    for n in SIZES:
        got = jax.value_and_grad(executor, has_aux=True)(ramp(3), ramp(n, 3))
        _close(got, jax.value_and_grad(jax.jit(fn), has_aux=True)(ramp(3), ramp(n, 3)))
    assert executor.cache_size() == 3


def test_padding_does_not_reach_the_gradient() -> None:
    """Masked first and differentiated after, a padded logarithm would give NaN."""
    fn = lambda x: jnp.where(x > 0, jnp.log(x), 0.0).sum() + jnp.linalg.norm(x)  # noqa: E731
    executor = _bucketed(fn)
    for n in SIZES:
        _close(jax.grad(executor)(ramp(n)), jax.grad(fn)(ramp(n)))


def test_gradients_of_a_program_of_concrete_traces() -> None:
    fn = lambda x: (x * x * math.sqrt(x.shape[0]) + np.arange(x.shape[0])).sum()  # noqa: E731
    executor = _bucketed(fn)
    for n in (3, 5, 7, 6):
        _close(jax.grad(executor)(ramp(n)), jax.grad(fn)(ramp(n)))
    assert executor.cache_size() == 2


def test_what_falls_back_is_differentiated_as_it_is() -> None:
    fn = lambda x: sum(x[i] ** 2 for i in range(x.shape[0]))  # noqa: E731
    executor = _bucketed(fn)
    with pytest.warns(FallbackWarning, match="Python loop"):
        for n in (3, 5):
            _close(jax.grad(executor)(ramp(n)), 2 * ramp(n))
    assert executor.cache_size() == 0
    assert executor.stats().fallback_calls == 2
    strict = BucketedExec(fn, dynamic_axes="n", fallback=Fallback.ERROR).with_pow2()
    with pytest.raises(FallbackError):
        jax.grad(strict)(ramp(3))


def test_a_closure_over_what_is_differentiated() -> None:
    """Its program must not be kept: it holds a value of this one call."""

    def total(w: Any) -> Any:
        return _bucketed(lambda x: (w * x).sum())(ramp(5))

    with pytest.warns(FallbackWarning, match="closes over a value"):
        assert float(jax.grad(total)(2.0)) == ramp(5).sum()
    w = [3.0]
    executor = _bucketed(lambda x: (w[0] * x).sum())

    def through(value: Any) -> Any:
        w[0] = value
        return executor(ramp(5))

    with pytest.warns(FallbackWarning, match="closes over a value"):
        assert float(jax.grad(through)(2.0)) == ramp(5).sum()
    w[0] = 4.0
    assert float(executor(ramp(5))) == 4 * ramp(5).sum()


def test_strategies_by_dimension_and_static_arguments() -> None:
    def fn(x: Any, power: int, y: Any) -> Any:
        return ((x**power).sum(0) @ y).sum()

    executor = BucketedExec(fn, dynamic_axes=("b, s", None, "s, _"), static_argnums=1)
    executor = executor.with_pow2().with_linear(3, "s")
    for b, s in ((3, 4), (4, 6), (2, 5)):
        x, y = ramp(b, s) / 10, ramp(s, 2)
        got = jax.grad(lambda x, y: executor(x, 3, y) * 2, argnums=1)(x, y)
        _close(got, jax.grad(lambda x, y: fn(x, 3, y) * 2, argnums=1)(x, y))


def test_checked_gradients() -> None:
    executor = BucketedExec(_loss, dynamic_axes=(None, "b, _", "b, _"), check=Check.POISON)
    executor = executor.with_pow2()
    for n in (3, 5):
        args = (WEIGHTS, ramp(n, 3) / n, ramp(n, 2) / n)
        _close(jax.grad(executor)(*args), jax.grad(_loss)(*args))


def test_clearing_the_cache_clears_gradients() -> None:
    executor = _bucketed(_square(_smooth))
    jax.grad(executor)(ramp(3))
    assert executor.cache_size() == 1
    executor.cache_clear()
    assert executor.cache_size() == 0
    _close(jax.grad(executor)(ramp(3)), jax.grad(_square(_smooth))(ramp(3)))
