"""An executor that its own function knows is freed with the last reference from outside.

So it is with methods (``self.step = BucketedExec(self._step)``): what the executor keeps leads back
to it, and the garbage collector has to see all of the way.
"""

import contextlib
import functools
import gc
import math
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, Fallback, metrics, sized, strategies
from bucketjit.errors import BucketOverflowError, FallbackError
from tests.comparison import ramp

Method = Callable[[Any], Any]
Configure = Callable[[BucketedExec], BucketedExec]


class Model:
    """Holds an executor of its own method."""

    def __init__(self, method: Method, configure: Configure) -> None:
        self.method = method
        self.forward = configure(BucketedExec(self.apply, dynamic_axes="b"))

    def apply(self, x: Any) -> Any:
        return self.method(x)


def masked(x: Any) -> Any:
    return x * 2


def paired(x: Any) -> Any:
    return x / math.sqrt(x.shape[0])


def exact(x: Any) -> Any:
    return jnp.linalg.eigh(x[:, None] * x)[1]  # whose signs depend on the padding


def loss(x: Any) -> Any:
    return (x**2).sum()


def fails(x: Any) -> Any:
    raise ValueError("no")


def pow2(executor: BucketedExec) -> BucketedExec:
    return executor.with_pow2()


def in_background(executor: BucketedExec) -> BucketedExec:
    return executor.with_pow2().with_background_compile()


def call(model: Model, tmp_path: Path) -> None:
    for n in (64, 5, 6, 3):
        model.forward(ramp(n))
    model.forward.wait_for_compiles(60)


def call_exact(model: Model, tmp_path: Path) -> None:
    call(model, tmp_path)
    assert any(bucket.exact for bucket in model.forward.stats().buckets)


def fail(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"):
        model.forward(ramp(3))


def differentiate(model: Model, tmp_path: Path) -> None:
    for n in (5, 6, 3):
        jax.grad(model.forward)(ramp(n))
        jax.jit(jax.value_and_grad(model.forward))(ramp(n))


def transform(model: Model, tmp_path: Path) -> None:
    jax.jit(lambda x: model.forward(x) + 1)(ramp(3))
    jax.vmap(model.forward)(np.ones((2, 3), np.float32))


def explain(model: Model, tmp_path: Path) -> None:
    model.forward.explain(ramp(5))
    model.forward(ramp(5))
    print(model.forward, model.forward.report(), model.forward.stats())


def warm_up(model: Model, tmp_path: Path) -> None:
    model.forward.warmup(ramp(4), sizes={"b": range(1, 9)}, progress=False)


def keep(model: Model, tmp_path: Path) -> None:
    model.forward = model.forward.with_persistence(tmp_path)
    call(model, tmp_path)


def scrape(model: Model, tmp_path: Path) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    metrics.prometheus(model.forward, registry=registry)
    model.forward(ramp(4))
    prometheus_client.generate_latest(registry)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "configure", "use"),
    [
        pytest.param(masked, pow2, call, id="masked"),
        pytest.param(paired, pow2, call, id="paired"),
        pytest.param(exact, pow2, call_exact, id="fallback"),
        pytest.param(masked, lambda e: e, call, id="exact"),
        pytest.param(fails, pow2, fail, id="error"),
        pytest.param(masked, in_background, call, id="background"),
        pytest.param(paired, in_background, call, id="background-paired"),
        pytest.param(exact, in_background, call_exact, id="background-fallback"),
        pytest.param(loss, pow2, differentiate, id="derivatives"),
        pytest.param(masked, pow2, transform, id="transformed"),
        pytest.param(masked, pow2, explain, id="explained"),
        pytest.param(paired, pow2, warm_up, id="warmed-up"),
        pytest.param(masked, pow2, scrape, id="metrics"),
        pytest.param(
            paired,
            lambda e: e.with_strategy(strategies.fit([3, 5, 6, 64], 2)).with_ahead_compile(),
            call,
            id="ahead",
        ),
        pytest.param(paired, pow2, keep, id="persistence"),
    ],
)
def test_nothing_outlives_its_last_reference(
    method: Method, configure: Configure, use: Callable[[Model, Path], None], tmp_path: Path
) -> None:
    with warnings.catch_warnings(action="ignore"):
        model = Model(method, configure)
        use(model, tmp_path)
    alive = weakref.ref(model)
    del model
    deadline = time.monotonic() + 60
    while alive() is not None and time.monotonic() < deadline:
        gc.collect()  # a thread may be about to let go of what it did
        time.sleep(0.01)
    assert alive() is None


def _in_a_loop(w: Any) -> Method:
    def step(total: Any, row: Any) -> Any:
        return total + row @ w, (row @ w) / math.sqrt(row.shape[0])

    return lambda x: jax.lax.scan(step, jnp.zeros(3), x)


CLOSED_OVER: dict[str, Callable[[Any], Method]] = {
    "symbolic": lambda w: lambda x: x @ w,
    "guarded": lambda w: lambda x: x @ w * (2 if x.shape[0] > 4 else 1),
    "paired": lambda w: lambda x: x @ w / math.sqrt(x.shape[0]),
    "in a loop": _in_a_loop,
    "exact": lambda w: lambda x: sum(x[i] @ w for i in range(x.shape[0])),
    "refused": lambda w: lambda x: jnp.linalg.eigh((x @ w) @ x.T)[1],
    "fails": lambda w: lambda x: (x @ w).reshape(7, 11),
}


def _total(fn: Method, x: Any) -> Any:
    return sum(y.sum() for y in jax.tree_util.tree_leaves(fn(x)))


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore::bucketjit.errors.FallbackWarning")
@pytest.mark.parametrize("name", CLOSED_OVER)
def test_what_a_function_closes_over_goes_with_its_executor(name: str) -> None:
    """Traces that fail, as those that meet a guard, keep it in JAX itself."""
    w = jnp.asarray(ramp(3, 3))
    alive = weakref.ref(w)
    fn = CLOSED_OVER[name](w)
    executor = BucketedExec(fn).with_pow2()
    use = jax.grad(functools.partial(_total, executor))
    for n in (3, 5, 9):
        with contextlib.suppress(TypeError):
            executor.explain(ramp(n, 3))
        with contextlib.suppress(TypeError):
            use(ramp(n, 3))
    del w, fn, executor, use
    gc.collect()
    assert alive() is None


class Asked(NamedTuple):
    """A function, and what is asked of it, which may be refused."""

    fn: Callable[[Any], Any]
    ask: Callable[[BucketedExec, Any], Any] = lambda e, x: e(x)
    fallback: Fallback = Fallback.EXACT


ASKED = {
    "masked": Asked(jnp.mean),
    "selects": Asked(lambda x: x[x > 2]),
    "nonzero": Asked(lambda x: jnp.nonzero(x)[0]),
    "unique": Asked(jnp.unique),
    "decides by a selection": Asked(lambda x: x.sum() if x[x > 1].shape[0] > 2 else x.max()),
    "sized": Asked(lambda x: sized(x, jnp.argmax(x[:, 0] == 1))),
    "padded": Asked(lambda x: x[x > 2], lambda e, x: e.with_background_compile()(x)),
    "beyond": Asked(jnp.mean, lambda e, x: e.with_pow2(max=4)(x)),
    "beyond, explained": Asked(jnp.mean, lambda e, x: e.with_pow2(max=4).explain(x)),
    "exact": Asked(lambda x: sum(x[i] for i in range(x.shape[0])).sum()),
    "masking": Asked(lambda x: jnp.linalg.eigh(x @ x.T)[1]),
    "error": Asked(lambda x: jnp.linalg.eigh(x @ x.T)[1], fallback=Fallback.ERROR),
    "gradient": Asked(jnp.mean, lambda e, x: jax.grad(e)(x)),
}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore::bucketjit.errors.FallbackWarning")
@pytest.mark.parametrize("name", ASKED)
def test_a_call_lets_go_of_its_arguments(name: str) -> None:
    asked = ASKED[name]
    executor = BucketedExec(asked.fn, fallback=asked.fallback).with_pow2()
    given = []
    for n in (5, 6, 7, 5, 6):
        x = jnp.asarray(ramp(n, 3))
        given.append(weakref.ref(x))
        with contextlib.suppress(BucketOverflowError, FallbackError):
            asked.ask(executor, x)
        del x
    executor.wait_for_compiles()
    gc.collect()
    assert not [ref for ref in given if ref() is not None]


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def spread(scale: float) -> Method:
    """A function of functions of JAX that are jitted, which keep what they were traced to."""
    return lambda x: jnp.std(jnp.where(x > 0, x, 0.0)) * scale * (2 if x.shape[0] > 4 else 1)


def refused(x: Any) -> Any:
    return spread(2.0)(x) + jnp.zeros(3).reshape(7)


REPEATED: dict[str, Callable[[int], object]] = {
    "called": lambda i: BucketedExec(spread(i)).with_pow2()(ramp(5)),
    "traced": lambda i: BucketedExec(jax.grad(spread(i))).with_pow2().explain(ramp(5)),
    "paired": lambda i: BucketedExec(
        lambda x: jnp.roll(spread(i)(x), 1) / math.sqrt(x.shape[0])
    ).explain(ramp(5)),
    "computed sizes": lambda i: BucketedExec(lambda x: spread(i)(x[x > 1])).explain(ramp(5)),
    "mapped": lambda i: BucketedExec(spread(i)).with_pow2().map([ramp(5), ramp(6)]),
    "transformed": lambda i: jax.grad(BucketedExec(spread(i)).with_pow2())(ramp(5)),
    "fails": lambda i: pytest.raises(TypeError, BucketedExec(refused).with_pow2(), ramp(5)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", REPEATED)
def test_what_is_dropped_leaves_no_traces(name: str) -> None:
    """A trace of `spread` is hundreds of objects."""
    repeated = REPEATED[name]
    for i in range(3):
        repeated(i)
    before = objects()
    for i in range(3, 7):
        repeated(i)
    assert (objects() - before) / 4 < 50


def test_a_function_that_was_called_outside_is_not_traced_again() -> None:
    traced = []

    @jax.jit
    def helper(x: Any) -> Any:
        traced.append(x.shape)
        return x * 2

    w = jnp.ones(4)
    helper(w)
    executor = BucketedExec(lambda x: helper(x) * helper(w).sum()).with_pow2()
    np.testing.assert_allclose(executor(ramp(3)), ramp(3) * 16)
    helper(w)
    jax.jit(lambda w: helper(w))(w)
    assert traced.count((4,)) == 1
