"""An array that a function closes over is read once for each program: when that is traced."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec
from bucketjit._tracing.own_constants import _COPIES, own_constants

Make = Callable[[np.ndarray], Callable[[Any], Any]]


def in_a_container(table: np.ndarray) -> Callable[[Any], Any]:
    held = SimpleNamespace(layers=[{"w": table}])
    return lambda x: x * held.layers[0]["w"]


def as_a_view(table: np.ndarray) -> Callable[[Any], Any]:
    view = table[::-1]
    view.setflags(write=False)
    return lambda x: x * view


def inside_a_jit(table: np.ndarray) -> Callable[[Any], Any]:
    inner = jax.jit(lambda y: y * table)
    return lambda x: inner(x) + inner(x)


SYMBOLIC: dict[str, Make] = {
    "constant": lambda table: lambda x: x * table,
    "literal": lambda table: lambda x: x * table[0:1].reshape(()),
    "part": lambda table: lambda x: x * table[0],
    "container": in_a_container,
    "view": as_a_view,
    "jit": inside_a_jit,
    "scan": lambda table: lambda x: lax.scan(lambda c, row: (c, row * table), 0.0, x)[1],
    "cond": lambda table: lambda x: lax.cond(True, lambda y: y * table, jnp.negative, x),
    "result": lambda table: lambda x: (x.sum(axis=0), jnp.asarray(table)),
}


def rows(n: int) -> np.ndarray:
    return np.ones((n, 3), np.float32)


def last(result: Any) -> float:
    return float(np.asarray(jax.tree_util.tree_leaves(result)[-1]).ravel()[0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("maxsize", [128, 1])
@pytest.mark.parametrize("where", SYMBOLIC)
def test_it_is_read_once(where: str, maxsize: int) -> None:
    """New buckets, and those that were evicted and are compiled again, have what it held then."""
    table = np.ones(3, np.float32)
    executor = BucketedExec(SYMBOLIC[where](table)).with_pow2().with_maxsize(maxsize)
    want = last(executor(rows(5)))
    table[...] = 3
    for n in (7, 20, 5, 2, 20, 1):
        if where != "part":  # a number of NumPy's, read by user code
            assert last(executor(rows(n))) == want
    executor.cache_clear()  # and is traced again
    if where in ("result", "jit"):
        jax.clear_caches()
    assert last(executor(rows(5))) == 3 * want


def test_gradients_read_it_once() -> None:
    table = np.ones(3, np.float32)
    executor = BucketedExec(lambda x: (x * x * table).sum()).with_pow2()
    gradient = jax.grad(executor)
    assert last(gradient(rows(5))) == 2
    table[...] = 3
    for n in (7, 20, 5):
        assert last(gradient(rows(n))) == 2


def traced(fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    closed = jax.make_jaxpr(fn)(*args)
    return (closed.jaxpr, closed.consts) if hasattr(closed, "jaxpr") else (closed, closed.consts)


def test_what_nobody_can_write_to_is_not_copied() -> None:
    frozen = np.ones(3, np.float32)
    frozen.setflags(write=False)
    on_device = jnp.ones(3)
    program = traced(lambda x: x * frozen + on_device, rows(2))
    jaxpr, consts = own_constants(*program)
    assert jaxpr is program[0] and consts is program[1]


def test_a_paired_program_keeps_one_copy_of_a_large_array() -> None:
    table = np.ones((64, 1024), np.float32)
    executor = BucketedExec(lambda x: (x @ table) / float(x.shape[0])).with_pow2()
    before = len(_COPIES)
    for n in (5, 6, 7, 20):
        executor(np.ones((n, 64), np.float32))
    large = [x for x in _COPIES.values() if x.shape == table.shape]
    assert len(large) == 1 and len(_COPIES) - before < 8


def test_a_read_only_view_of_memory_that_others_write_to_is_copied() -> None:
    memory = bytearray(np.ones(3, np.float32).tobytes())
    table = np.frombuffer(memoryview(memory).toreadonly(), np.float32)
    executor = BucketedExec(lambda x: (x[:, None] * table).sum(), dynamic_axes="n").with_pow2()
    assert float(executor(np.ones(4, np.float32))) == 12
    memory[:] = np.full(3, 2, np.float32).tobytes()
    assert float(executor(np.ones(9, np.float32))) == 27
