"""A CPU client whose programs run in the calling thread, and arrays shared with it without copies.

The chunks of a split call run on it side by side, each in a thread of `bucketjit._cores`.
"""

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
    """A CPU device whose programs run in the thread that calls them; None if there can be none.

    The device belongs to a separate client of XLA (``xla_client.make_cpu_client``, since 0.4; JAX
    has no public function for a second CPU client). Programs of one client do not take arrays of
    another: see `borrowed` and `returned`.

    XLA has no option for the number of threads that share an operation. A client has as many as
    the thread that makes it has cores, so a thread with an affinity of one core makes this client.
    (XLA also reads ``NPROC``, but writing to the environment is not safe while other threads read
    it.)

    Returns:
        The device, the same in each call. None if this jaxlib lacks the names, if the system lets
        no thread choose its cores, if there is one core, or if there are several processes.
    """
    if lacking(Without.SINGLE_THREADED):
        return None
    # `functools.cache` alone would let two threads that call at the same time both make a client.
    with _one_client:
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
        # Threads of the client inherit the affinity of one core. Some of them compile: give these
        # all cores back.
        for task in map(int, set(os.listdir(tasks)) - before):
            with contextlib.suppress(OSError):  # a thread of somebody else that has ended meanwhile
                if os.sched_getaffinity(task) == set(cores[:1]):
                    os.sched_setaffinity(task, cores)

    def try_to() -> None:
        with contextlib.suppress(OSError, RuntimeError):  # no right to set it, or no /proc
            make()

    with contextlib.suppress(RuntimeError):  # the system starts no more threads
        maker = threading.Thread(target=try_to, name="bucketjit-client")
        maker.start()
        maker.join()
    if not made:
        return None
    # A forked child has none of the client's threads, and destroying the client would wait for
    # them. So the child keeps a reference for ever.
    keep = functools.partial(ctypes.pythonapi.Py_IncRef, ctypes.py_object(made[0]))
    os.register_at_fork(after_in_child=keep)
    return made[0].local_devices()[0]


def can_lend(value: Any, device: jax.Device) -> bool:
    """Whether JAX may run a program with this argument on ``device``.

    Args:
        value: An array, or a ``ShapeDtypeStruct`` whose sharding says where it is committed.
        device: The device.

    Returns:
        False for a tracer, and for an array that is committed to another device or to several.
    """
    if isinstance(value, jax.core.Tracer):
        return False
    is_type = isinstance(value, jax.ShapeDtypeStruct)
    placed = value.sharding if is_type or getattr(value, "committed", False) else None
    return placed is None or (
        type(placed) is SINGLE_DEVICE_SHARDING and placed.device_set == {device}
    )


def borrowed(value: object, device: jax.Device) -> jax.Array:
    """An array for programs of `single_threaded_device` that shares the memory of ``value``.

    ``jax.device_put`` to a device of another client copies (``xla_client.batched_device_put``,
    since 0.4.9).

    Args:
        value: A ``jax.Array`` in host memory, or a NumPy array. The latter may be copied.
        device: The device.

    Returns:
        The array, committed to the device.

    Raises:
        RuntimeError: ``value`` has been deleted.
    """
    kind = jax.typeof(value)
    if isinstance(value, jax.Array) and not value.is_deleted():
        # The NumPy view references the array object whose memory it shows. With a new object in
        # between, the view does not keep the user's one alive.
        value = placed_like(value, value, kind.weak_type)
    return _placed(np.asarray(value, kind.dtype), kind.weak_type, device, True)


def returned(array: jax.Array, device: jax.Device, committed: bool) -> jax.Array:
    """A result of `single_threaded_device` as an array on a CPU of JAX, without a copy.

    ``jax.device_put`` copies, as for `borrowed`.

    Args:
        array: The result.
        device: A CPU device of JAX.
        committed: Whether the new array is committed to it.

    Returns:
        The new array, which shares the memory of ``array``.
    """
    return _placed(np.asarray(array), array.weak_type, device, committed)


def _placed(host: np.ndarray, weak_type: bool, device: jax.Device, committed: bool) -> jax.Array:
    aval, there = array_type(host.shape, host.dtype, weak_type), _sharding_of(device)
    return cast(jax.Array, _xla_client.batched_device_put(aval, there, [host], [device], committed))


@functools.cache
def _sharding_of(device: jax.Device) -> Any:
    return jax.sharding.SingleDeviceSharding(device)


def placed_on(struct: object, device: Any | None) -> jax.ShapeDtypeStruct:
    """The type of ``struct``, committed to ``device``, or to no device where that is None."""
    kind, placed = jax.typeof(struct), None if device is None else _sharding_of(device)
    weak = bool(getattr(kind, "weak_type", False))
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=placed, weak_type=weak)
