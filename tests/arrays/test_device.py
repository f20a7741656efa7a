"""Padding and cutting where an array is. On this machine's CPU, which takes DLPack views too."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._arrays import device, padding

DTYPES = ["float32", "bfloat16", "float16", "int8", "uint16", "bool", "complex64"]
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    *(((5, 3), (8, 3)), ((5, 7), (8, 8)), ((8, 7), (8, 8)), ((1, 1), (4, 4)), ((13,), (16,))),
    *(((1,), (2,)), ((16,), (64,)), ((3, 5, 7), (4, 8, 8))),
    *(((3, 5, 7), (4, 5, 8)), ((31, 17), (64, 32))),
]


def contents(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = np.random.default_rng(0).normal(size=shape) * 3
    return np.asarray(jnp.asarray(values).astype(dtype))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "padded"), SHAPES, ids=str)
def test_pad_and_unpad(shape: tuple[int, ...], padded: tuple[int, ...], dtype: str) -> None:
    host = contents(shape, dtype)
    array = jnp.asarray(host)
    assert device.can_view(array)
    got = device.pad(array, padded)
    want = np.zeros(padded, host.dtype)
    want[tuple(map(slice, shape))] = host
    assert got.dtype == array.dtype
    np.testing.assert_array_equal(got, want)
    back = device.unpad(got, shape)
    del got, array
    assert back.shape == shape
    np.testing.assert_array_equal(back, host)


def test_what_cannot_be_viewed_is_said() -> None:
    assert not device.can_view(jnp.float32(1))
    assert not device.can_view(jnp.zeros(4, jnp.int4))
    assert not device.can_view(jax.random.split(jax.random.key(0), 2))


def test_a_view_is_not_written_through() -> None:
    array = jnp.arange(8.0)
    view = device.unpad(array, (3,))
    bumped = jax.jit(lambda v: v.at[0].set(9.0), donate_argnums=0)(view)
    np.testing.assert_array_equal(bumped, [9, 1, 2])
    del view, bumped
    assert array.shape == (8,)


def test_sizes_of_one_bucket_share_their_programs(xla_compiles: Callable[[], int]) -> None:
    def both(n: int) -> None:
        host = np.full((n, 4), n, np.float32)
        padded = device.pad(jax.device_put(host), (128, 4))
        np.testing.assert_array_equal(device.unpad(padded, (n, 4)), host)

    both(65)
    before = xla_compiles()
    for n in range(66, 128):
        both(n)
    assert xla_compiles() == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_of_the_rows(dtype: str) -> None:
    host = contents((31, 17), dtype)
    array = jnp.asarray(host)
    seen = 0
    for start, stop in ((0, 31), (0, 5), (16, 31), (8, 9), (3, 7)):
        if device.can_view_from(array, start):
            seen += 1
            part = device.part(array, start, stop)
            np.testing.assert_array_equal(part, host[start:stop])
            assert part.unsafe_buffer_pointer() % 16 == 0
    assert seen >= 3
    assert not device.can_view_from(jnp.zeros((4, 0)), 0)


@pytest.mark.parametrize("out", ["jax", "padded"])
def test_an_executor_on_an_accelerator(out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays stay where they are: nothing asks for their contents on the host."""
    monkeypatch.setattr(padding, "_in_host_memory", lambda sharding: False)

    def fn(x: Any, y: Any) -> Any:
        return jnp.sort(x, axis=1), x.sum(), y * 2, x.T

    executor = BucketedExec(fn, dynamic_axes=("b, s", "b"), out=out).with_pow2()
    for b, s in ((3, 5), (4, 8), (5, 5), (3, 5), (1, 1)):
        x, y = jnp.asarray(contents((b, s), "float32")), jnp.asarray(contents((b,), "float32"))
        with monkeypatch.context() as no_host:
            no_host.setattr(padding, "_pad_host", None)
            no_host.setattr(padding, "cut", None)
            got = executor(x, y)
        for a, e in zip(got, jax.jit(fn)(x, y), strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-5)
            if out == "jax":
                assert (a.weak_type, a.committed) == (e.weak_type, e.committed)
                assert a.sharding == e.sharding


def test_what_fits_its_bucket_passes_the_guard_of_transfers() -> None:
    fn = lambda x, y: (x * 2).sum() + y  # noqa: E731
    executor = BucketedExec(fn, dynamic_axes=("n", None), out="padded").with_buckets([4, 8])
    again = BucketedExec(fn, dynamic_axes=("n", None)).with_buckets([4, 8])
    for size in (4, 8, 4):
        x, y = jax.device_put((contents((size,), "float32"), np.float32(1)))
        with jax.transfer_guard("disallow"):
            results = executor(x, y), jax.jit(fn)(x, y), again(x, y)
        np.testing.assert_allclose(results[0], results[1], rtol=1e-6)
        np.testing.assert_allclose(results[2], results[1], rtol=1e-6)
    with pytest.raises(jax.errors.JaxRuntimeError), jax.transfer_guard("disallow"):
        again(x, 1.0)  # as under `jax.jit`


def test_no_implicit_transfer_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of JAX counts what goes to a device, on CPU too."""
    monkeypatch.setattr(padding, "_in_host_memory", lambda sharding: False)
    executor = BucketedExec(lambda x: x * 2, dynamic_axes="n, _").with_pow2()
    first, other = (jax.device_put(contents((n, 4), "float32")) for n in (5, 7))
    executor(first)
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        again = executor(first)
    with jax.transfer_guard_host_to_device("disallow"):
        got = executor(other)
    np.testing.assert_array_equal(again, first * 2)
    np.testing.assert_array_equal(got, other * 2)
