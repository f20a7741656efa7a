"""Associative scans over a symbolic axis, unrolled at the padded size.

Forward, an output depends only on the elements before it, so padding after them is harmless. (A
scan in reverse is traced as a forward scan of reversed elements.) In the pullback, padding reaches
real elements unless it is made 0; `_Scan.backward` does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Jaxpr

from bucketjit._ir.associative_scan import associative_scan_p
from bucketjit._ir.combine import PRIMAL, TANGENT, Combine
from bucketjit._jax.jaxprs import open_jaxpr
from bucketjit._masking.array_ops import crop, select
from bucketjit._masking.loops import has_loop
from bucketjit._masking.rule_context import Rule, RuleContext
from bucketjit._masking.rules.convolution import along

Arrays = Sequence[Any]


class _Scan:
    """The associative scans of one equation, at any padded and logical length.

    Both directions call themselves or JAX's scan on half the elements, so the function of the scan
    is evaluated at lengths other than that of the equation.
    """

    def __init__(self, ctx: RuleContext, combine: Combine, consts: Arrays) -> None:
        self._ctx = ctx
        self._combine = combine
        self._consts = consts
        self._axis = combine.axis

    def _call(self, jaxpr: Jaxpr, size: int, logical: Array, *args: Any) -> Arrays:
        """Evaluate one of the scan's programs on ``size`` pairs, of which ``logical`` are real."""
        sizes = {self._combine.length: (size, jnp.asarray(logical, jnp.int32))}
        return self._ctx.evaluate(jaxpr, *self._consts, *args, sizes=sizes)

    def _combined(self, left: Arrays, right: Arrays) -> Arrays:
        size = left[0].shape[self._axis]
        return self._call(self._combine.jaxpr, size, size, *left, *right)

    def forward(self, elems: Arrays, logical: Array) -> Arrays:
        """What JAX does with a static size.

        A data-dependent loop in the function may not end on padding. If there is one, a flag beside
        each element says whether it is real. A pair with padding counts as padding, and the loop
        runs for real pairs only.
        """
        axis = self._axis
        if not has_loop(open_jaxpr(self._combine.jaxpr)[0]):
            return list(lax.associative_scan(self._combined, elems, axis=axis))

        def combined(left: Arrays, right: Arrays) -> Arrays:
            # Padding is at the end of both sides, so the number of pairs without padding is the
            # logical size of this evaluation.
            real = left[-1] & right[-1]
            args = *left[:-1], *right[:-1]
            size = real.shape[axis]
            return [*self._call(self._combine.jaxpr, size, jnp.sum(real), *args), real]

        real = along(jnp.arange(elems[0].shape[axis]) < logical, axis, axis + 1)
        return list(lax.associative_scan(combined, [*elems, real], axis=axis))[:-1]

    def backward(self, elems: Arrays, cotangents: Arrays, logical: Array) -> tuple[Arrays, Arrays]:
        """Cotangents of constants and elements; `forward` step by step, backwards.

        A step with padding on one side gets an arbitrary cotangent. It would reach the real element
        on the other side, so it is made 0 there.
        """
        size, axis = elems[0].shape[self._axis], self._axis
        floats = [elems[i] for i in self._combine.floats[1]]
        if size < 2:
            return [jnp.zeros_like(self._consts[i]) for i in self._combine.floats[0]], cotangents
        # `forward` combines pairs of neighbours, scans the sums (the odd results), and combines
        # each of them with the element after it (the even results).
        pairs, evens = size // 2, (size - 1) // 2
        left = [lax.slice_in_dim(x, 0, 2 * pairs, 2, axis) for x in elems]
        right = [lax.slice_in_dim(x, 1, 2 * pairs, 2, axis) for x in elems]
        later = [lax.slice_in_dim(x, 2, None, 2, axis) for x in elems]
        reduced = self._call(self._combine.jaxpr, pairs, logical // 2, *left, *right)
        sums = self.forward(reduced, logical // 2)
        before = [lax.slice_in_dim(x, 0, evens, 1, axis) for x in sums]
        to_odd = [lax.slice_in_dim(t, 1, None, 2, axis) for t in cotangents]
        to_even: Arrays = [lax.slice_in_dim(t, 2, None, 2, axis) for t in cotangents]
        to_consts: Arrays = [jnp.zeros_like(self._consts[i]) for i in self._combine.floats[0]]
        first = [lax.slice_in_dim(t, 0, 1, 1, axis) for t in cotangents]
        if evens:
            count = (logical - 1) // 2
            to_consts, to_before, to_even = self._pull(before, later, to_even, evens, count)
            both = zip(to_odd, to_before, strict=True)
            to_odd = [t + crop(self._real(u, count), axis, pairs) for t, u in both]
        count = logical // 2
        more, to_reduced = self.backward(reduced, to_odd, count)
        to_consts = [t + u for t, u in zip(to_consts, more, strict=True)]
        more, to_left, to_right = self._pull(left, right, to_reduced, pairs, count)
        to_consts = [t + u for t, u in zip(to_consts, more, strict=True)]
        out = []
        for x, f, e, le, ri in zip(floats, first, to_even, to_left, to_right, strict=True):
            even = lax.concatenate([f, e], axis)
            even += crop(self._real(le, count), axis, even.shape[axis])
            out.append(_interleave(even, ri, axis, x.shape[axis]))
        return to_consts, out

    def _pull(
        self, left: Arrays, right: Arrays, cotangents: Arrays, size: int, logical: Array
    ) -> tuple[Arrays, Arrays, Arrays]:
        """The cotangents of the constants, the left and the right sides of ``size`` pairs."""
        outs = self._call(self._combine.pullback, size, logical, *left, *right, *cotangents)
        a, b = map(len, self._combine.floats)
        return outs[:a], outs[a : a + b], outs[a + b :]

    def _real(self, array: Array, logical: Array) -> Any:
        index = jnp.arange(array.shape[self._axis], dtype=jnp.int32)
        return select(along(index < logical, self._axis, array.ndim), array, 0)


def _interleave(even: Array, odd: Array, axis: int, size: int) -> Any:
    """Elements of ``even`` and ``odd`` in turn along an axis, cut to ``size``."""
    pairs = jnp.stack([even, crop(odd, axis, even.shape[axis])], axis + 1)
    shape = (*even.shape[:axis], 2 * even.shape[axis], *even.shape[axis + 1 :])
    return crop(pairs.reshape(shape), axis, size)


def associative_scan(ctx: RuleContext, *operands: Array) -> Arrays:
    """Padding comes after all that is real, and in a pullback it is kept from what is real."""
    combine, mode = ctx.params["combine"], ctx.params["mode"]
    logical = ctx.logical(ctx.in_shapes[combine.num_consts][combine.axis])
    consts, elems, linear = combine.operands(operands)
    if mode == PRIMAL:
        return _Scan(ctx, combine, consts).forward(elems, logical)
    if mode == TANGENT:
        const_dots, elem_dots = combine.split(linear, floats=True)
        pairs = _Scan(ctx, combine.dual, [*consts, *const_dots])
        return pairs.forward([*elems, *elem_dots], logical)[len(elems) :]
    to_consts, to_elems = _Scan(ctx, combine, consts).backward(elems, linear, logical)
    return [*to_consts, *to_elems]


TABLE: dict[Any, Rule] = {associative_scan_p: associative_scan}
