"""The padded size of every expression in one bucket, and its logical size at run time.

Masking rules ask `BucketSizes` for both, and for masks. `bounds` computes the padded sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bucketjit._ir.bounds import MOST, MOST_OF_INT64, lower_bound, reach, upper_bound_text
from bucketjit._ir.expressions import Dim, Shape, compiled, is_symbolic, parsed, variables_of
from bucketjit._jax.config import current_trace
from bucketjit.errors import MaskingError


def evaluate_traced(dim: Dim, sizes: Mapping[str, jax.Array], bucket: Mapping[str, int]) -> Any:
    """The value of a dimension at sizes that are known at run time.

    It is computed in int32, or in int64 if an intermediate value may overflow in this bucket.
    """
    if isinstance(dim, int):
        return dim
    text = str(dim)
    names = variables_of(text)
    function, values = compiled(text, "traced"), [sizes[v] for v in names]
    if not is_wide(text, tuple((v, bucket[v]) for v in names)):
        return function(*values)
    with jax.enable_x64(True):  # without it int64 becomes int32
        wide = function(*(lax.convert_element_type(n, np.int64) for n in values))
        return lax.convert_element_type(wide, np.int32)


@functools.lru_cache(maxsize=16384)
def is_wide(text: str, bucket: tuple[tuple[str, int], ...]) -> bool:
    """Whether an expression needs int64 in a bucket."""
    most = max(map(abs, reach(parsed(text), dict(bucket))))
    if most > MOST_OF_INT64:
        raise MaskingError(
            f"computing the size {text} takes integers of more than 64 bits in this bucket",
            "choose smaller buckets, or compute on the size with jax.numpy",
            in_bucket=True,
        )
    return most > MOST


def _not_int32(dim: Dim) -> MaskingError:
    why = f"the size {dim} does not fit into int32 in this bucket"
    return MaskingError(why, "choose smaller buckets", in_bucket=True)


class BucketSizes:
    """The sizes one executable is built for: padded sizes as ints, logical sizes at run time.

    Attributes:
        bucket: Padded size of each variable.
        values: Run-time logical size of each variable, int32 scalars.
        size_constants: Constants that depend on the logical sizes, padded.
        uneven: The axes of a mesh along which the logical sizes differ from shard to shard.
        rooms: Padded sizes of some expressions, by text, where they are no bounds of these.
        defined: How many sizes the program has computed so far.
    """

    def __init__(
        self,
        bucket: Mapping[str, int],
        lower: Mapping[str, int],
        values: Mapping[str, Any],
        size_constants: Sequence[Any] = (),
        uneven: Iterable[Any] = (),
        rooms: Mapping[str, int] = {},
    ) -> None:
        self.uneven, self.rooms = frozenset(uneven), rooms
        self.defined = 0
        self.size_constants = tuple(size_constants)
        self.bucket = dict(bucket)
        for variable, size in bucket.items():
            if size > MOST:
                raise _not_int32(variable)
        self.values = dict(values)
        self._lower = {v: lower.get(v, 1) for v in bucket}
        # By `id`, as hashing an expression formats it. The entry keeps the expression alive, so
        # that no other one gets its `id`.
        self._padded: dict[int, tuple[Dim, str, int]] = {}
        self._constants: dict[Any, Any] = {}
        self._masks: dict[Any, Any] = {}

    def extended(self, more: Mapping[str, tuple[int, Any]]) -> BucketSizes:
        """These sizes with more variables, for rules that make new dimensions."""
        bucket = {**self.bucket, **{v: padded for v, (padded, _) in more.items()}}
        values = {**self.values, **{v: logical for v, (_, logical) in more.items()}}
        lower = {**self._lower, **dict.fromkeys(more, 0)}
        shared = self.size_constants, self.uneven, self.rooms
        return BucketSizes(bucket, lower, values, *shared)

    def at(self, values: Mapping[str, Any], size_constants: Sequence[Any]) -> BucketSizes:
        """The same padded sizes with other logical ones."""
        shared = self.uneven, self.rooms
        return BucketSizes(self.bucket, self._lower, values, size_constants, *shared)

    def define(self, variable: str, value: Any) -> None:
        """Give a variable its run-time size, which the program has just computed.

        A program that is evaluated again, such as the body of a loop, computes another one.
        """
        self.values[variable] = value
        self.defined += 1
        self._masks = {
            key: mask
            for key, mask in self._masks.items()
            if not any(variable in variables_of(text) for _, text in key[2])
        }

    def padded(self, dim: Dim) -> int:
        """The padded size of a dimension: its upper bound over the whole bucket, or its room."""
        return dim if type(dim) is int else self._text_and_padded(dim)[1]

    def most(self, dim: Dim) -> int:
        """The upper bound of a dimension over the whole bucket."""
        return upper_bound_text(str(dim), self._lower, self.bucket)

    def _text_and_padded(self, dim: Dim) -> tuple[str, int]:
        entry = self._padded.get(id(dim))
        if entry is None:
            text = str(dim)
            size = self.rooms.get(text) or upper_bound_text(text, self._lower, self.bucket)
            if size > MOST:
                raise _not_int32(dim)
            entry = self._padded[id(dim)] = (dim, text, size)
        return entry[1:]

    def padded_shape(self, shape: Iterable[Dim]) -> tuple[int, ...]:
        """The padded shape of a logical shape."""
        return tuple(map(self.padded, shape))

    def logical(self, dim: Dim) -> Any:
        """The logical size of a dimension."""
        if isinstance(dim, int):
            return dim
        text, _ = self._text_and_padded(dim)  # raises if the size is too large
        box = tuple((v, self._lower[v], self.bucket[v]) for v in variables_of(text))
        if lower_bound(text, box) < -MOST:
            raise _not_int32(dim)
        return jnp.asarray(evaluate_traced(dim, self.values, self.bucket), jnp.int32)

    def in_bounds(
        self,
        shape: Shape,
        axes: Iterable[int] | None = None,
        broadcast_to: tuple[int, ...] | None = None,
    ) -> Any | None:
        """The mask of the real elements of an array of this logical shape; False in its padding.

        A mask is made once per trace and shape, as most equations of a program share theirs.
        """
        rank = len(shape)
        every = range(rank) if axes is None else sorted({a % rank for a in axes})
        parts = tuple(
            (a, self._text_and_padded(shape[a])[0]) for a in every if is_symbolic(shape[a])
        )
        if not parts:
            return None
        target = broadcast_to or tuple(
            self.padded(shape[i]) if any(i == a for a, _ in parts) else 1 for i in range(rank)
        )
        # With the trace, as its arrays cannot be used in another one.
        key = (current_trace(), target, parts)
        if key not in self._masks:
            mask = self._mask([(shape[a], text) for a, text in parts])
            if mask.shape != target:
                mask = lax.broadcast_in_dim(mask, target, [a for a, _ in parts])
            self._masks[key] = mask
        return self._masks[key]

    def constant(self, shape: tuple[int, ...], dtype: np.dtype[Any], value: object) -> Any:
        """An array filled with a known scalar, made once per trace."""
        scalar = np.asarray(value).astype(dtype)
        key = (current_trace(), shape, str(dtype), scalar.tobytes())
        if key not in self._constants:
            self._constants[key] = lax.full(shape, scalar, dtype)
        return self._constants[key]

    def _mask(self, dims: Sequence[tuple[Dim, str]]) -> Any:
        """The mask of the real elements of an array of these open axes, which shapes share."""
        padded = self.padded_shape(dim for dim, _ in dims)
        key = (current_trace(), padded, tuple((i, text) for i, (_, text) in enumerate(dims)))
        if key in self._masks:
            return self._masks[key]
        if len(dims) == 1:
            ((dim, _),) = dims
            mask = lax.iota(jnp.int32, *padded) < self.logical(dim)
        else:
            parts = (self._mask([dim]) for dim in dims)
            here = (lax.broadcast_in_dim(m, padded, [i]) for i, m in enumerate(parts))
            mask = functools.reduce(lax.bitwise_and, here)
        self._masks[key] = mask
        return mask
