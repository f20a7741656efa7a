"""Sign calls whose arguments are described by ``jax.ShapeDtypeStruct`` in place of arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit._jax.arrays import (
    explicit_sharding,
    is_on_several_devices,
    key_impl,
    key_shape,
    with_type,
)
from bucketjit._raised import first_line
from bucketjit._tracing.call import Call
from bucketjit._tracing.signer import Signer
from bucketjit.errors import ArgumentError

_TOO_LARGE = 2**63  # bytes of an array: XLA counts them in 64 bits with a sign


def can_be(shape: Sequence[int], dtype: Any) -> bool:
    """Whether an array of this shape has less than 2^63 bytes. Beyond, XLA aborts the process."""
    return math.prod(shape) * int(dtype.itemsize) < _TOO_LARGE


def array_like(value: object) -> Any:
    """An argument with an array of zeros in place of each ``jax.ShapeDtypeStruct`` in it.

    Most of these arrays take no memory (NumPy broadcasts one zero). Random keys, weak types and
    shardings that are part of the type need a ``jax.Array``, which does.
    """
    if not isinstance(value, jax.ShapeDtypeStruct):
        leaves, tree = jax.tree_util.tree_flatten(value)
        if not any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            return value
        return jax.tree_util.tree_unflatten(tree, map(array_like, leaves))
    if not can_be(value.shape, value.dtype):
        raise ArgumentError(f"no array of {value.dtype} can have the shape {value.shape}")
    try:
        return _zeros(value)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        raise ArgumentError(
            f"no array of {value.dtype} and the shape {value.shape} can be made here, which its "
            f"weak type or its keys need ({first_line(error)}); give smaller sizes"
        ) from error


def _zeros(value: jax.ShapeDtypeStruct) -> Any:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        words = jnp.zeros((*value.shape, *key_shape(value.dtype)), jnp.uint32)
        return jax.random.wrap_key_data(words, impl=key_impl(value.dtype))
    if value.weak_type:
        return with_type(jnp.zeros(value.shape, value.dtype), value.dtype, True)
    mesh = getattr(explicit_sharding(value), "mesh", None)
    if is_on_several_devices(value.sharding) or isinstance(mesh, jax.sharding.Mesh):
        try:
            return jnp.zeros(value.shape, value.dtype, device=value.sharding)
        except ValueError as error:
            raise ArgumentError(f"{value}: {first_line(error)}") from error
    return np.broadcast_to(np.zeros((), value.dtype), value.shape)


def sign_like(signer: Signer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Sign a call whose arguments may hold structs."""
    named = {name: array_like(value) for name, value in kwargs.items()}
    call = signer.sign(tuple(map(array_like, args)), named)
    # The leaves are the structs: they may name a device, which the zeros do not.
    return dataclasses.replace(call, leaves=signer.leaves_of(args, kwargs))
