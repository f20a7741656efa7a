"""Names of dtypes in files, and arrays as bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit._jax.arrays import key_impl
from bucketjit.errors import ArtifactError

_KEY = "key:"


def name_of(dtype: Any) -> str:
    """The name of a dtype in files."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        impl = key_impl(dtype)
        if not isinstance(impl, str):
            raise ArtifactError(
                f"random keys of the generator {impl} cannot be saved: only generators of JAX can; "
                "pass jax.random.key_data(key)"
            )
        return f"{_KEY}{impl}"
    return str(np.dtype(dtype).name)


def dtype_of(name: str, place: str) -> Any:
    """The dtype of a name."""
    try:
        if name.startswith(_KEY):
            return jax.eval_shape(lambda: jax.random.key(0, impl=name[len(_KEY) :])).dtype
        dtype = jnp.dtype(name)
        if dtype.name != name or dtype.kind in "OSUMm":
            raise TypeError(name)
    except (TypeError, ValueError, AttributeError):
        raise ArtifactError(
            f"{place}: this version of JAX has no dtype {name!r}; load it with a later one"
        ) from None
    return dtype


def as_bytes(array: np.ndarray) -> memoryview:
    """The values of an array in C order, little endian."""
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    flat = np.ascontiguousarray(array).reshape(-1)
    words: Any = flat.view(np.uint8) if flat.size else np.empty(0, np.uint8)
    return memoryview(words)


def from_bytes(data: memoryview, dtype: Any, shape: tuple[int, ...], place: str) -> np.ndarray:
    """The array in bytes that `as_bytes` made. The array shares their memory."""
    wanted = int(np.prod(shape, dtype=object)) * int(dtype.itemsize)
    if len(data) != wanted:
        raise ArtifactError(
            f"{place}: {len(data)} bytes, and {dtype.name}{list(shape)} has {wanted}; the file is "
            "damaged or was altered"
        )
    return np.frombuffer(data, dtype).reshape(shape)
