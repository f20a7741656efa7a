"""Pad arguments and unpad results on the host: nothing here compiles, whatever the size.

``jnp.pad(x)``, ``y[:n]`` and ``jnp.asarray(view)`` compile once per size (27-40 ms each), so a
wrapper that used them would have gained nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from bucketjit import _jax


def pad(value: Any, shape: tuple[int, ...]) -> Any:
    """``value`` with zeros after its end along each axis that is shorter than ``shape``.

    The result owns fresh memory: a call is asynchronous and may alias an aligned NumPy buffer,
    so a buffer kept for the next call could be overwritten while it is read.

    Args:
        value: A NumPy or JAX array.
        shape: The padded shape.

    Returns:
        ``value`` itself if it has this shape already, else a new array of this shape, on the
        device of ``value`` if that was committed to one.
    """
    if value.shape == shape:
        return value
    if isinstance(value, jax.Array):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            data = jax.random.key_data(value)
            words = pad(data, (*shape, *data.shape[value.ndim :]))
            return jax.random.wrap_key_data(words, impl=_jax.key_impl(value.dtype))
        padded = _pad_host(np.asarray(value), shape)
        return jax.device_put(padded, value.sharding) if value.committed else padded
    return _pad_host(value, shape)


def _pad_host(host: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    padded = np.zeros(shape, host.dtype)
    if host.ndim == 1 or host.shape[1:] == shape[1:]:
        padded[: host.shape[0]] = host
    else:
        padded[tuple(map(slice, host.shape))] = host
    return padded


def unpad(value: jax.Array, shape: tuple[int, ...], weak_type: bool = False) -> jax.Array:
    """The logical part of a padded result, as a ``jax.Array`` on the same device.

    A prefix along the leading axis of a CPU array is handed over without a copy: it is a view
    that keeps the padded result alive. Waits for the result to be computed.

    Args:
        value: The padded result.
        shape: Its logical shape.
        weak_type: Whether the result is weakly typed.

    Returns:
        An array of this shape.
    """
    if value.shape == shape:
        return value
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(value)
        words = unpad(data, (*shape, *data.shape[value.ndim :]))
        return jax.random.wrap_key_data(words, impl=_jax.key_impl(value.dtype))
    host = np.asarray(value)
    if host.shape[1:] == shape[1:]:
        part = host[: shape[0]]
    else:
        part = np.ascontiguousarray(host[tuple(map(slice, shape))])
    return _jax.array_from_host(part, weak_type, value)
