"""`Padded`: an array that keeps its padding between one bucketed function and the next.

`bucketjit._arrays.padding` and `bucketjit._arrays.results` make and read such arrays.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bucketjit._arrays.device import sizes_beside
from bucketjit.errors import ArgumentError


class Padded:
    """An array with padding, and the logical size of each of its axes.

    A bucketed function with ``out="padded"`` returns its results with open axes in this form. Every
    bucketed function accepts a `Padded` array in place of an array of its logical shape. If its
    padded shape is that of the bucket, nothing is cut, padded or waited for between the two
    bucketed functions. The padding of an array that you wrap yourself may hold anything. In a
    pytree, a `Padded` array is a leaf.

    A size that the function computes is known when the executable has run. Asking for it waits.

    Args:
        array: The array, padding included.
        sizes: The logical size of each axis, as a sequence; or the logical sizes of some axes, as a
            mapping from the axis. Axes that the mapping leaves out have no padding.

    Attributes:
        array: The array, padding included.

    Raises:
        ArgumentError: ``array`` is not an array, an axis of ``sizes`` does not exist, or a size is
            not within its axis.

    Examples:
        >>> import bucketjit, jax.numpy as jnp, numpy as np
        >>> from bucketjit import Padded
        >>> double = bucketjit.jit(lambda x: 2 * x, out="padded", buckets="pow2")
        >>> total = bucketjit.jit(jnp.sum, buckets="pow2")
        >>> doubled = double(np.ones(5, np.float32))
        >>> doubled.array.shape, doubled.sizes, np.asarray(doubled).shape
        ((8,), (5,), (5,))
        >>> float(total(doubled)), float(total(Padded(jnp.full(8, 3.0), {0: 2})))
        (10.0, 6.0)
    """

    __slots__ = ("_sizes", "_zeros", "array")

    array: Any
    _sizes: tuple[int, ...] | Callable[[], tuple[int, ...]]

    def __init__(self, array: object, sizes: Sequence[int] | Mapping[int, int]) -> None:
        if not isinstance(array, jax.Array | np.ndarray):
            raise ArgumentError(f"Padded: expected an array, got {type(array).__name__}")
        if isinstance(sizes, Mapping):
            if unknown := [i for i in sizes if i not in range(array.ndim)]:
                raise ArgumentError(
                    f"Padded: there is no axis {unknown[0]!r} in an array of shape {array.shape}"
                )
            sizes = [sizes.get(i, n) for i, n in enumerate(array.shape)]
        sizes = tuple(sizes)
        fits = len(sizes) == array.ndim and all(
            isinstance(n, int | np.integer) and not isinstance(n, bool) and 0 <= n <= padded
            for n, padded in zip(sizes, array.shape, strict=True)
        )
        if not fits:
            raise ArgumentError(
                f"Padded: expected a size from 0 to the padded one for each axis of {array.shape}, "
                f"got {sizes}"
            )
        self.array = array
        self._sizes = tuple(map(int, sizes))
        # Whether the padding holds zeros. That of an array of the user may hold anything.
        self._zeros = self._sizes == array.shape

    @classmethod
    def of_result(
        cls, array: jax.Array, sizes: tuple[int, ...] | Callable[[], tuple[int, ...]]
    ) -> Padded:
        """Make a `Padded` array without checks, for an array whose padding holds zeros.

        Args:
            array: The array, padding included.
            sizes: The logical size of each axis, or a function that waits for them.

        Returns:
            The `Padded` array.
        """
        self = object.__new__(cls)
        self.array, self._sizes, self._zeros = array, sizes, True
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """The logical size of each axis: the logical shape."""
        sizes = self._sizes
        if callable(sizes):
            sizes = self._sizes = sizes()
        return sizes

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.sizes

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return int(self.array.ndim)

    @property
    def size(self) -> int:
        """The number of elements, without padding."""
        return math.prod(self.sizes)

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.array.dtype

    @property
    def weak_type(self) -> bool:
        """Whether the dtype is weak in the sense of JAX."""
        return bool(getattr(self.array, "weak_type", False))

    def __len__(self) -> int:
        if not self.sizes:
            raise TypeError("len() of an array without axes")
        return self.sizes[0]

    def __getitem__(self, index: object) -> Any:
        raise TypeError("a Padded array is not indexed: cut its padding first, by jnp.asarray(...)")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        part = np.asarray(self.array)[tuple(map(slice, self.sizes))]
        return np.array(part, dtype) if copy else np.asarray(part, dtype)

    def block_until_ready(self) -> Padded:
        """Wait until the array is computed, as ``jax.Array.block_until_ready`` does.

        Returns:
            The `Padded` array itself.
        """
        jax.block_until_ready(self.array)
        return self

    def is_deleted(self) -> bool:
        """Whether the array was donated or deleted; False for a NumPy array."""
        return isinstance(self.array, jax.Array) and self.array.is_deleted()

    def delete(self) -> None:
        """Free the memory of the array; does nothing for a NumPy array."""
        if isinstance(self.array, jax.Array):
            self.array.delete()

    @property
    def is_clean(self) -> bool:
        """Whether the padding is known to hold zeros."""
        return self._zeros

    def repadded(self, shape: tuple[int, ...]) -> Any:
        """The array in another padded shape, with zeros for padding.

        One program is compiled per pair of padded shapes. It runs asynchronously: the call does not
        wait.

        Args:
            shape: The new padded shape, at least the logical shape along each axis.

        Returns:
            The array itself if it has this shape already and its padding is known to hold zeros.
        """
        if self._zeros:
            if self.array.shape == shape:
                return self.array
            return _rebucket(self.array.shape, shape)(self.array)
        sizes = sizes_beside(self.array, self.sizes)
        return _rebucket(self.array.shape, shape, True)(self.array, sizes)

    def __getstate__(self) -> Any:
        return None, {"array": self.array, "_sizes": self.sizes, "_zeros": self._zeros}

    def __repr__(self) -> str:
        return f"Padded({self.dtype}{list(self.sizes)} in {list(self.array.shape)})"


@functools.lru_cache(maxsize=256)
def _rebucket(
    before: tuple[int, ...], after: tuple[int, ...], clean: bool = False
) -> Callable[..., jax.Array]:
    """The program that moves an array to another padded shape; ``clean`` zeroes its old padding."""

    @jax.jit
    def rebucketed(array: Any, sizes: Any = None) -> jax.Array:
        kept = lax.slice(array, (0,) * array.ndim, tuple(map(min, before, after)))
        if clean:
            for axis in range(kept.ndim):
                real = lax.broadcasted_iota(jnp.int32, kept.shape, axis) < sizes[axis]
                kept = jnp.where(real, kept, jnp.zeros((), kept.dtype))
        return jnp.pad(kept, [(0, n - m) for n, m in zip(after, kept.shape, strict=True)])

    return rebucketed
