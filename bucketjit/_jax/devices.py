"""Devices: their names, the platforms of this process, and where JAX runs programs by default."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import backend as jex_backend

from bucketjit._jax import names

_xla_bridge = names.module("xla_bridge")


@functools.lru_cache(maxsize=256)
def device_name(device: jax.Device) -> str:
    """The platform of a device and its number in its process, such as ``"cpu:0"``.

    It is the same in another process, and in all processes of a job, where ``device.id`` counts on
    from one process to the next. ``"cpu of process 1:2048"`` is a device of another process.
    """
    local = device.client.local_devices()
    if device in local:
        return f"{device.platform}:{local.index(device)}"
    return f"{device.platform} of process {device.process_index}:{device.id}"


@functools.cache
def only_on_cpu() -> bool:
    """Whether the CPU is the only platform of this process.

    Then a program need not be traced for other platforms, which takes time. ``jax.devices`` lists
    the devices of one platform only (``xla_bridge.backends``, since 0.2).
    """
    return set(jex_backend.backends()) == {"cpu"}


def is_started() -> bool:
    """Whether XLA has started in this process.

    A child that is forked afterwards has none of XLA's threads and cannot compile. The public
    ``backends`` takes a lock, which a child may find locked for ever, so its table is read directly
    (``xla_bridge._backends``, since 0.2).
    """
    return bool(_xla_bridge._backends)


def device_list(devices: Sequence[jax.Device]) -> Any:
    """Devices in the form that XLA's clients take them (``jaxlib``'s ``DeviceList``)."""
    one: Any = jax.sharding.SingleDeviceSharding(devices[0])
    return type(one._internal_device_list)(tuple(devices))


@functools.cache
def register_lapack() -> None:
    """Register LAPACK's functions, without which a factorisation calls a null address.

    Lowering does it, and an executable that was read has none. The import of scipy in it takes 100
    ms.
    """
    jax.jit(jax.lax.linalg.cholesky).lower(jax.ShapeDtypeStruct((1, 1), "float32"))


def by_platform(*operands: object, cpu: Callable[..., Any], default: Callable[..., Any]) -> Any:
    """``lax.platform_dependent``, which traces ``cpu`` alone where the CPU is the only platform."""
    if only_on_cpu():
        return cpu(*operands)
    return jax.lax.platform_dependent(*operands, cpu=cpu, default=default)
