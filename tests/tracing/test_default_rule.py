"""The first call under the default rule: nothing is compiled that the next size cannot use."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from tests.comparison import ones

PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(2), "count": jnp.int32(0)}


def data(n: int) -> dict[str, Any]:
    return {"x": ones(n, 3), "y": ones(n, 2), "scale": 2.0}


def loss(params: Any, batch: Any) -> Any:
    return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).sum() * batch["scale"]


def step(params: Any, batch: Any) -> Any:
    value, grads = jax.value_and_grad(loss, allow_int=True)(params, batch)
    return value, {"w": params["w"] - grads["w"]}


CASES: dict[str, tuple[Callable[..., Any], Callable[[int], Any]]] = {
    "parameters and a batch": (step, lambda n: (PARAMS, data(n))),
    "arrays of the device": (step, lambda n: (PARAMS, jax.tree.map(jnp.asarray, data(n)))),
    "nested": (lambda p, b: step(p, b["in"][0]), lambda n: (PARAMS, {"in": [data(n)]})),
    "a batch alone": (lambda b: b["x"].sum() + b["y"].sum(), lambda n: (data(n),)),
    "a pair": (lambda b: b[0].sum() + b[1].sum(), lambda n: ((ones(n, 2), ones(n)),)),
    "one in a dict": (lambda p, b: (b["x"] * p["b"][0]).sum(), lambda n: (PARAMS, {"x": ones(n)})),
    "a key at the end": (
        lambda p, b, key: step(p, b)[0] + jax.random.normal(key, ()),
        lambda n: (PARAMS, data(n), jax.random.PRNGKey(0)),
    ),
    "two": (lambda p, a, b: step(p, a)[0] + step(p, b)[0], lambda n: (PARAMS, data(n), data(n))),
    "labels beside": (
        lambda b, y: (b["x"][:, :2] * b["y"] * y[:, None]).sum(),
        lambda n: (data(n), ones(n)),
    ),
    "data beside": (lambda x, d: (x * d["y"]).sum(), lambda n: (ones(n), {"y": ones(n)})),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_two_executables_for_two_buckets(name: str) -> None:
    fn, arguments = CASES[name]
    executor = bucketjit.jit(fn)
    for n in (5, 6, 8, 11):
        got, wanted = executor(*arguments(n)), fn(*arguments(n))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, wanted)
    stats = executor.stats()
    assert (stats.compiles, stats.fallback_calls) == (2, 0)
    assert [b.sizes["batch"] for b in stats.buckets] == [8, 16]


def test_by_name() -> None:
    executor = bucketjit.jit(lambda *, params, batch: loss(params, batch))
    for n in (5, 7):
        executor(batch=data(n), params=PARAMS)
    executor = bucketjit.jit(lambda *, params, a: loss(params, a))
    for n in (5, 7):
        executor(a=data(n), params=PARAMS)
    assert executor.stats().calls == 2


def test_parameters_are_no_data() -> None:
    executor = bucketjit.jit(loss)
    executor(PARAMS, {**data(4), "y": ones(1, 2)})  # no one size
    assert not executor.stats().buckets[0].sizes.keys() & {"batch"}
    executor = bucketjit.jit(lambda x, p: x.sum() + p["w"].sum() + p["b"].sum())
    executor(ones(5), PARAMS)
    assert [dict(b.sizes) for b in executor.stats().buckets] == [{"batch": 8}]


def test_a_function_that_refuses_the_guess_is_traced_few_times() -> None:
    traces = []

    def table(batch: Any) -> Any:
        traces.append(1)
        return sum(x[0] * i for x in batch for i in range(int(x.shape[0])))

    executor = bucketjit.jit(table)
    with pytest.warns(bucketjit.errors.FallbackWarning):
        assert float(executor([ones(5) for _ in range(8)])) == 80
    assert len(traces) < 20
