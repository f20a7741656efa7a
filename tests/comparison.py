"""Compare results in everything that `jax.jit` determines of them."""

import contextlib
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit import BucketedExec


def assert_same(got: Any, want: Any, *, rtol: float = 2e-6) -> None:
    """``got`` has the tree, types, shapes, dtypes, weak types, devices and values of ``want``."""
    got_tree, want_tree = (jax.tree_util.tree_structure(x) for x in (got, want))
    assert got_tree == want_tree, f"tree {got_tree}, exact {want_tree}"
    wanted = jax.tree_util.tree_leaves(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), wanted, strict=True):
        where = f"output{jax.tree_util.keystr(path)}"
        assert isinstance(a, jax.Array), f"{where}: {type(a)}"
        for attribute in ("shape", "dtype", "weak_type", "committed", "sharding"):
            x, y = (getattr(value, attribute, None) for value in (a, b))
            assert x == y, f"{where}: {attribute} {x}, exact {y}"
        _assert_equal(a, b, where, rtol)


def _assert_equal(a: Any, b: Any, where: str, rtol: float, is_scaled: bool = False) -> None:
    if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    if not jnp.issubdtype(b.dtype, jnp.inexact):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=where)
        return
    kind = np.complex128 if jnp.issubdtype(b.dtype, jnp.complexfloating) else np.float64
    rtol = max(rtol, 4 * float(jnp.finfo(b.dtype).eps))
    a, b = np.asarray(a).astype(kind), np.asarray(b).astype(kind)
    scale = np.max(np.abs(b), initial=0.01, where=np.isfinite(b)) if is_scaled else 1
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale, err_msg=where)


def assert_close(got: Any, want: Any, rtol: float = 2e-5, *, is_scaled: bool = False) -> None:
    """``got`` has the tree, shapes, dtypes and values of ``want``.

    Args:
        got, want: Two trees of arrays.
        rtol: The tolerance, absolute as well.
        is_scaled: The absolute one is relative to the largest finite number of an array.
    """
    got_tree, want_tree = (jax.tree_util.tree_structure(x) for x in (got, want))
    assert got_tree == want_tree, f"tree {got_tree}, exact {want_tree}"
    for a, b in zip(jax.tree.leaves(got), map(jnp.asarray, jax.tree.leaves(want)), strict=True):
        a = jnp.asarray(a)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        _assert_equal(a, b, f"{a.dtype}{a.shape}", rtol, is_scaled)


def assert_like_jit(
    executor: Callable[..., Any], fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls the executor and ``jax.jit(fn)`` with the same arguments; returns the result."""
    got = executor(*args, **kwargs)
    assert_same(got, jax.jit(fn)(*args, **kwargs))
    return got


def assert_as_jit(executor: BucketedExec, *args: Any, **kwargs: Any) -> Any:
    """As `assert_like_jit`, with the function that the executor was made of."""
    return assert_like_jit(executor, executor.__wrapped__, *args, **kwargs)


@contextlib.contextmanager
def filtering(mode: str) -> Iterator[None]:
    """Tracebacks as `jax_traceback_filtering` says."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", mode)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def in_threads(work: Callable[[Any], Any], arguments: Iterable[Any]) -> list[Any]:
    """The results of the work with each argument, each in a thread of its own, all at once."""
    arguments = list(arguments)
    barrier = threading.Barrier(len(arguments))

    def start(argument: Any) -> Any:
        barrier.wait(60)
        return work(argument)

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(start, arguments, timeout=300))


def warned(category: type[Warning], run: Callable[[], object]) -> list[str]:
    """The texts of the warnings of a category."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        run()
    return [str(w.message) for w in caught if w.category is category]


def unrolled(x: Any) -> Any:
    """A function of as many equations as its argument has rows: no two sizes share a program."""
    return x * sum(x[i] for i in range(x.shape[0]))


def ramp(*shape: int, dtype: Any = np.float32, start: float = 1) -> np.ndarray:
    """Distinct contents: start, start + 1, ..."""
    return (np.arange(np.prod(shape, dtype=int)) + start).astype(dtype).reshape(shape)


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def floats(*shape: int) -> np.ndarray:
    """Normal numbers, the same for the same shape."""
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def buckets(executor: Any) -> list[dict[str, int]]:
    """The sizes of its buckets, in the order in which they were made."""
    return [dict(bucket.sizes) for bucket in executor.stats().buckets]


def assert_goes_with_its_last_reference(made: list[BucketedExec]) -> None:
    """Without the garbage collector; the list is all that holds the executor."""
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(made[0]._engine)
        made.clear()
        assert gone() is None
    finally:
        gc.enable()
