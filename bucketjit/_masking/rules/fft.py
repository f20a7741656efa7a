"""Fourier transforms: natural over static axes, by the chirp transform over symbolic ones.

A transform mixes every position with every other, at angles that depend on the logical size. So no
padding is neutral. Bluestein's chirp transform is a convolution of any sufficiently large length,
in which the logical size is only a number. It is exact up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bucketjit._ir.expressions import Dim, is_symbolic
from bucketjit._masking import array_ops as ops
from bucketjit._masking.rule_context import Rule, RuleContext, zeros
from bucketjit._masking.rules.convolution import along

CHIRP_LIMIT = 46340  # positions; `_chirp` squares them, and the next square exceeds int32


def fft(ctx: RuleContext, operand: Array) -> Any:
    """Transform axis by axis, the real side of a real transform where it belongs."""
    rank, out_rank = len(ctx.params["fft_lengths"]), operand.ndim
    axes = range(out_rank - rank, out_rank)
    lengths = dict(zip(axes, ctx.symbolic_params["fft_lengths"], strict=True))
    kind = ctx.params["fft_type"].name
    size = ctx.in_shapes[0][-1]
    if kind == "IRFFT" and is_symbolic(size) and not is_symbolic(lengths[axes[-1]]):
        ctx.refuse(
            f"an axis of symbolic size {size} meets the static length {lengths[axes[-1]]}",
            "give the length as an expression of the array's shape, or leave the axis static",
        )
    if not any(map(is_symbolic, lengths.values())):
        return ctx.bind(operand)
    if 0 in ctx.padded_shape(ctx.out_shapes[0]):
        return zeros(ctx, ctx.out_avals[0])
    for length in lengths.values():
        if ctx.padded(length) > CHIRP_LIMIT and is_symbolic(length):
            ctx.refuse(
                f"a transform of symbolic length {length}, padded beyond {CHIRP_LIMIT}",
                in_bucket=True,
            )
    open_axes = [axis for axis, length in lengths.items() if is_symbolic(length)]
    x = ctx.fill(operand, axes=open_axes, value=0)
    # A transform leaves zeros in the padding along the other axes, so one fill is enough.
    x, back = ops.without_overflow(x, axes, _headroom(ctx, lengths.values()))
    inverse, last = kind in ("IFFT", "IRFFT"), axes[-1]
    if kind == "RFFT":
        x = _from_real(ctx, x, last, lengths.pop(last))
    real_length = lengths.pop(last) if kind == "IRFFT" else None
    for axis, length in lengths.items():
        x = _transform(ctx, x, axis, length, inverse)
    if real_length is not None:
        x = _to_real(ctx, x, last, real_length)
    return ops.scaled(x, back)


def _transform(ctx: RuleContext, x: Array, axis: int, length: Dim, inverse: bool) -> Any:
    """A complex transform along one axis, whose padding holds zeros."""
    if not is_symbolic(length):
        return (jnp.fft.ifft if inverse else jnp.fft.fft)(x, axis=axis)
    size, n = x.shape[axis], ctx.logical(length)
    wide = _wide(size)
    # Without this, XLA would fuse the chirp into its reader and compute its sines anew for every
    # element of x.
    chirp = ops.kept_in_memory(_chirp(jnp.arange(size, dtype=jnp.int32), n, x.dtype, inverse), n)
    # chirp[i] * chirp[k] * conj(chirp[k - i]) is the angle of i * k, and the last factor is a
    # convolution with conj(chirp), which is even.
    conjugate = jnp.conj(chirp)
    between = jnp.zeros(wide - 2 * size + 1, x.dtype)
    kernel = jnp.fft.fft(lax.concatenate([conjugate, between, conjugate[:0:-1]], 0))
    after = chirp / n.astype(chirp.real.dtype) if inverse else chirp

    def transformed(x: Array, chirp: Array, kernel: Array, after: Array) -> Any:
        x = jnp.swapaxes(x, axis, -1)
        mixed = jnp.fft.ifft(jnp.fft.fft(x * chirp, wide) * kernel)
        return jnp.swapaxes(mixed[..., :size] * after, axis, -1)

    factors = chirp, kernel, after
    others = [a for a in range(x.ndim) if a != axis]
    if not others:
        return transformed(x, *factors)
    by = max(others, key=lambda a: x.shape[a])
    return ops.in_parts(transformed, x, by, ctx.logical(ctx.in_shapes[0][by]), *factors)


def _headroom(ctx: RuleContext, lengths: Iterable[Dim]) -> int:
    """How many times larger than its input a number may get on the way."""
    sizes = [(is_symbolic(length), ctx.padded(length)) for length in lengths]
    return math.prod(4 * size * _wide(size) if is_open else size for is_open, size in sizes)


def _wide(size: int) -> int:
    """A size that has a fast transform and room for the convolution of two of this size."""
    # Backends are fast at products of small primes: a power of two, or 3/4 or 5/8 of one.
    power = 1 << (2 * size - 2).bit_length()
    return min(w for w in (power, power * 3 // 4, power * 5 // 8) if w >= 2 * size - 1)


def _chirp(position: Array, n: Any, dtype: np.dtype[Any], inverse: bool) -> Any:
    """``exp(-i pi k^2 / n)``, its angle reduced as a whole number, so that it stays accurate."""
    turn = (position * position) % (2 * n)
    turn = jnp.where(turn > n, turn - 2 * n, turn)
    real = np.finfo(dtype).dtype
    angle = np.pi * (turn.astype(real) / n.astype(real))
    return lax.complex(jnp.cos(angle), jnp.sin(angle) if inverse else -jnp.sin(angle))


def _from_real(ctx: RuleContext, x: Array, axis: int, length: Dim) -> Any:
    """Real input: the first half of the complex transform."""
    if not is_symbolic(length):
        return jnp.fft.rfft(x, axis=axis)
    dtype = ctx.out_avals[0].dtype
    full = _transform(ctx, x.astype(dtype), axis, length, inverse=False)
    return ops.crop(full, axis, ctx.padded(ctx.out_shapes[0][axis]))


def _to_real(ctx: RuleContext, x: Array, axis: int, length: Dim) -> Any:
    """Real output: the other half of the spectrum is the first half's mirror image."""
    if not is_symbolic(length):
        return jnp.fft.irfft(x, length, axis=axis)
    n = ctx.logical(length)
    position = jnp.arange(ctx.padded(length), dtype=jnp.int32)
    is_first = position <= n // 2
    half = ops.take(x, jnp.where(is_first, position, n - position), axis)
    full = jnp.where(along(is_first, axis, x.ndim), half, jnp.conj(half))
    full = ops.select(along(position < n, axis, x.ndim), full, 0)
    return jnp.real(_transform(ctx, full, axis, length, inverse=True))


TABLE: dict[Any, Rule] = {"fft": fft}
