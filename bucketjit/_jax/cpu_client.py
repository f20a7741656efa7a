"""A CPU client without threads of its own, and arrays that are lent to it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from typing import Any, cast

import jax
import numpy as np

from bucketjit._jax import names
from bucketjit._jax.arrays import SINGLE_DEVICE_SHARDING, array_type, placed_like
from bucketjit._jax.names import Without, lacking

_xla_client = names.module("lib").xla_client


def single_threaded_device() -> Any | None:
    """A CPU whose programs run in the thread that calls them; None if this system has none.

    It is that of a client of its own (``xla_client.make_cpu_client``, since 0.4), whose arrays no
    program of another one takes. XLA has no option for how many threads share an operation: a
    client has as many as the thread that makes it has cores. So a thread of one core makes this
    one. (``NPROC`` would tell XLA too, but to write to the environment is not safe beside threads
    that read it.)
    """
    if lacking(Without.SINGLE_THREADED):
        return None
    with _one_client:  # a cache lets two threads that come at the same time both make one
        return _make_single_threaded_device()


_one_client = threading.Lock()


@functools.cache
def _make_single_threaded_device() -> Any | None:
    process = os.getpid()
    cores = sorted(os.sched_getaffinity(process)) if hasattr(os, "sched_setaffinity") else []
    if len(cores) < 2 or jax.process_count() > 1:
        return None
    made: list[Any] = []
    tasks = "/proc/self/task"

    def make() -> None:
        before = set(os.listdir(tasks))
        os.sched_setaffinity(0, cores[:1])
        made.append(_xla_client.make_cpu_client(asynchronous=False, num_devices=1))
        # Its threads begin with the cores of the one that makes them. Some of them compile.
        for task in map(int, set(os.listdir(tasks)) - before):
            with contextlib.suppress(OSError):  # another one's, which has ended meanwhile
                if os.sched_getaffinity(task) == set(cores[:1]):
                    os.sched_setaffinity(task, cores)

    def try_to() -> None:
        with contextlib.suppress(OSError, RuntimeError):  # no such rights, no such files
            make()

    with contextlib.suppress(RuntimeError):  # no more threads
        maker = threading.Thread(target=try_to, name="bucketjit-client")
        maker.start()
        maker.join()
    if not made:
        return None
    # A fork has none of its threads, for which it would wait when it is destroyed.
    keep = functools.partial(ctypes.pythonapi.Py_IncRef, ctypes.py_object(made[0]))
    os.register_at_fork(after_in_child=keep)
    return made[0].local_devices()[0]


def can_lend(value: Any, device: jax.Device) -> bool:
    """Whether JAX would run a program that takes an array on a device, or anywhere it likes.

    Not so for a tracer, and for what is committed to another device or several.

    Args:
        value: An array, or the type of one with the place that it is committed to.
        device: The device.
    """
    if isinstance(value, jax.core.Tracer):
        return False
    is_type = isinstance(value, jax.ShapeDtypeStruct)
    placed = value.sharding if is_type or getattr(value, "committed", False) else None
    return placed is None or (
        type(placed) is SINGLE_DEVICE_SHARDING and placed.device_set == {device}
    )


def borrowed(value: object, device: jax.Device) -> jax.Array:
    """The contents of an array for programs of `single_threaded_device`, without a copy.

    Args:
        value: A ``jax.Array`` in host memory, or an array of NumPy's, which may be copied.
        device: The device.

    Returns:
        The array on the device, to which it is committed.

    Raises:
        RuntimeError: It has been deleted.
    """
    kind = jax.typeof(value)
    if isinstance(value, jax.Array) and not value.is_deleted():
        # NumPy's view holds the object whose memory it shows; this one goes with the view.
        value = placed_like(value, value, kind.weak_type)
    return _placed(np.asarray(value, kind.dtype), kind.weak_type, device, True)


def returned(array: jax.Array, device: jax.Device, committed: bool) -> jax.Array:
    """A result of `single_threaded_device` on a CPU of JAX's own, without a copy."""
    return _placed(np.asarray(array), array.weak_type, device, committed)


def _placed(host: np.ndarray, weak_type: bool, device: jax.Device, committed: bool) -> jax.Array:
    aval, there = array_type(host.shape, host.dtype, weak_type), _sharding_of(device)
    return cast(jax.Array, _xla_client.batched_device_put(aval, there, [host], [device], committed))


@functools.cache
def _sharding_of(device: jax.Device) -> Any:
    return jax.sharding.SingleDeviceSharding(device)


def placed_on(struct: object, device: Any | None) -> jax.ShapeDtypeStruct:
    """The type of an array, committed to a device or to none."""
    kind, placed = jax.typeof(struct), None if device is None else _sharding_of(device)
    weak = bool(getattr(kind, "weak_type", False))
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=placed, weak_type=weak)
