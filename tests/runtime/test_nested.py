"""What a function sees inside ``jit``, ``vmap`` and the like is what it sees under ``jax.jit``."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import bucketjit
from bucketjit.errors import MutationError, SelectionError
from tests.comparison import ramp

pytestmark = pytest.mark.filterwarnings("ignore::bucketjit.errors.InlinedWarning")


def bump(x: Any) -> Any:
    x += 1.0
    return x.sum()


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "in place": (bump, lambda: ramp(3)),
    "overflow": (lambda x: x.sum() // 7, lambda: np.full(5, 2**30, np.int32)),
    "float64": (lambda x: x * 2, lambda: np.arange(3.0)),
    "by zero": (lambda x: (x // 0).sum(), lambda: np.arange(9, dtype=np.int32)),
    "out of bounds": (lambda x: x[10], lambda: ramp(3)),
    "at": (lambda x: x["a"].at[0].set(x["b"]), lambda: {"a": ramp(3), "b": 2}),
    "decision": (lambda x: x * 2 if x[0] > 0 else x, lambda: ramp(3)),
    "to host": (lambda x: float(np.sum(x)), lambda: ramp(3)),
    "weak": (lambda x: x * jnp.ones(2, jnp.bfloat16), lambda: 3.0),
    "no array": (lambda x: 1.0, lambda: "text"),
}

PLACES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "jit": lambda run: jax.jit(lambda y: (run(), y))(0.0),
    "grad": lambda run: jax.grad(lambda y: (y * y, run()), has_aux=True)(1.0),
    "eval_shape": lambda run: jax.eval_shape(lambda y: (run(), y), 0.0),
    "make_jaxpr": lambda run: jax.make_jaxpr(lambda y: (run(), y))(0.0).out_avals,
    "vmap": lambda run: jax.vmap(lambda y: (run(), y))(jnp.arange(2.0)),
    "scan": lambda run: jax.lax.scan(lambda c, _: (c, run()), 0.0, None, length=2),
    "checkify": lambda run: checkify.checkify(lambda y: (run(), y))(1.0)[1],
}


def outcome(place: str, fn: Callable[[Any], Any], argument: Any) -> tuple[str, str]:
    """The results, or the error, with the argument as it is afterwards."""
    try:
        result = PLACES[place](lambda: fn(argument))
    except TypeError as error:  # those of JAX, and `ArgumentError`
        kind = type(error) if isinstance(error, jax.errors.JAXTypeError) else TypeError
        return str(kind), str(argument)
    weak = [getattr(x, "weak_type", None) for x in jax.tree.leaves(result)]
    return f"{result!r} {weak}", str(argument)


@pytest.mark.parametrize("place", PLACES)
def test_it_is_a_nested_jit(place: str) -> None:
    names = FUNCTIONS if place in ("jit", "grad") else ("in place", "at", "decision")
    for name in names:
        fn, argument = FUNCTIONS[name]
        want = outcome(place, jax.jit(fn), argument())
        assert outcome(place, bucketjit.jit(fn), argument()) == want, name
        assert want[1] == str(argument())


def test_it_is_traced_once_for_each_shape() -> None:
    traced = []
    executor = bucketjit.jit(lambda x: (traced.append(x.shape), x * 2)[1])
    jax.jit(lambda x: executor(x) + executor(x + 1))(ramp(3))
    for n in (3, 4, 3):
        jax.vmap(executor)(ramp(2, n))
    assert traced == [(3,), (4,)]


@pytest.mark.filterwarnings("ignore:.*an argument that is a size:bucketjit.errors.FallbackWarning")
def test_sizes_and_static_arguments_stay_what_they_are() -> None:
    def fn(x: Any, sizes: Any, how: str, *, by: str = "sum") -> Any:
        return jnp.ones((sizes["n"], 2)) * getattr(jnp, how)(x) * len(by)

    axes = ("b", {"n": "n"}, None)
    executor = bucketjit.jit(fn, dynamic_axes=axes, static_argnums=2, static_argnames="by")
    for n in (2, np.int64(3)):
        call = lambda x: executor(x, {"n": n}, "max", by="ab")  # noqa: B023, E731
        want = np.full((n, 2), 6.0)
        np.testing.assert_array_equal(jax.jit(call)(ramp(3)), want)
        np.testing.assert_array_equal(jax.vmap(call)(ramp(1, 3))[0], want)
        assert jax.grad(lambda x: call(x).sum())(ramp(3)).shape == (3,)  # noqa: B023
    outer = bucketjit.jit(lambda x: executor(x, {"n": x.shape[0] + 1}, "max").sum())
    assert [float(outer(ramp(n))) for n in (3, 5, 6)] == [72.0, 180.0, 252.0]
    assert (outer.cache_size(), outer.stats().fallback_calls) == (2, 0)


def test_the_transpose_of_a_bucketed_call_under_vmap_sees_tracers() -> None:
    fn = lambda x, y: (x * y.at[0].set(1.0)).sum() * x  # noqa: E731
    with_data = lambda f: jax.jacrev(lambda x: f(x, ramp(3)))(ramp(3))  # noqa: E731
    np.testing.assert_allclose(with_data(bucketjit.jit(fn)), with_data(jax.jit(fn)), rtol=1e-5)


def test_computed_sizes_under_grad_alone_are_computed() -> None:
    executor = bucketjit.jit(lambda x: (x[x > 1] ** 2).sum(), buckets="exact")
    for _ in range(2):
        np.testing.assert_array_equal(jax.grad(executor)(ramp(3)), [0, 4, 6])
    with pytest.raises(SelectionError, match="computes a size inside") as caught:
        jax.vmap(executor)(ramp(2, 3))
    assert isinstance(caught.value.__cause__, jax.errors.NonConcreteBooleanIndexError)


def test_a_lost_change_is_refused_there_too() -> None:
    eqx = pytest.importorskip("equinox")

    class Counter(eqx.Module):
        count: Any

    def count(counter: Any, x: Any) -> Any:
        object.__setattr__(counter, "count", counter.count + 1)
        return x

    with pytest.raises(MutationError, match="counter.count"):
        jax.jit(lambda x: bucketjit.jit(count)(Counter(x), x))(ramp(3))
