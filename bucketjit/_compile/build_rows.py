"""The function of a batch: a program for many examples at once, each with its own sizes.

    one example    program(n, x:f32[n, d])                    masked for the bucket n <= 8
    a batch        vmap(masked)(n:i32[rows], x:f32[rows, 8, d])

The masking rules are pure functions of operands and sizes, so ``jax.vmap`` of the masked program
over the vector of sizes gives each row the result that it has alone. `bucketjit._compile.build`
lowers and compiles the function, as that of a single example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit._arrays.padding import pad
from bucketjit._compile.argument_types import Expected, abstract, padded_leaf_shapes
from bucketjit._compile.build import Masked, evaluated
from bucketjit._compile.executable import Origin, Pads
from bucketjit._compile.rows import Rows, rows_sizes
from bucketjit._config import Check
from bucketjit._masking.checks import poison_equations
from bucketjit._masking.interpreter import Hook
from bucketjit._masking.rule_context import RuleTable
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._sizes.bucket_sizes import BucketSizes
from bucketjit._tracing.program import Program
from bucketjit._xla_defects.workarounds import hooks


def rows_pads(
    signed: SignedCall, call: ResolvedCall, bucket: Mapping[str, int], rows: Rows
) -> Pads:
    """Position and shape of each argument that is padded or stacked for a batch.

    Args:
        signed: One example of the batch.
        call: The same call, resolved.
        bucket: Padded size of each variable.
        rows: The number of examples, and what differs between them.
    """
    padded = dict(padded_leaf_shapes(call, signed.signature, bucket, signed.shapes))
    for i in rows.mapped:
        if signed.signature.types[i].dtype is not None:
            padded[i] = (rows.count, *padded.get(i, signed.shapes[i]))
    return tuple(sorted(padded.items()))


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
    """The first argument of the executable of a batch.

    Args:
        sizes: The logical sizes of each example (`ResolvedCall.ordered`); at least one.
        constants: The values of its constants that depend on them.
        count: How many rows the executable takes; the last example is repeated to the end.
        size_constant_shapes: Padded shape of each of these constants.
        poison: In a call checked by poison, the index of the poison.
    """
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


def rows_function(
    signed: SignedCall,
    call: ResolvedCall,
    bucket: Mapping[str, int],
    rows: Rows,
    rules: Callable[[], RuleTable],
    check: Check,
    options: Mapping[str, Any],
    after: Callable[[], Callable[[], Hook] | None] = lambda: None,
) -> Masked:
    """The function of a batch, for `bucketjit._compile.build.build_masked`. Traces nothing.

    Args:
        signed: One example of the batch, without its arrays.
        call: The same call, resolved.
        bucket: Padded size of each variable.
        rows: The number of examples, and what differs between them.
        rules: Returns the rule table; called when the function is traced.
        check: The kind of check.
        options: Options of XLA.
        after: Makes the hook that the program needs; see `masked_function`.

    Returns:
        The function and the types to lower it for.
    """
    program = call.program
    assert isinstance(program, Program)
    is_poisoned = check is Check.POISON
    pads = rows_pads(signed, call, bucket, rows)
    expected = Expected({i for i, _ in pads})
    arrays_of = [i for i, kind in enumerate(signed.signature.types) if kind.dtype is not None]
    axes = [0 if i in rows.mapped else None for i in arrays_of]

    def batch(sizes: BatchSizes, *args: object, **kwargs: object) -> Any:
        leaves = expected.check(args, kwargs)
        poison = poison_equations(sizes.poison) if is_poisoned else None

        def one(vector: Any, constants: Any, *arrays: Any) -> list[Any]:
            values = {v: vector[i] for i, v in enumerate(call.variables)}
            at = BucketSizes(program.padded_sizes(bucket), program.lower, values, constants)
            hook, padding = hooks(poison, after()), None if is_poisoned else 0
            return evaluated(program, program.consts, arrays, at, rules(), hook, padding)

        mapped = jax.vmap(one, in_axes=(0, 0, *axes))
        arrays = [leaves[i] for i in arrays_of]
        if rows.summed:
            outs = _summed(mapped, axes, sizes, arrays, program, rows.count)
        else:
            outs = mapped(sizes.sizes, sizes.constants, *arrays)
        return program.out_tree.unflatten(outs)

    batch.__name__ = getattr(signed.signature.fn, "__name__", "batch").replace(" ", "_")
    static = BucketSizes(program.padded_sizes(bucket), program.lower, {})
    shapes = tuple(map(static.padded_shape, program.size_constant_shapes))
    constants = [call.size_constants.values]
    poison = 0 if is_poisoned else None
    leaves = abstract(_with_structs(signed, rows, dict(pads)), dict(pads))
    args, kwargs = signed.tree.unflatten(leaves)
    return Masked(
        function=jax.jit(batch, compiler_options=dict(options)),
        sizes=batch_sizes([call.ordered], constants, rows.count, shapes, poison),
        args=args,
        kwargs=kwargs,
        expected=expected,
        at=static,
        call=call,
        origin=Origin(signed, call.tokens, call.sizes),
        bucket=rows_sizes(bucket, rows.count),
        pads=pads,
        size_constant_shapes=shapes,
        donated=frozenset(),
        donated_leaves=frozenset(),
        options=options,
        rows=rows,
    )


def _with_structs(
    signed: SignedCall, rows: Rows, pads: Mapping[int, tuple[int, ...]]
) -> SignedCall:
    """A call with the types of a batch in the place of its mapped leaves.

    They have no device, as a batch is filled on the host, unless the rows are sharded.
    """
    leaves = list(signed.leaves)
    for i in rows.mapped:
        dtype = signed.signature.types[i].dtype
        if dtype is not None:
            leaves[i] = jax.ShapeDtypeStruct(pads[i], dtype, sharding=rows.placement)
    return signed.with_leaves(leaves)


# --- sums over the rows ---


def _summed(
    mapped: Callable[..., list[Any]],
    axes: Sequence[int | None],
    sizes: BatchSizes,
    arrays: Sequence[Any],
    program: Program,
    count: int,
) -> list[Any]:
    """The sum of each result over the rows, by a scan over chunks of rows.

    Args:
        mapped: The program for the rows of a chunk.
        axes: 0 for each array with an axis of rows, None for each shared one.
        sizes: The sizes of all rows.
        arrays: The arguments.
        program: The program; no result has open axes.
        count: The number of rows, a power of two.
    """
    shared = [x for x, axis in zip(arrays, axes, strict=True) if axis is None]
    chunk = _rows_of_chunk(count, shared, program)

    def by_chunk(array: Any) -> Any:
        return jnp.reshape(array, (count // chunk, chunk, *jnp.shape(array)[1:]))

    def add(totals: list[Any], part: Any) -> tuple[list[Any], None]:
        positions, vector, constants, own = part
        rest = iter(own)
        given = [x if axis is None else next(rest) for x, axis in zip(arrays, axes, strict=True)]
        is_real = positions < sizes.real
        return [
            total + _sum_where(is_real, out, total.dtype)
            for total, out in zip(totals, mapped(vector, constants, *given), strict=True)
        ], None

    own = [x for x, axis in zip(arrays, axes, strict=True) if axis is not None]
    rows = jnp.arange(count, dtype=jnp.int32), sizes.sizes, sizes.constants, own
    zeros = [
        jnp.zeros(shape, sum_dtype(dtype))
        for shape, (dtype, _) in zip(program.out_shapes, program.out_types, strict=True)
    ]
    totals, _ = jax.lax.scan(add, zeros, jax.tree_util.tree_map(by_chunk, rows))
    return totals


def _rows_of_chunk(count: int, shared: Sequence[Any], program: Program) -> int:
    """How many rows are computed at once: as many as have no larger results than the weights.

    So gradients, which are as large as the weights, are computed row by row, and losses all
    together. The rest of the memory is the sum itself.
    """
    of_weights = sum(x.size * x.dtype.itemsize for x in shared)
    of_results = sum(
        int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        for shape, (dtype, _) in zip(program.out_shapes, program.out_types, strict=True)
    )
    most = max(1, of_weights // max(1, of_results))
    return min(count, 1 << (most.bit_length() - 1))


def _sum_where(is_real: Any, out: Any, dtype: Any) -> Any:
    """The sum over the rows that are examples."""
    keep = is_real.reshape(-1, *[1] * (out.ndim - 1))
    return jnp.sum(jnp.where(keep, out.astype(dtype), jnp.zeros((), dtype)), axis=0, dtype=dtype)


def sum_dtype(dtype: Any) -> Any:
    """The dtype in which values are summed: one of 32 bits for smaller floats and integers.

    Args:
        dtype: The dtype of the values.
    """
    if dtype.itemsize >= 4:
        return dtype
    larger = ((jnp.floating, np.float32), (jnp.unsignedinteger, np.uint32))
    return np.dtype(next((x for kind, x in larger if jnp.issubdtype(dtype, kind)), np.int32))
