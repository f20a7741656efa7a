"""Index constants are worked out while the program is built: slices at known places are plain."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec, Check
from bucketjit._masking.constants import folded, known_int
from bucketjit._masking.rules.indexing import saturate, wrapped
from tests.comparison import assert_like_jit, ramp
from tests.harness import scalar_of
from tests.masked import masked_jaxpr

TABLE = ramp(20, 6)

PLAIN: dict[str, Callable[[Any], Any]] = {
    "a third": lambda x: x[..., 2:4],
    "from the second": lambda x: x[1:],
    "the first": lambda x: x[0],
    "the first ones": lambda x: x[:2],
    "first row and two columns": lambda x: x[0, 3:5],
    "as many as there are": lambda x: jnp.asarray(TABLE)[: x.shape[0]] + x,
    "dynamic slice": lambda x: lax.dynamic_slice(x, (0, 2), (x.shape[0], 3)),
    "dynamic slice, beyond the end": lambda x: lax.dynamic_slice(x, (0, 99), (x.shape[0], 3)),
    "dynamic slice, before the start": lambda x: lax.dynamic_slice(
        x, (jnp.uint8(0), jnp.uint8(1)), (x.shape[0], 3)
    ),
    "in a jitted function": lambda x: jax.jit(lambda y: y[..., 1:3])(x),
    "in a loop": lambda x: lax.fori_loop(0, 3, lambda _, y: y + x[0], x[0]),
}

JUDGED: dict[str, Callable[[Any], Any]] = {
    how: lambda x, do=do: [
        do(x, where) for where in (0, 1, 3, 4, 99, -1, -99, slice(1, 3), slice(None, 2))
    ]
    for how, do in {
        "filled": lambda x, where: x.at[where].get(mode="fill", fill_value=7),
        "clipped": lambda x, where: x.at[where].get(mode="clip"),
        "promised": lambda x, where: x.at[:, 0].get(mode="promise_in_bounds") + x[where].sum(),
        "set": lambda x, where: x.at[where].set(5),
        "added": lambda x, where: x.at[where].add(x.at[where].get(mode="clip")),
        "dropped": lambda x, where: x.at[where, 2:4].max(9, mode="drop"),
        "written": lambda x, where: lax.dynamic_update_slice(
            x, x[:2] * 2, (where if isinstance(where, int) else 1, 0)
        ),
    }.items()
}

AT_RUN_TIME: dict[str, Callable[[Any], Any]] = {
    "the last": lambda x: x[-1],
    "all but the last": lambda x: x[:-1],
    "from a third on": lambda x: x[x.shape[0] // 3 :],
    "by value": lambda x: lax.dynamic_slice(x, (x[0, 0].astype(int), 0), (2, 6)),
    "to a start that the size may be below": lambda x: lax.dynamic_slice(x, (1, 0), (2, 6)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_known_place_is_a_plain_slice(name: str) -> None:
    text = str(masked_jaxpr(PLAIN[name], "b, 6"))
    assert "dynamic_slice" not in text and "clamp" not in text and "gather" not in text


@pytest.mark.parametrize("name", [n for n in AT_RUN_TIME if n != "all but the last"])
def test_another_is_not(name: str) -> None:
    assert "dynamic_slice" in str(masked_jaxpr(AT_RUN_TIME[name], "b, 6"))


def _assert_the_same_numbers(fn: Callable[[Any], Any], *sizes: int) -> None:
    executor = BucketedExec(fn, dynamic_axes="b, _", check=Check.POISON).with_pow2()
    for size in sizes:
        assert_like_jit(executor, fn, ramp(size, 6))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*PLAIN, *AT_RUN_TIME])
@pytest.mark.parametrize("wide", [False, True])
def test_the_same_numbers(name: str, wide: bool) -> None:
    fn = (PLAIN | AT_RUN_TIME)[name]
    with jax.enable_x64(wide):
        both = lambda x: (fn(x), jax.grad(scalar_of(fn))(x))  # noqa: E731
        _assert_the_same_numbers(both, *((3,) if wide else (2, 3, 5)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", JUDGED)
def test_the_same_numbers_beyond_the_end(name: str) -> None:
    _assert_the_same_numbers(JUDGED[name], 2, 3, 4, 5)


WRITTEN: dict[str, Callable[[Any], Any]] = {
    "one": lambda x: x.at[0].set(x[2]),
    "a known window": lambda x: x.at[1:3].set(x[2]),
    "where there is room": lambda x: lax.dynamic_update_slice(x, x[:2], (1,)),
    "all but the first": lambda x: x.at[1:].set(x[:-1]),
    "beyond the end": lambda x: x.at[99].set(x[0], mode="drop"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_keys_are_written_in_place(name: str) -> None:
    def fn(keys: Any) -> Any:
        return jax.random.key_data(WRITTEN[name](keys))

    executor = BucketedExec(fn, dynamic_axes="b", check=Check.POISON).with_pow2()
    for size in (3, 4, 5):
        assert_like_jit(executor, fn, jax.random.split(jax.random.key(size), size))


def test_a_table_that_is_as_long_as_the_bucket_is_not_extended() -> None:
    text = str(masked_jaxpr(PLAIN["as many as there are"], "b, 6"))
    assert " pad" not in text


def _folded(fn: Callable[..., Any], *args: Any) -> Any:
    (eqn,) = jax.make_jaxpr(fn)(*args).jaxpr.eqns
    return folded(eqn, args)


def test_what_is_folded_is_what_jax_computes() -> None:
    big = np.asarray([3, 2**31 + 5], np.uint32)
    for fn, args in [
        (lambda x: lax.broadcast_in_dim(x, (2, 3), (1,)), (np.arange(3, dtype=np.int32),)),
        (lambda x: lax.convert_element_type(x, np.int32), (big,)),
        (lambda x: lax.convert_element_type(x, np.int8), (np.asarray(300, np.int32),)),
        (lax.add, (big, big)),
        (lax.sub, (np.asarray(-(2**31), np.int32), np.asarray(1, np.int32))),
        (lax.mul, (big, big)),
        (lax.lt, (np.asarray([1, 2], np.int32), np.asarray([2, 2], np.int32))),
        (lax.select_n, (np.asarray(True), np.asarray(3, np.int8), np.asarray(4, np.int8))),
        (lax.select_n, (np.asarray(2, np.int32), *np.arange(3, dtype=np.int32))),
        (lambda x, y: lax.concatenate([x, y], 1), (np.ones((1, 2), np.int32),) * 2),
    ]:
        (found,) = _folded(fn, *args)
        want = np.asarray(fn(*args))
        assert found.dtype == want.dtype and np.array_equal(found, want)


def test_what_is_not_folded() -> None:
    assert _folded(lambda x: lax.broadcast_in_dim(x, (17,), ()), np.int32(1)) is None
    assert _folded(lambda x: lax.broadcast_in_dim(x, (2,), ()), np.float32(1)) is None
    assert _folded(lambda x: lax.convert_element_type(x, np.float32), np.int32(1)) is None
    assert _folded(lambda x: lax.broadcast_in_dim(x, (2,), ()), jnp.int32(1)) is None
    assert _folded(jnp.sin, np.float32(1)) is None


def test_what_int32_cannot_hold() -> None:
    wide = (np.uint64(2**64 - 1), np.int64(-(2**40)), np.uint8(254), np.int8(-3))
    assert [int(saturate(x)) for x in wide] == [2**31 - 1, -(2**31), 254, -3]
    assert all(saturate(x).dtype == np.int32 for x in wide)
    assert np.array_equal(saturate(np.asarray([1, 2**40])), [1, 2**31 - 1])
    assert int(wrapped(np.int64(2**32 + 5))) == 5


def test_known_int() -> None:
    assert [known_int(x) for x in (3, np.int8(3), np.asarray(3, np.uint32))] == [3, 3, 3]
    assert [known_int(x) for x in (np.array([3]), np.float32(3), jnp.int32(3), None)] == [None] * 4
