"""What the patches for computed sizes ask of a thread and of a value; and `Noticing`.

While a thread traces, `selecting` returns what makes sizes: `Noticing` first, which stops a trace
that needs one, then `bucketjit._ir.computed_sizes.Sizing`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from bucketjit._jax.jaxprs import value_of_size
from bucketjit._jax.patches.patch import Patch

_of_thread = threading.local()  # `open`: a `Noticing`, a `Sizing` or None


def selecting() -> Any:
    """What makes sizes in this thread; None if JAX's own functions are to run."""
    return getattr(_of_thread, "open", None)


def opened(owner: Any, name: str, everywhere: bool = True) -> Callable[[Callable[..., Any]], Patch]:
    """Make a patch of a function that makes a computed size, until JAX has such sizes.

    Before the arguments of the original it takes what makes sizes in this thread, and the original.
    """
    return lambda function: Patch(owner, name, functools.partial(_opening, function), everywhere)


def _opening(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        open_ = selecting()
        if open_ is None:
            return original(*args, **kwargs)
        return function(open_, original, *args, **kwargs)

    return replacement


def is_traced(value: object) -> bool:
    """Whether the numbers of a value are known at run time only."""
    return isinstance(value, jax.core.Tracer) and value.to_concrete_value() is None


def is_open(value: Any) -> bool:
    """Whether a value is traced and has axes."""
    return isinstance(value, jax.core.Tracer) and np.ndim(value) > 0


def is_traced_size(value: Any) -> bool:
    """Whether a value is an integer that is known at run time only."""
    return is_traced(value) and np.ndim(value) == 0 and jnp.issubdtype(value.dtype, np.integer)


def has_traced_slice(idx: Any) -> bool:
    """Whether an end or a step of a slice in an index is known at run time only."""
    indices = idx if isinstance(idx, tuple) else (idx,)
    slices = (i for i in indices if isinstance(i, slice))
    return any(any(map(is_traced, (i.start, i.stop, i.step))) for i in slices)


def as_value(size: Any, dtype: Any = np.int32) -> Any:
    """A size, or an integer, as a scalar that the program computes with."""
    if is_symbolic_dim(size):
        size = value_of_size(size)
    if isinstance(size, jax.Array):
        return jax.lax.convert_element_type(size, dtype)
    return np.asarray(size, dtype)


def at_places(array: Any, places: Any, axis: int) -> Any:
    """The rows of an array at positions of an axis, which are moved inside of it.

    ``jnp.take`` asks whether there is any position, which is a decision on the size.
    """
    return array.at[(slice(None),) * axis + (places,)].get(mode="clip")


class SizeIsComputed(Exception):
    """The function computes a size, and is traced where it cannot."""


@contextmanager
def as_open(value: Any) -> Iterator[None]:
    """A context in which this makes the sizes of traces of this thread."""
    before = selecting()
    _of_thread.open = value
    try:
        yield
    finally:
        _of_thread.open = before


class Noticing:
    """Stops a trace where it would compute a size.

    Attributes:
        noticed: Whether it has stopped one. User code may have caught the error.
    """

    def __init__(self) -> None:
        self.noticed = False

    def nonzero(self, *_: Any, **__: Any) -> Any:
        """Raise `SizeIsComputed`."""
        self.noticed = True
        raise SizeIsComputed

    def ended(self, trace: Any) -> None:
        """Nothing is known of a trace."""

    refuse = cut = first = size = position = extend = nonzero

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which traces of this thread stop."""
        with as_open(self):
            yield
