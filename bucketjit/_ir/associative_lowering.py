"""Lower associative scans over a symbolic axis, for exported programs.

JAX unrolls a scan into slices of halved sizes. Where the size is symbolic the number of halvings is
not known, so the module has a loop over distances instead (Hillis and Steele):

    distance 1    y[i] = x[i-1] * x[i]         for i >= 1
    distance 2    y[i] = y[i-2] * y[i]         for i >= 2
    distance 4    ...                          until the distance is the size

Derivatives of a loop of unknown length cannot be taken backwards, so pullbacks are those of a
``lax.scan``, element by element. Masked programs never come here: they have a rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bucketjit._ir.associative_scan import (
    CURVATURE,
    PRIMAL,
    PULLBACK,
    TANGENT,
    Combine,
    associative_scan_p,
    first_half,
    operands_of,
    pullback_of_pairs,
)
from bucketjit._jax.primitives import lower_by

Arrays = Sequence[Any]


def run(*operands: Any, combine: Combine, mode: str) -> list[Any]:
    """What an equation of an associative scan computes, at any size."""
    if mode == CURVATURE:
        pairs = pullback_of_pairs(combine, operands)
        return first_half(combine, run(*pairs, combine=combine.dual, mode=PULLBACK))
    consts, elems, linear = operands_of(combine, operands)
    if mode == PRIMAL:
        return _by_distances(combine, consts, elems)
    if mode == TANGENT:
        const_dots, elem_dots = combine.split(linear, floats=True)
        both = [*consts, *const_dots], [*elems, *elem_dots]
        return _by_distances(combine.dual, *both)[len(elems) :]
    return _pullback(combine, consts, elems, linear)


def _by_distances(combine: Combine, consts: Arrays, elems: Arrays) -> list[Any]:
    axis = combine.axis
    size = elems[0].shape[axis]
    positions = jnp.arange(size, dtype=jnp.int32)
    last = jnp.asarray(size, jnp.int32)

    def step(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        distance, right = state
        before = jnp.maximum(positions - distance, 0)
        left = [jnp.take(x, before, axis, mode="clip") for x in right]
        there = positions >= distance
        return 2 * distance, [
            jnp.where(lax.expand_dims(there, _others(x.ndim, axis)), new, x)
            for new, x in zip(combine.apply(*consts, *left, *right), right, strict=True)
        ]

    start = jnp.asarray(1, jnp.int32), list(elems)
    return list(lax.while_loop(lambda state: state[0] < last, step, start)[1])


def _others(rank: int, axis: int) -> list[int]:
    return [i for i in range(rank) if i != axis]


def _one_by_one(combine: Combine, consts: Arrays, elems: Arrays) -> list[Any]:
    axis = combine.axis
    firsts = [lax.slice_in_dim(x, 0, 1, axis=axis) for x in elems]
    rows = [jnp.moveaxis(x, axis, 0) for x in elems]
    positions = jnp.arange(rows[0].shape[0], dtype=jnp.int32)

    def step(left: list[Any], given: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
        position, row = given
        right = [lax.expand_dims(x, (axis,)) for x in row]
        # A `cond`: nothing may be computed of a pair that the scan does not combine, as the
        # derivative of that may not be finite.
        made = lax.cond(
            position == 0,
            lambda left, right: right,
            lambda left, right: combine.apply(*consts, *left, *right),
            *(left, right),
        )
        return made, [lax.squeeze(x, (axis,)) for x in made]

    _, made = lax.scan(step, firsts, (positions, rows))
    return [jnp.moveaxis(x, 0, axis) for x in made]


def _pullback(combine: Combine, consts: Arrays, elems: Arrays, cotangents: Arrays) -> list[Any]:
    of_consts, of_elems = combine.floats

    def of_floats(*floats: Any) -> list[Any]:
        given = iter(floats)
        own = [next(given) if i in of_consts else x for i, x in enumerate(consts)]
        outs = _one_by_one(
            combine, own, [next(given) if i in of_elems else x for i, x in enumerate(elems)]
        )
        return [outs[i] for i in of_elems]

    floats = combine.floats_of(consts, elems)
    return list(jax.vjp(of_floats, *floats)[1](list(cotangents)))


lowered = lower_by(associative_scan_p, run)
