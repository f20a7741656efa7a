"""Rows of examples: a kernel for many examples at once, each with its own sizes.

    one example    program(n, x:f32[n, d])                    masked for the bucket n <= 8
    a batch        vmap(masked)(n:i32[rows], x:f32[rows, 8, d])

The masking rules are pure functions of operands and sizes, so ``jax.vmap`` of the masked program
over the vector of sizes gives each row the result that it has alone. Rows may also take turns: a
loop over those that are examples, so one executable serves every number of rows up to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit._arrays.padding import pad
from bucketjit._compile.argument_types import Body, Transform, abstract
from bucketjit._compile.executable import Pads
from bucketjit._ir.interface import Interface
from bucketjit._jax.arrays import with_type
from bucketjit._tracing.call import Call

_AXIS = "rows"  # how messages and statistics call the axis of the examples


class BatchSizes(NamedTuple):
    """The first argument of the executable of a batch.

    Attributes:
        sizes: The logical sizes of each row, ``int32[rows, variables]``.
        constants: The padded constants that depend on the logical sizes, each with an axis of rows
            in front.
        real: How many rows are examples, a scalar; the rows after them repeat the last one.
        poison: In a call checked by poison, the index of the poison; else an empty tuple.
    """

    sizes: Any
    constants: tuple[Any, ...]
    real: Any
    poison: Any = ()


def batch_sizes(
    sizes: Sequence[Sequence[int]],
    constants: Sequence[Sequence[Any]],
    count: int,
    size_constant_shapes: Sequence[tuple[int, ...]],
    poison: int | None = None,
) -> BatchSizes:
    vectors = np.empty((count, len(sizes[0])), np.int32)
    vectors[: len(sizes)] = sizes
    vectors[len(sizes) :] = sizes[-1]
    every = [*constants, *[constants[-1]] * (count - len(sizes))] if constants else []
    return BatchSizes(
        vectors,
        tuple(
            np.stack([pad(values[i], shape) for values in every])
            for i, shape in enumerate(size_constant_shapes)
        ),
        np.int32(len(sizes)),
        () if poison is None else np.int32(poison),
    )


@dataclass(frozen=True)
class Rows(Transform):
    """How many examples a kernel takes, and what differs between them.

    Attributes:
        count: The number of examples.
        mapped: Positions of the leaves that each example has its own of. The others are shared.
        summed: Whether the executable returns the sum over the examples in place of each result.
        placement: How the rows are sharded over several devices; None if they are not.
        in_turn: Whether the rows are computed one after the other, in a loop.
    """

    count: int = field()  # without a default, in the place of that of the class
    mapped: frozenset[int]
    summed: bool = False
    placement: Any = None
    in_turn: bool = False

    def bucket(self, bucket: Mapping[str, int]) -> dict[str, int]:
        """The sizes of the bucket after the number of examples, which is called ``rows``."""
        name = _AXIS
        while name in bucket:
            name += "_"
        return {name: self.count, **bucket}

    def details(self) -> tuple[int, list[int], bool]:
        return self.count, sorted(self.mapped), self.in_turn

    def pads(self, call: Call, pads: Pads) -> Pads:
        padded = dict(pads)
        for i in self.mapped:
            if call.signature.types[i].dtype is not None:
                padded[i] = (self.count, *padded.get(i, call.shapes[i]))
        return tuple(sorted(padded.items()))

    def types(
        self, call: Call, pads: Mapping[int, tuple[int, ...]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The types of the arguments. Mapped leaves are on the host, unless rows are sharded."""
        leaves = list(call.leaves)
        for i in self.mapped:
            dtype = call.signature.types[i].dtype
            if dtype is not None:
                leaves[i] = jax.ShapeDtypeStruct(pads[i], dtype, sharding=self.placement)
        return call.tree.unflatten(abstract(call.with_leaves(leaves), pads))

    def sizes(
        self, call: Call, constants: Sequence[tuple[int, ...]], poison: int | None
    ) -> BatchSizes:
        """The first argument, as for a batch that repeats one example."""
        values = [call.size_constants.values]
        return batch_sizes([call.ordered], values, self.count, constants, poison)

    def donated(self, call: Call, pads: Mapping[int, tuple[int, ...]]) -> Iterable[int]:
        """Nothing: the caller keeps its examples."""
        return ()

    def run(
        self, body: Body, program: Interface, leaves: Sequence[int], opened: Collection[int]
    ) -> Callable[..., Any]:
        """The body for each row, or the sum over the rows."""
        axes = [0 if i in self.mapped else None for i in leaves]

        def batch(sizes: BatchSizes, arrays: Sequence[Any], is_poisoned: bool) -> list[Any]:
            poison = sizes.poison if is_poisoned else None

            def row(vector: Any, constants: Any, *leaves_of_row: Any) -> list[Any]:
                return body(vector, constants, leaves_of_row, poison)

            if self.in_turn or (self.summed and _are_large(program, arrays, axes, self.count)):
                return _in_turn(row, axes, sizes, arrays, program, self)
            outs: list[Any] = jax.vmap(row, in_axes=(0, 0, *axes))(
                sizes.sizes, sizes.constants, *arrays
            )
            if self.summed:
                is_real = jnp.arange(self.count) < sizes.real
                outs = [_sum_where(is_real, out) for out in outs]
            return outs

        return batch


def _in_turn(
    compute: Callable[..., list[Any]],
    axes: Sequence[int | None],
    sizes: BatchSizes,
    arrays: Sequence[Any],
    program: Interface,
    rows: Rows,
) -> list[Any]:
    """The results of the rows that are examples, and zeros for the others; or the sum of all."""

    def row(i: Any) -> list[Any]:
        def of_row(x: Any) -> Any:
            return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)

        operands = [x if axis is None else of_row(x) for x, axis in zip(arrays, axes, strict=True)]
        return compute(of_row(sizes.sizes), tuple(map(of_row, sizes.constants)), *operands)

    def step(i: Any, outs: list[Any]) -> list[Any]:
        if rows.summed:
            return [out + x.astype(out.dtype) for out, x in zip(outs, row(i), strict=True)]
        place = jax.lax.dynamic_update_index_in_dim
        return [place(out, x, i, 0) for out, x in zip(outs, row(i), strict=True)]

    types = jax.eval_shape(row, 0)
    if rows.summed:
        zeros = [jnp.zeros(x.shape, sum_dtype(x.dtype)) for x in types]
        return list(jax.lax.fori_loop(0, sizes.real, step, zeros))
    zeros = [jnp.zeros((rows.count, *x.shape), x.dtype) for x in types]
    outs = jax.lax.fori_loop(0, sizes.real, step, zeros)
    return [with_type(x, d, weak) for x, (d, weak) in zip(outs, program.out_types, strict=True)]


def _are_large(
    program: Interface, arrays: Sequence[Any], axes: Sequence[int | None], count: int
) -> bool:
    """Whether the results of all rows take more memory than the weights, as gradients do."""
    of_weights = sum(
        x.size * x.dtype.itemsize for x, axis in zip(arrays, axes, strict=True) if axis is None
    )
    of_results = sum(
        int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        for shape, (dtype, _) in zip(program.out_shapes, program.out_types, strict=True)
    )
    return count * of_results > of_weights


def _sum_where(is_real: Any, out: Any) -> Any:
    """The sum over the rows that are examples."""
    keep, dtype = is_real.reshape(-1, *[1] * (out.ndim - 1)), sum_dtype(out.dtype)
    return jnp.sum(jnp.where(keep, out.astype(dtype), jnp.zeros((), dtype)), axis=0, dtype=dtype)


def sum_dtype(dtype: Any) -> Any:
    """The dtype in which values are summed: one of 32 bits for smaller floats and integers."""
    if dtype.itemsize >= 4:
        return dtype
    larger = ((jnp.floating, np.float32), (jnp.unsignedinteger, np.uint32))
    return np.dtype(next((x for kind, x in larger if jnp.issubdtype(dtype, kind)), np.int32))
