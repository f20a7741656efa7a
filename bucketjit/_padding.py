"""Pad arguments and unpad results: nothing here compiles, whatever the size.

``jnp.pad(x)``, ``y[:n]`` and ``jnp.asarray(view)`` compile once per size (27-40 ms each), so a
wrapper that used them would have gained nothing. Arrays in host memory are padded and cut by
NumPy; those of an accelerator stay there, see `_device`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from bucketjit import _device, _jax
from bucketjit._padded import Padded


def pad(value: Any, shape: tuple[int, ...]) -> Any:
    """``value`` with zeros after its end along each axis that is shorter than ``shape``.

    The result owns fresh memory: a call is asynchronous and may alias an aligned NumPy buffer,
    so a buffer kept for the next call could be overwritten while it is read.

    Waits for ``value`` where that is still being computed, in host memory; a `Padded` array is
    never waited for, and may have anything in its padding.

    Args:
        value: A NumPy or JAX array, or a `Padded` one.
        shape: The padded shape.

    Returns:
        ``value`` itself if it has this shape already, else a new array of this shape, on the
        device of ``value`` if that was committed to one.
    """
    if type(value) is Padded and value.sizes == value.array.shape:
        value = value.array
    if type(value) is Padded:
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        if value.array.shape == shape or not (is_key or value.sizes == shape):
            return value.repadded(shape)
        value = unpad(value.array, value.sizes)
    if value.shape == shape:
        return value
    if not isinstance(value, jax.Array):
        return _pad_host(value, shape)
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(value)
        words = pad(data, (*shape, *data.shape[value.ndim :]))
        return jax.random.wrap_key_data(words, impl=_jax.key_impl(value.dtype))
    if not _in_host_memory(value.sharding) and value.size and _device.can_view(value):
        return _jax.placed_like(_device.pad(value, shape), value, False)
    padded = _pad_host(np.asarray(value), shape)
    return _jax.array_from_host(padded, False, value) if value.committed else padded


def _pad_host(host: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    padded = np.zeros(shape, host.dtype)
    if host.ndim == 1 or host.shape[1:] == shape[1:]:
        padded[: host.shape[0]] = host
    else:
        padded[tuple(map(slice, host.shape))] = host
    return padded


def unpad(value: Any, shape: tuple[int, ...], weak_type: bool = False) -> Any:
    """The logical part of a padded result, as a ``jax.Array`` on the same device.

    A prefix along the leading axis is handed over without a copy: it is a view that keeps the
    padded result alive. In host memory this waits for the result to be computed, since nothing
    but a program compiled for the logical size could wait in its place.

    Args:
        value: The padded result; a host array may be cut too, into a view.
        shape: Its logical shape.
        weak_type: Whether the result is weakly typed.

    Returns:
        An array of this shape.
    """
    if value.shape == shape:
        return value
    if isinstance(value, np.ndarray):
        return cut(value, shape)
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(value)
        words = unpad(data, (*shape, *data.shape[value.ndim :]))
        return jax.random.wrap_key_data(words, impl=_jax.key_impl(value.dtype))
    if not _in_host_memory(value.sharding) and 0 not in shape and _device.can_view(value):
        return _jax.placed_like(_device.unpad(value, shape), value, weak_type)
    part = cut(np.asarray(value), shape)
    return _jax.array_from_host(np.ascontiguousarray(part), weak_type, value)


def part(value: Any, axis: int, start: int, stop: int) -> Any:
    """Positions ``start`` to ``stop`` of an array along an axis, without its padding.

    Host memory is looked at where it is. So is that of an accelerator along the leading axis, where
    XLA can begin there; other parts of arrays on one come by way of the host.

    Args:
        value: A NumPy or JAX array, or a `Padded` one.
        axis: The axis.
        start: The first position.
        stop: The position after the last one, at most the logical size.

    Returns:
        An array of the same kind, on the same device.
    """
    value = plain(value)
    inside = (slice(None),) * axis + (slice(start, stop),)
    if not isinstance(value, jax.Array):
        return value[inside]
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        words = part(jax.random.key_data(value), axis, start, stop)
        return jax.random.wrap_key_data(words, impl=_jax.key_impl(value.dtype))
    weak = bool(value.weak_type)
    if not _in_host_memory(value.sharding) and axis == 0 and _device.can_view_from(value, start):
        return _jax.placed_like(_device.part(value, start, stop), value, weak)
    host = np.asarray(value)[inside]
    if len(value.sharding.device_set) > 1:  # a part need not fit the mesh
        return host
    return _jax.array_from_host(np.ascontiguousarray(host), weak, value)


def fresh(value: Any) -> Any:
    """A copy of an argument that may be donated in its place; a NumPy array as it is."""
    if type(value) is Padded:
        return Padded(fresh(value.array), value.sizes)
    if not isinstance(value, jax.Array):
        return value
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        words = fresh(jax.random.key_data(value))
        return jax.random.wrap_key_data(words, impl=_jax.key_impl(value.dtype))
    return _jax.array_from_host(np.array(value), bool(value.weak_type), value)


def plain(value: Any) -> Any:
    """``value``, without its padding if it is a `Padded` array."""
    return unpad(value.array, value.sizes) if type(value) is Padded else value


def without_padding(tree: Any) -> Any:
    """A tree without the padding of its `Padded` arrays."""
    return jax.tree_util.tree_map(plain, tree)


def cut(host: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The logical part of an array in host memory, as a view."""
    if host.shape[1:] == shape[1:]:
        return host[: shape[0]]
    return host[tuple(map(slice, shape))]


@functools.lru_cache(maxsize=256)
def _in_host_memory(sharding: Any) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)
