"""Inside ``jit``, ``vmap`` and the like: what a function sees, and that calls are inlined."""

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import bucketjit
from bucketjit.errors import InlinedWarning, MutationError, SelectionError
from bucketjit.types import Event
from tests.comparison import ramp, warned

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


X = np.arange(3, dtype=np.float32)


def total(x: Any) -> Any:
    return (x * x).sum()


told = functools.partial(warned, InlinedWarning)


def test_inlined_calls_are_counted_and_told_of_once() -> None:
    events: list[Event] = []
    executor = bucketjit.jit(total).with_on_event(events.append)
    (text,) = told(lambda: jax.jit(executor)(X))
    assert text.startswith("total is called inside jax.jit")
    again = (
        lambda: jax.vmap(executor)(np.ones((2, 3), np.float32)),
        lambda: jax.lax.scan(lambda c, x: (c + executor(x), c), 0.0, np.ones((2, 3), np.float32)),
        lambda: jax.jit(jax.grad(executor))(X),
        lambda: jax.jit(executor)(np.ones(4, np.float32)),
    )
    assert [told(run) for run in again] == [[]] * len(again)
    stats = executor.stats()
    assert stats.inlined_calls >= 1 + len(again) and stats.calls == 0
    assert json.loads(stats.to_json())["inlined_calls"] == stats.inlined_calls
    assert [e.detail for e in events if e.kind == "inlined"] == [text.removeprefix("total ")]


def test_an_evaluation_of_shapes_is_not_told_of() -> None:
    """It compiles nothing. A ``jit`` inside of it keeps the trace, so that is told of."""
    like = jax.ShapeDtypeStruct((3,), np.float32)
    for executor in (bucketjit.jit(total), bucketjit.jit(lambda x: sum(row for row in x))):
        runs = (
            lambda: jax.eval_shape(executor, like),  # noqa: B023
            lambda: jax.eval_shape(lambda x: jax.vmap(executor)(x[None]), like),  # noqa: B023
        )
        assert [told(run) for run in runs] == [[], []]
        assert executor.stats().inlined_calls == 0
        inner = jax.jit(lambda x: executor(x) + 1)  # noqa: B023
        assert len(told(lambda: jax.eval_shape(lambda x: inner(x), like))) == 1  # noqa: B023


def test_a_transformation_is_named() -> None:
    executor = bucketjit.jit(total)
    (text,) = told(lambda: jax.vmap(executor)(np.ones((2, 3), np.float32)))
    assert "inside jax.vmap" in text


def test_the_vmap_of_a_hessian_is_named() -> None:
    executor = bucketjit.jit(total)
    (text,) = told(lambda: jax.hessian(executor)(X))
    assert "inside jax.vmap, jax.jacfwd or jax.hessian" in text
    (text,) = told(lambda: jax.jit(jax.grad(bucketjit.jit(total)))(X))
    assert "inside jax.jit" in text


def test_what_is_bucketed_or_has_no_strategy_is_not_told_of() -> None:
    executor = bucketjit.jit(total)
    assert told(lambda: (executor(X), jax.grad(executor)(X), jax.value_and_grad(executor)(X))) == []
    with jax.disable_jit():
        assert told(lambda: executor(X)) == []
    assert executor.stats().inlined_calls == 0
    plain = bucketjit.BucketedExec(total)
    assert told(lambda: jax.jit(plain)(X)) == []
    assert plain.stats().inlined_calls == 1


def test_another_executor_is_no_reason_to_warn() -> None:
    inner = bucketjit.jit(total)
    outer = bucketjit.jit(lambda x: inner(x) + 1)
    assert told(lambda: outer(X)) == []
    assert outer.stats().inlined_calls == 0 and inner.stats().inlined_calls >= 1


def test_metrics_count_them() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    from bucketjit.metrics import prometheus as export

    executor, registry = bucketjit.jit(total), prometheus.CollectorRegistry()
    export(executor, registry=registry)
    told(lambda: jax.jit(executor)(X))
    found = registry.get_sample_value("bucketjit_inlined_calls_total", {"function": "total"})
    assert found == 1


def test_equinox_is_such_a_case() -> None:
    eqx = pytest.importorskip("equinox")
    executor = bucketjit.jit(total)
    assert len(told(lambda: eqx.filter_jit(executor)(X))) == 1
    assert executor.stats().inlined_calls == 1
