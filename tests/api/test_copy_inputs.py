"""`copy_inputs`: NumPy arguments may be overwritten as soon as a call returns."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec
from bucketjit.errors import SpecError

_SLOW = np.full((256, 256), 1 / 256, np.float32)


def slowly(x: Any) -> Any:
    """One, after a while: what is multiplied by it is read late."""
    product = jnp.asarray(_SLOW)
    for _ in range(12):
        product = product @ product * (1 + 0 * x.reshape(-1)[0])
    return product.sum() / 256


def by_rows(x: Any, table: Any) -> Any:
    return x * slowly(table["w"]) + table["w"]


def buffer(*shape: int) -> np.ndarray:
    """An array that JAX takes as it is: it begins at a multiple of 64 bytes."""
    raw = np.empty(4 * int(np.prod(shape)) + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + 4 * int(np.prod(shape))].view(np.float32).reshape(shape)


def overwritten(call: Callable[[np.ndarray, np.ndarray], Any], rows: int, times: int = 4) -> int:
    """How many of some calls return what their arguments held when they were made."""
    x, w = buffer(rows, 4), buffer(4)
    right = 0
    for value in range(1, times + 1):
        x[...], w[...] = value, 10 * value
        result = call(x, w)
        x[...], w[...] = -1, -1
        first = np.asarray(jax.tree_util.tree_leaves(result)[0])  # waits
        right += bool(first.shape == (rows, 4) and (first == 11 * value).all())
    return right


def plainly(executor: BucketedExec) -> Callable[..., Any]:
    return lambda x, w: executor(x, {"w": w})


def differentiated(executor: BucketedExec) -> Callable[..., Any]:
    dots = jnp.zeros((8, 4)), {"w": jnp.zeros(4)}
    return lambda x, w: jax.jvp(executor, (x, {"w": w}), dots)


CALLS: dict[str, tuple[int, Callable[[BucketedExec], Callable[..., Any]]]] = {
    "fits its bucket": (8, plainly),
    "by name": (8, lambda executor: lambda x, w: executor(x, table={"w": w})),
    "is padded beside a static one": (5, plainly),
    "exact": (8, lambda executor: plainly(executor.with_exact())),
    "differentiated": (8, differentiated),
}


@pytest.mark.parametrize(
    "how, out", [*((how, "jax") for how in CALLS), *((how, "padded") for how in list(CALLS)[:3])]
)
def test_arguments_may_be_overwritten_at_once(how: str, out: str) -> None:
    rows, make = CALLS[how]
    executor = BucketedExec(by_rows, dynamic_axes=("b, _", None), copy_inputs=True, out=out)
    executor = executor.with_pow2(max=8)
    assert overwritten(make(executor), rows) == 4
    assert not executor.stats().fallback_calls


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only CPU looks at arrays of NumPy's")
def test_without_it_the_caller_has_to_wait() -> None:
    """So the tests above would fail: this one reads what was written after the call."""
    executor = BucketedExec(by_rows, dynamic_axes=("b, _", None)).with_pow2()
    assert min(overwritten(plainly(executor), 8) for _ in range(5)) < 4  # a race, often lost
    assert overwritten(lambda x, w: jax.block_until_ready(executor(x, {"w": w})), 8) == 4


def test_only_arrays_of_numpy_are_copied_and_those_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Config:
        """A static argument, and a pytree: it is passed on as it is."""

    def fn(x: Any, y: Any, config: Any) -> Any:
        seen.append(config)
        return x + y

    jax.tree_util.register_pytree_node(Config, lambda c: ((), None), lambda *_: Config())
    executor = bucketjit.jit(fn, copy_inputs=True, static_argnums=2)
    config, y = Config(), jnp.ones(4)
    for n in (4, 4, 4):
        np.testing.assert_array_equal(executor(np.ones(n), y, config), 2)
    assert set(seen) == {config} and not y.is_deleted()
    assert executor.stats().compiles == 1 and executor.stats().calls == 3


@pytest.mark.parametrize("wrong", [1, None, "yes", np.True_])
@pytest.mark.parametrize("make", [BucketedExec, bucketjit.jit])
def test_it_is_a_bool(make: Any, wrong: Any) -> None:
    with pytest.raises(SpecError, match=r"copy_inputs must be True or False, got"):
        make(jnp.sum, copy_inputs=wrong)
