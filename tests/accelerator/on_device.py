"""The device that the checks run on, and what can be counted there."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

from bucketjit._arrays import padded, padding
from bucketjit._arrays.device import on_device
from examples.compile_counter import CompileCounter


class NotShown(Exception):
    """Raised by a check that this device cannot make, with the reason."""


def device() -> Any:
    """The device on which JAX runs what is placed nowhere else."""
    return jax.devices()[0]


def is_cpu() -> bool:
    """Whether there is no accelerator."""
    return device().platform == "cpu"


def placed(host: np.ndarray) -> jax.Array:
    """An array on the device."""
    return jax.block_until_ready(jax.device_put(host))


@contextlib.contextmanager
def as_on_an_accelerator() -> Iterator[None]:
    """Arrays are padded and cut where they are, on CPU too: that takes DLPack views as well."""
    with contextlib.ExitStack() as stack:
        if is_cpu():
            for place, name, value in (
                (padding, "_in_host_memory", lambda sharding: False),
                (padded, "sizes_beside", _sizes_on_device),
            ):
                stack.enter_context(mock.patch.object(place, name, value))
        yield


def _sizes_on_device(array: Any, sizes: tuple[int, ...]) -> Any:
    return on_device(sizes, device())


@contextlib.contextmanager
def without_transfers(to_device: str = "disallow_explicit") -> Iterator[None]:
    """Nothing comes to the host, and nothing goes to the device but what ``to_device`` allows.

    JAX on CPU does not count what comes to the host, so the functions that pad and cut there are
    taken away as well.

    Args:
        to_device: A level of ``jax.transfer_guard_host_to_device``.
    """
    with (
        mock.patch.object(padding, "_pad_host", None),
        mock.patch.object(padding, "cut", None),
        jax.transfer_guard_device_to_host("disallow_explicit"),
        jax.transfer_guard_device_to_device("disallow_explicit"),
        jax.transfer_guard_host_to_device(to_device),
    ):
        yield


@functools.cache
def _counter() -> CompileCounter:
    return CompileCounter()


def compiles() -> int:
    """XLA compiles of this process since this function was first called, whoever caused them."""
    return _counter().compiles


def memory(which: str = "bytes_in_use") -> int:
    """A number of the device's memory statistics.

    Raises:
        NotShown: The device has none.
    """
    told = device().memory_stats() or {}
    if which not in told:
        raise NotShown(f"{device().platform} tells nothing of its memory")
    return int(told[which])


def same(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    """Compare two trees of arrays on the host, floats within a tolerance.

    Raises:
        AssertionError: They differ.
    """
    got, want = (jax.tree_util.tree_leaves(x) for x in (got, want))
    assert len(got) == len(want), f"{len(got)} results, wanted {len(want)}"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"result {i}: {a.dtype}{a.shape}"
        if np.issubdtype(b.dtype, np.inexact):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
        else:  # exact ones, and those of ml_dtypes, in which nothing here computes
            np.testing.assert_array_equal(a, b)


def refused(call: Callable[[], Any]) -> bool:
    """Whether the guard of JAX refuses a call."""
    try:
        jax.block_until_ready(call())
    except Exception as error:
        if "isallowed" not in str(error):
            raise
        return True
    return False
