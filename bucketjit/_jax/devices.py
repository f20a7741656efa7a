"""Devices: their names, platforms and defaults."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import backend as jex_backend

from bucketjit._jax import names

_mesh = names.module("mesh")
_xla_bridge = names.module("xla_bridge")


def device_name(device: jax.Device) -> str:
    """The platform and number of a device, by which another process knows it."""
    return f"{device.platform}:{device.id}"


@functools.cache
def only_on_cpu() -> bool:
    """Whether this process can run programs on CPU only, so that none is lowered for another.

    Tracing a program for each platform takes time (``xla_bridge.backends``, since 0.2).
    """
    return set(jex_backend.backends()) == {"cpu"}


def is_started() -> bool:
    """Whether XLA runs in this process; a fork has none of its threads, and compiles nothing.

    Its lock is not taken, which a fork may find locked (``xla_bridge._backends``, since 0.2).
    """
    return bool(_xla_bridge._backends)


def by_platform(*operands: object, cpu: Callable[..., Any], default: Callable[..., Any]) -> Any:
    """``lax.platform_dependent``; only one of both is traced where there is nothing but the CPU."""
    if only_on_cpu():
        return cpu(*operands)
    return jax.lax.platform_dependent(*operands, cpu=cpu, default=default)


def default_device() -> Any:
    """Where ``jit`` runs what nobody has placed (``pxla.get_default_device``, since 0.4)."""
    return jex_backend.get_default_device()


def sole_device() -> Any | None:
    """`default_device`; None where a mesh is in its place (``jax.set_mesh``)."""
    return default_device() if _mesh.get_concrete_mesh().empty else None


def is_place(value: object) -> bool:
    """Whether a parameter of an equation says where something is to be: not so an empty mesh."""
    if isinstance(value, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        return not value.empty
    return isinstance(value, jax.Device | jax.sharding.Sharding)
