"""What the patches for computed sizes ask of a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from bucketjit._jax import names

_core = names.module("core")

# Returns what makes sizes in this thread (`bucketjit._ir.computed_sizes.Sizing`); None if JAX's own
# functions are to run.
Selecting = Callable[[], Any]


def is_traced(value: object) -> bool:
    """Whether the numbers of a value are known at run time only."""
    return isinstance(value, jax.core.Tracer) and value.to_concrete_value() is None


def is_open(value: Any) -> bool:
    """Whether a value is traced and has axes."""
    return isinstance(value, jax.core.Tracer) and np.ndim(value) > 0


def is_traced_size(value: Any) -> bool:
    """Whether a value is an integer that is known at run time only."""
    return is_traced(value) and np.ndim(value) == 0 and _is_integer(value)


def _is_integer(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, np.integer))


def entries_of(index: slice) -> tuple[Any, Any, Any]:
    """The start, stop and step of a slice."""
    return index.start, index.stop, index.step


def as_value(size: Any, dtype: Any = np.int32) -> Any:
    """A size, or an integer, as a scalar that the program computes with."""
    if is_symbolic_dim(size):
        size = _core.dimension_as_value(size)
    if isinstance(size, jax.Array):
        return jax.lax.convert_element_type(size, dtype)
    return np.asarray(size, dtype)


def at_places(array: Any, places: Any, axis: int) -> Any:
    """The rows of an array at positions of an axis, which are moved inside of it.

    ``jnp.take`` asks whether there is any position, which is a decision on the size.
    """
    return array.at[(slice(None),) * axis + (places,)].get(mode="clip")
