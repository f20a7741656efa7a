"""Calls of code that is not in the program: callbacks to the host, and kernels.

In a callback Python sees arrays of their logical shapes, once per logical call. The sizes are
passed to the host with the operands. The host cuts off the padding of operands and pads results,
because slicing a NumPy array costs no compile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import io_callback as jax_io_callback

from bucketjit._ir.closures import SizedHost, holds_a_size
from bucketjit._ir.expressions import is_symbolic
from bucketjit._ir.kernels import kernel_p, resized
from bucketjit._jax.arrays import is_key
from bucketjit._jax.jaxprs import has_ordered_effect
from bucketjit._masking.rule_context import Rule, RuleContext
from bucketjit.errors import MaskingError


class _Host:
    """The part of a callback that runs on the host: it cuts operands and pads results.

    Attributes:
        sizes: Run-time values of the symbolic sizes that the host needs, by text.
        function_at: Returns the host function, if there is one, at these sizes.
    """

    def __init__(self, ctx: RuleContext) -> None:
        shapes = [*ctx.in_shapes, *ctx.out_shapes]
        self.sizes = {str(d): ctx.logical(d) for s in shapes for d in s if is_symbolic(d)}
        function = ctx.params.get("callback")
        self.function_at: Callable[[Any], Any] = lambda sizes: function
        if isinstance(function, SizedHost):
            self.sizes.update(ctx.sizes.values)
            self.function_at = function.at
        self._shapes = [tuple(str(d) if is_symbolic(d) else d for d in s) for s in shapes]
        self._padded = [ctx.padded_shape(s) for s in ctx.out_shapes]

    def cut(self, sizes: Mapping[str, Any], arrays: Sequence[Any]) -> list[Any]:
        """The logical part of each operand, in memory of its own."""
        shapes = self._logical(sizes)[: len(arrays)]
        pairs = zip(arrays, shapes, strict=True)
        return [np.array(np.asarray(x)[tuple(map(slice, shape))]) for x, shape in pairs]

    def pad(self, sizes: Mapping[str, Any], results: Sequence[Any]) -> list[Any]:
        """Each result at its padded shape, with zeros for padding."""
        shapes = self._logical(sizes)[len(self._shapes) - len(self._padded) :]
        wide = []
        for result, shape, padded in zip(results, shapes, self._padded, strict=True):
            result = np.asarray(result)
            if result.shape != shape:
                raise ValueError(f"callback returned shape {result.shape}, expected {shape}")
            whole = np.zeros(padded, result.dtype)
            whole[tuple(map(slice, shape))] = result
            wide.append(whole)
        return wide

    def _logical(self, sizes: Mapping[str, Any]) -> list[tuple[int, ...]]:
        return [tuple(int(sizes[d]) if isinstance(d, str) else d for d in s) for s in self._shapes]


def _prepare(ctx: RuleContext, operands: Sequence[Any]) -> tuple[_Host, list[Any]]:
    """Refuse what cannot be kept; the host side; the operands with keys as their raw words."""
    if has_ordered_effect(ctx.eqn):
        ctx.refuse(
            "an ordered effect would be ordered among masked calls only, not with exact ones",
            "drop ordered=True, or leave the axis static (None or _)",
        )
    if holds_a_size(ctx.params.get("callback")):
        ctx.refuse(
            "its host function closes over a size, or over an array that is traced",
            "pass the size to it as an operand, such as jnp.shape(x)[0]",
        )
    if ctx.params.get("partitioned"):
        ctx.refuse(
            "with partitioned=True it sees shards, which do not know their padding",
            "drop partitioned=True, or leave the axis static (None or _)",
        )
    return _Host(ctx), [jax.random.key_data(x) if is_key(x) else x for x in operands]


def debug_callback(ctx: RuleContext, *operands: Array) -> list[Any]:
    """Run the primitive's own host function (print, log or call) on the logical arrays."""
    host, arrays = _prepare(ctx, operands)
    run, params = ctx.primitive.impl, dict(ctx.params)

    def callback(sizes: Mapping[str, Any], *values: object) -> None:
        run(*host.cut(sizes, values), **params)

    jax.debug.callback(callback, host.sizes, *arrays)
    return []


def callback_with_results(ctx: RuleContext, *operands: Array) -> list[Any]:
    """Call the function on the logical arrays; the host pads what it returns.

    Under a later `vmap`, each row has sizes of its own, so there is one call per row.
    """
    host, arrays = _prepare(ctx, operands)

    def callback(sizes: Mapping[str, Any], *values: object) -> list[Any]:
        return host.pad(sizes, host.function_at(sizes)(*jax.device_put(host.cut(sizes, values))))

    structs = [jax.ShapeDtypeStruct(ctx.padded_shape(a.shape), a.dtype) for a in ctx.out_avals]
    sharding = ctx.params["sharding"]
    if ctx.primitive.name == "io_callback":
        return jax_io_callback(callback, structs, host.sizes, *arrays, sharding=sharding)
    return jax.pure_callback(
        callback, structs, host.sizes, *arrays, sharding=sharding, vmap_method="sequential"
    )


def kernel(ctx: RuleContext, *operands: Array) -> list[Any]:
    """A kernel, masked by its own declaration."""
    call = ctx.symbolic_params["call"]
    sizes = {n: jnp.asarray(ctx.logical(d), jnp.int32) for n, d in ctx.symbolic_params["sizes"]}
    arrays = []
    for x, (fill, closed), shape in zip(operands, call.kinds, ctx.in_shapes, strict=True):
        if opened := [shape[axis] for axis in closed if is_symbolic(shape[axis])]:
            raise MaskingError(f"{call.name}: {opened[0]} is open, and declared as _", "name it")
        if fill is None and ctx.padding.around.is_checked and not is_key(x):
            is_float = jnp.issubdtype(x.dtype, jnp.inexact)
            fill = np.nan if is_float else x.dtype == bool or jnp.iinfo(x.dtype).max
        arrays.append(x if fill is None else ctx.fill(x, value=fill))
    # What a pullback needs is kept by the call before it, if both are in one trace.
    base = call.before or call.pullback_of
    count = len((base or call).kinds)
    key = "pullback", base, *map(id, operands[:count]), ctx.sizes.defined
    if call.before:
        outs, pull = base.with_pullback(sizes, arrays)
        ctx.padding.once(key, operands, lambda: pull)
    else:
        pull = ctx.padding.once(key, operands, lambda: None) if base else None
        outs = pull(arrays[count:]) if pull else call.run(sizes, *arrays)
    return [resized(x, ctx.padded_shape(s)) for x, s in zip(outs, ctx.out_shapes, strict=True)]


TABLE: dict[Any, Rule] = {
    **dict.fromkeys(("debug_callback", "debug_print"), debug_callback),
    **dict.fromkeys(("pure_callback", "io_callback"), callback_with_results),
    kernel_p: kernel,
}
