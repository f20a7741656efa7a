"""Functions that select, where JAX or the trace meets them in an unusual place."""

import dataclasses
import datetime
import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit.errors import FallbackWarning, SelectionError
from tests.comparison import assert_close
from tests.tracing.computed.test_computed_sizes import loop

SIZES = (5, 8, 3, 1)


def numbers(size: int) -> np.ndarray:
    return np.round(np.random.default_rng(size).standard_normal(size) * 2).astype(np.float32)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["data"])
@dataclasses.dataclass(frozen=True)
class Chosen:
    rows: Any
    data: Any


class Plain:
    def __init__(self, held: Any) -> None:
        self.held = held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


# What a function returns beside the rows that it selects, and whether it is masked.
DATA: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "function": (lambda x, y: lambda z: z + 1, True),
    "function_under_jit": (lambda x, y: jax.jit(lambda z: z + 1), True),
    "object": (lambda x, y: Plain([3, {"a": jnp.sum}]), True),
    "object_with_slots": (lambda x, y: Slotted(3), True),
    "iterator": (lambda x, y: iter([1, 2]), True),
    "device": (lambda x, y: jax.devices()[0], True),
    "date": (lambda x, y: datetime.date(2000, 1, 1), True),
    "size": (lambda x, y: Plain(x.shape[0]), False),
    "size_in_slots": (lambda x, y: Slotted([x.shape[0] * 2]), False),
    "computed_size": (lambda x, y: Plain(y.shape[0]), False),
    "shape_under_jit": (lambda x, y: jax.jit(lambda z, shape=y.shape: jnp.ones(shape)), False),
    "array": (lambda x, y: Plain(x), False),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", DATA)
def test_static_data_that_a_function_makes_beside_a_selection(name: str) -> None:
    data, is_masked = DATA[name]

    def fn(x: Any) -> Any:
        y = x[x > 0]
        return Chosen(y, data(x, y))

    executor = BucketedExec(fn, dynamic_axes="n").with_pow2()
    told = executor.explain(numbers(5))
    assert (told.kind == "masked") == is_masked
    assert is_masked or "not an array" in told.reason
    for size in SIZES:
        x = jnp.asarray(numbers(size))
        if is_masked:
            assert_close(jax.tree.leaves(executor(x)), jax.tree.leaves(fn(x)))
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FallbackWarning)
                got = executor(x)
            assert_close(jax.tree.leaves(got), jax.tree.leaves(fn(x)))
            held = getattr(got.data, "held", None)
            assert not isinstance(held, jax.core.Tracer) and "size_1" not in repr(held)
    assert executor.stats().fallback_calls == (0 if is_masked else len(SIZES))


def test_an_error_of_the_function_beside_a_selection_is_its_own() -> None:
    def fails(x: Any) -> Any:
        raise RuntimeError(f"its own {x[x > 0].ndim}")

    executor = BucketedExec(fails, dynamic_axes="n").with_pow2()
    for ask in (executor, executor.explain):
        with pytest.raises(RuntimeError, match="its own 1"):
            ask(numbers(4))


LEAKLESS: dict[str, Callable[[Any], Any]] = {
    "selection": lambda x: x[x > 0] * 2,
    "under_jit": lambda x: jax.jit(lambda y: y[y > 0] * 2)(x),
    "loop": lambda x: jax.lax.map(lambda a: x[x > a].sum(), x),
    "vmap": lambda x: jax.vmap(lambda a: (x[x > 0] * a).sum())(x),
    "gradient": lambda x: jax.grad(lambda x: (x[x > 0] ** 2).sum())(x),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LEAKLESS)
def test_no_value_outlives_its_trace(name: str) -> None:
    fn, x = LEAKLESS[name], numbers(7)
    want = BucketedExec(fn, dynamic_axes="n").with_pow2()(x)
    collections = 0

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal collections
        collections += phase == "start" and info["generation"] == 2

    executor = BucketedExec(fn, dynamic_axes="n", fallback="error").with_pow2()
    gc.callbacks.append(count)
    try:
        with jax.checking_leaks():
            assert_close(executor(x), want)
    finally:
        gc.callbacks.remove(count)
    assert collections < 6  # JAX runs one for each trace that is still alive where it ends


UNUSUAL: dict[str, Callable[[Any], Any]] = {
    "flag": lambda x: x[x.sum() > 0],
    "flag_of_a_selection": lambda x: x[x > 0][x.sum() > 0],
    "flag_on_a_later_axis": lambda x: x[:, None][:, x.sum() > 0],
    "set_by_a_flag": lambda x: x.at[x.sum() > 0].set(7),
    "gradient_of_a_flag": jax.grad(lambda x: (x[x.sum() > 0] ** 2).sum()),
    "unique_gradient": jax.grad(lambda x: (jnp.unique(x) ** 2).sum()),
    "union_gradient": jax.grad(lambda x: (jnp.union1d(x, jnp.ones(2)) ** 2).sum()),
    "setdiff_tangent": lambda x: jax.jvp(lambda x: jnp.setdiff1d(x, x[:1]).sum(), (x,), (x,)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", UNUSUAL)
def test_results_are_those_of_eager_jax_at_every_size(name: str) -> None:
    fn = UNUSUAL[name]
    executor = BucketedExec(fn, dynamic_axes="n", fallback="error").with_pow2()
    for size in (*SIZES, 0):
        for x in (numbers(size), -numbers(size)):
            assert_close(executor(x), fn(jnp.asarray(x)))
    assert executor.stats().fallback_calls == 0
    checked = BucketedExec(fn, dynamic_axes="n", check="exact").with_pow2()
    assert_close(checked(numbers(8)), fn(jnp.asarray(numbers(8))))


# Eager JAX refuses these; the references are Python loops.
INSIDE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "scan": (loop, lambda x: sum((x[x > a].sum() for a in x), jnp.float32(0))),
    "cond": (
        lambda x: jax.lax.cond(x.sum() > 0, lambda y: y[y > 0].sum(), jnp.sum, x),
        lambda x: x[x > 0].sum() if x.sum() > 0 else x.sum(),
    ),
    "jit": (lambda x: jax.jit(lambda y: y[y > 0])(x), lambda x: x[x > 0]),
    "map": (
        lambda x: jax.lax.map(lambda a: x[x > a].sum(), x),
        lambda x: jnp.stack([*(x[x > a].sum() for a in x), 0.0])[:-1],
    ),
    "fori_loop": (
        lambda x: jax.lax.fori_loop(0, 2, lambda i, c: c + x[x > c].sum(), jnp.float32(0)),
        lambda x: x[x > 0].sum() + x[x > x[x > 0].sum()].sum(),
    ),
    "other_array": (
        lambda x: jax.jit(lambda y: y[y > x.sum()])(jnp.arange(-3.0, 3.0)),
        lambda x: jnp.arange(-3.0, 3.0)[jnp.arange(-3.0, 3.0) > x.sum()],
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("axes", ["n", None])
def test_inside_of_jit_and_loops_at_size_0(name: str, first: int, axes: str | None) -> None:
    fn, reference = INSIDE[name]
    executor = BucketedExec(fn, dynamic_axes=axes, fallback="error", check="poison").with_pow2()
    assert executor.explain(numbers(0)).kind == "masked"
    for size in (first, 0, 8, 0):
        assert_close(executor(numbers(size)), reference(jnp.asarray(numbers(size))))


@pytest.mark.parametrize(
    "row",
    [lambda a: a[a > 0].sum(), lambda a: jnp.unique(a).sum(), lambda a: a[: (a > 0).sum()].sum()],
)
def test_vmap_of_a_selection_is_refused_by_name(row: Callable[[Any], Any]) -> None:
    executor = BucketedExec(jax.vmap(row), dynamic_axes="n, _").with_pow2()
    for _ in range(2):
        with pytest.raises(SelectionError, match="vmap over a selection"):
            executor(np.ones((3, 2), np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(SelectionError, match="inside jax.jit, vmap or scan"):
            jax.vmap(BucketedExec(lambda x: x[x > 0]).with_pow2())(np.ones((3, 2), np.float32))
