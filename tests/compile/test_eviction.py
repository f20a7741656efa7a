"""What goes with the last executable of a program: what was traced, and the arrays it closed over.

Arrays that a function makes while it is traced are held by its programs alone, so they tell. They
are read-only, or the programs would hold copies of them.
"""

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit.types import Event
from tests.comparison import ramp


class Traced:
    """A function of a static argument that closes over an array of its own in each trace."""

    def __init__(self, paired: bool = False) -> None:
        self.paired = paired
        self.arrays: list[weakref.ref[np.ndarray]] = []

    def __call__(self, x: Any, k: int) -> Any:
        table = np.full(x.shape[1], k, np.float32)
        table.setflags(write=False)
        self.arrays.append(weakref.ref(table))
        y = x * table
        return y / math.sqrt(x.shape[0]) if self.paired else y

    @property
    def alive(self) -> list[bool]:
        """Whether the array of each trace is there."""
        gc.collect()
        return [ref() is not None for ref in self.arrays]


def executor_of(fn: Any, maxsize: int = 2, **kwargs: Any) -> BucketedExec:
    executor = BucketedExec(fn, dynamic_axes=("b, _", None), static_argnums=1, **kwargs)
    return executor.with_pow2().with_maxsize(maxsize)


@pytest.mark.parametrize("paired", [False, True])
def test_what_was_traced_goes_with_the_last_executable(paired: bool) -> None:
    fn = Traced(paired)
    executor = executor_of(fn)
    executor(ramp(3, 2), 1)
    first = len(fn.arrays)
    executor(ramp(3, 2), 2)
    assert any(fn.alive[:first])
    executor(ramp(3, 2), 3)  # drives the first one out
    assert not any(fn.alive[:first]) and any(fn.alive[first:])
    assert len(executor.stats().programs) == 2
    seen: list[Event] = []
    again = executor.with_on_event(seen.append)
    for k in (1, 2, 3, 1):
        want = ramp(3, 2) * k / (math.sqrt(3) if paired else 1)
        np.testing.assert_allclose(again(ramp(3, 2), k), want, rtol=1e-6)
        gc.collect()  # concrete traces are in circles
    signatures = [event.detail for event in seen if event.kind == "signature"]
    assert len(signatures) == 4
    assert signatures[3].startswith("traced before, but dropped with the last of its executables;")


def test_it_stays_as_long_as_one_executable_does() -> None:
    fn = Traced()
    executor = executor_of(fn)
    for n in (3, 5, 9, 17, 33, 3, 5):
        executor(ramp(n, 2), 1)
    assert executor.stats().evictions == 5 and len(fn.arrays) == 1


def test_of_what_was_only_explained_or_is_refused_nothing_goes() -> None:
    fn = Traced()
    executor = executor_of(fn)
    executor.explain(ramp(3, 2), 1)
    executor(ramp(3, 2), 1)
    assert len(fn.arrays) == 1

    traces = []

    def vectors(x: Any, k: int) -> Any:
        traces.append(k)
        return jnp.linalg.eigh(x @ x.T)[1] * k

    executor = executor_of(vectors, maxsize=1)
    with pytest.warns(match="exact shape"):
        for n in (3, 4, 3, 4):
            executor(ramp(n, 2), 1)
    assert len(executor.stats().programs) == 1 and executor.stats().evictions == 3


CONFIGURED: dict[str, Callable[[BucketedExec], BucketedExec]] = {
    "background": lambda e: e.with_background_compile(),
    "bytes": lambda e: e.with_maxsize(None, max_bytes=1),
    "ahead": lambda e: e.with_buckets([4, 8]).with_ahead_compile().with_maxsize(2),
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_nothing_else_keeps_it(name: str) -> None:
    fn = Traced()
    executor = CONFIGURED[name](executor_of(fn, compile_budget=1000))
    for k in range(5):
        for n in (3, 4):
            np.testing.assert_array_equal(executor(ramp(n, 2), k), ramp(n, 2) * k)
        executor.wait_for_compiles(60)
    assert sum(fn.alive) <= 2


def test_of_a_derivative_it_is_its_own() -> None:
    fn = Traced()
    executor = executor_of(fn)

    def loss(x: Any, k: int) -> Any:
        return executor(x, k).sum()

    for _ in range(2):
        for k in range(1, 5):
            np.testing.assert_allclose(jax.grad(loss)(ramp(3, 2), k), np.full((3, 2), k))


def test_static_sizes_that_vary_leave_nothing() -> None:
    fn = Traced()
    executor = executor_of(fn)
    sizes = range(1, 71)
    for size in sizes:
        executor(ramp(3, size), 1)
    (signature,) = executor._engine.signer.signatures()
    assert sum(fn.alive) == 2 and len(executor.stats().programs) == 2
    assert len(signature._traced) < len(sizes) and len(signature._reported) == 2
