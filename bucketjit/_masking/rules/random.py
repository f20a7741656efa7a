"""Random draws: the bits of a logical shape, whatever the shape is padded to.

A generator numbers the elements of a draw in row-major order and hashes each number. Padding an
inner axis changes those numbers, so they are computed from logical sizes. A generator that is made
of primitives is traced at the symbolic shape and evaluated like any program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.random import threefry2x32_p

from bucketjit._ir.expressions import symbolic_axes
from bucketjit._jax.arrays import key_generator, key_impl, key_shape
from bucketjit._masking.array_ops import row_numbers
from bucketjit._masking.rule_context import Rule, RuleContext
from bucketjit._raised import in_one_line, is_of_machine

_WORD = 1 << 32  # elements; from here on a number needs more than 32 bits
_HARDWARE = (
    "its bits come from the hardware's generator, whose sequence depends on the padded shape",
    "use keys of JAX's default generator (threefry2x32), or leave the axis static (None or _)",
)


def natural(ctx: RuleContext, *operands: Array) -> Any:
    """Each key is its own stream, so padded keys give padding and real ones what they always do."""
    return ctx.bind(*operands)


def random_fold_in(ctx: RuleContext, keys: Array, data: Array) -> Any:
    """Key by key, but for the one generator that folds a whole batch with its first key."""
    if key_impl(keys.dtype) == "unsafe_rbg":
        ctx.refuse(*_HARDWARE)
    return ctx.bind(keys, data)


# --- numbering the elements -----------------------------------------------------------------


def counters(ctx: RuleContext, shape: Sequence[Any]) -> Any:
    """The number of each element of a logical shape, at padded sizes."""
    padded = ctx.padded_shape(shape)
    if math.prod(padded) >= _WORD:
        ctx.refuse("a draw of 2**32 elements or more", "draw in parts", in_bucket=True)
    sizes = [jnp.asarray(ctx.logical(size), jnp.uint32) for size in shape]
    return row_numbers(padded, sizes, jnp.uint32)


def iota_2x32_shape(ctx: RuleContext) -> Any:
    """Numbers along a leading symbolic axis do not depend on its size; others are computed."""
    shape = ctx.symbolic_params["shape"]
    if symbolic_axes(shape) == (0,):
        return ctx.bind()
    numbers = counters(ctx, shape)
    return [jnp.zeros_like(numbers), numbers]


# --- draws ----------------------------------------------------------------------------------


def random_bits(ctx: RuleContext, keys: Array) -> Any:
    """Run the generator on the logical shape, key by key."""
    width, shape = ctx.symbolic_params["bit_width"], ctx.symbolic_params["shape"]
    if _counts_by_total(keys) and symbolic_axes(shape):
        draw = _of_keys(lambda key: _total_bits(ctx, key, width, shape), keys.ndim)
        return draw(jax.random.key_data(keys))
    if key_impl(keys.dtype) in ("rbg", "unsafe_rbg"):
        ctx.refuse(*_HARDWARE)
    generator = key_generator(keys.dtype)
    return _draw(ctx, keys, lambda key: generator.random_bits(key, width, shape))


def random_split(ctx: RuleContext, keys: Array) -> Any:
    """Run the generator's split on the logical shape, key by key."""
    shape = ctx.symbolic_params["shape"]
    if _counts_by_total(keys) and symbolic_axes(shape):
        index, total = counters(ctx, (*shape, 2)), _total(ctx, shape, 64)
        draw = _of_keys(lambda key: _word(key, index, total), keys.ndim)
        words = draw(jax.random.key_data(keys))
    elif key_impl(keys.dtype) == "unsafe_rbg":
        ctx.refuse(*_HARDWARE)
    else:
        generator = key_generator(keys.dtype)
        words = _draw(ctx, keys, lambda key: generator.split(key, shape))
    return jax.random.wrap_key_data(words, impl=key_impl(keys.dtype))


def random_gamma(ctx: RuleContext, keys: Array, alpha: Array) -> Any:
    """Evaluate its definition: one key and one rejection loop for each logical element.

    The elements are drawn in one loop after the other on CPU, and all at once on other backends, as
    in JAX itself.
    """
    params = {"use_vmap": jax.default_backend() != "cpu", **ctx.symbolic_params}
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ctx.in_avals]
    return _traced(ctx, lambda k, a: ctx.primitive.impl(k, a, **params), structs, keys, alpha)


def _draw(ctx: RuleContext, keys: Array, draw: Callable[[Any], Any]) -> Any:
    """Trace a draw for keys of this logical shape, then evaluate it masked on their words."""
    words = jax.random.key_data(keys)
    logical = (*ctx.in_shapes[0], *key_shape(keys.dtype))
    struct = jax.ShapeDtypeStruct(logical, words.dtype)
    return _traced(ctx, _of_keys(draw, keys.ndim), [struct], words)


def _traced(ctx: RuleContext, fn: Any, structs: Sequence[Any], *operands: Array) -> Any:
    """Trace a function at symbolic shapes and evaluate it masked; refuse what cannot be traced."""
    try:
        jaxpr = jax.make_jaxpr(fn)(*structs)
    except Exception as error:
        if is_of_machine(error):
            raise
        ctx.refuse(f"the generator cannot be traced: {in_one_line(error)}")
    (out,) = ctx.evaluate(jaxpr, *operands)
    return out


# --- threefry without jax_threefry_partitionable --------------------------------------------
#
# This older mode numbers the 32-bit words of a draw from 0 to n - 1 and hashes word j together with
# word j + ceil(n / 2), so every bit depends on the total n. JAX cannot trace all of it at symbolic
# shapes, so it is implemented here. Each element hashes its own pair, which is twice the work.


def _counts_by_total(keys: Array) -> bool:
    """Whether the bits of a draw depend on its total size, as described above."""
    return key_impl(keys.dtype) == "threefry2x32" and not jax.threefry_partitionable.value


def _of_keys(draw: Callable[[Any], Any], rank: int) -> Callable[[Any], Any]:
    """A draw of one key, for the raw words of an array of keys."""
    for _ in range(rank):
        draw = jax.vmap(draw)
    return draw


def _total(ctx: RuleContext, shape: Sequence[Any], bits: int) -> Any:
    """Run-time number of words in ``prod(shape)`` draws of so many bits."""
    if math.prod(ctx.padded_shape(shape)) * bits // 32 + 1 >= _WORD:
        ctx.refuse(
            "more than 2**32 words in one draw without jax_threefry_partitionable", in_bucket=True
        )
    total = jnp.uint32(1)
    for size in shape:
        total = total * jnp.asarray(ctx.logical(size), jnp.uint32)
    if bits >= 32:
        return total * jnp.uint32(bits // 32)
    return (total + jnp.uint32(32 // bits - 1)) // jnp.uint32(32 // bits)


def _word(key: Array, index: Array, total: Array) -> Any:
    """Word ``index`` of a draw of ``total`` words."""
    half = (total + 1) // 2
    second = index >= half
    first = jnp.where(second, index - half, index)
    partner = jnp.where(first + half < total, first + half, 0)
    low, high = threefry2x32_p.bind(key[0], key[1], first, partner)
    return jnp.where(second, high, low)


def _total_bits(ctx: RuleContext, key: Array, width: int, shape: Sequence[Any]) -> Any:
    index = counters(ctx, shape)
    total = _total(ctx, shape, width)
    dtype = ctx.out_avals[0].dtype
    if width == 64:
        high, low = threefry2x32_p.bind(key[0], key[1], index, index + total // 2)
        return (high.astype(dtype) << 32) | low.astype(dtype)
    if width == 32:
        return _word(key, index, total)
    per_word = jnp.uint32(32 // width)
    word = _word(key, index // per_word, total)
    return (word >> (jnp.uint32(width) * (index % per_word))).astype(dtype)


TABLE: dict[Any, Rule] = {
    **dict.fromkeys(("random_seed", "random_wrap", "random_unwrap", "random_clone"), natural),
    **dict.fromkeys(("threefry2x32", "threefry4x32", "philox2x32", "philox4x32"), natural),
    "random_fold_in": random_fold_in,
    "random_bits": random_bits,
    "random_split": random_split,
    "random_gamma": random_gamma,
    "iota_2x32_shape": iota_2x32_shape,
}
