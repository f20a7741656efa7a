"""A primitive for ``lax.associative_scan`` over an axis of symbolic size.

JAX unrolls the scan into slices of halved sizes, which symbolic sizes cannot follow. Here it
becomes one equation, which its masking rule unrolls at padded sizes. Derivatives are equations of
the same primitive, in one of three modes. ``C`` is the combining function, ``S`` the scan and ``J``
its Jacobian:

    primal     S(x)
    tangent    J(x) t: the second half of the scan of the pairs (x, t) with the dual of C
    pullback   J(x)^T u: the recursion of the scan, backwards

Tangents of all three are those of a scan of pairs, so ``jax.hessian`` has its equations. A pullback
of pairs is not transposed: the gradient of a gradient needs sizes that are known.

Exported programs compute the scan in a loop over distances instead (Hillis and Steele):

    distance 1    y[i] = x[i-1] * x[i]         for i >= 1
    distance 2    y[i] = y[i-2] * y[i]         for i >= 2
    distance 4    ...                          until the distance is the size

Derivatives of a loop of unknown length cannot be taken backwards, so pullbacks are those of a
``lax.scan``, element by element.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching
from jax.tree_util import PyTreeDef

from bucketjit._ir.combine import PRIMAL, PULLBACK, TANGENT, Combine, run, struct_of
from bucketjit._ir.expressions import is_symbolic
from bucketjit._jax.jaxprs import lower_by, stage
from bucketjit._jax.patches.shapes import fresh_dimension

associative_scan_p = jex_core.Primitive("associative_scan")
associative_scan_p.multiple_results = True

_numbers = itertools.count()  # of dimension variables, so that no two scans share one


# --- the function ---------------------------------------------------------------------------


def associative_scan_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """``lax.associative_scan``, extended to axes of symbolic size."""

    @functools.wraps(original)
    def associative_scan(fn: object, elems: object, reverse: bool = False, axis: int = 0) -> Any:
        flat, tree = jax.tree_util.tree_flatten(elems)
        # JAX refuses a negative axis together with `reverse`: leave the error to it.
        where = axis + flat[0].ndim if flat and axis < 0 and not reverse else axis
        is_axis = bool(flat) and 0 <= where < flat[0].ndim
        if not is_axis or not is_symbolic(flat[0].shape[where]):
            return original(fn, elems, reverse=reverse, axis=axis)
        sizes = [x.shape[where] for x in flat]
        if any(size != sizes[0] for size in sizes):
            raise ValueError(
                f"Array inputs to associative_scan must have the same first dimension. "
                f"(saw: {[x.shape for x in flat]})"
            )
        if reverse:
            flat = [lax.rev(x, (where,)) for x in flat]
        consts, combine = _close(fn, tree, flat, where)
        outs = associative_scan_p.bind(*consts, *flat, combine=combine, mode=PRIMAL)
        if reverse:
            outs = [lax.rev(x, (where,)) for x in outs]
        return jax.tree_util.tree_unflatten(tree, outs)

    return associative_scan


def _close(fn: Any, tree: PyTreeDef, elems: Sequence[Any], axis: int) -> tuple[list[Any], Combine]:
    """Trace the user's function on one pair of elements, and map it over any number of pairs.

    Returns the arrays that it closes over, and the mapped function.
    """

    def of_flat(*args: Any) -> list[Any]:
        left, right = map(tree.unflatten, (args[: len(elems)], args[len(elems) :]))
        outs = jax.tree_util.tree_leaves(fn(left, right))
        wanted = [(x.shape, x.dtype) for x in structs]
        if (types := [(jnp.shape(x), jnp.asarray(x).dtype) for x in outs]) != wanted:
            raise TypeError(
                "associative_scan: its function must return what it is given: "
                f"{wanted}, not {types}"
            )
        return outs

    structs = [struct_of(x, axis, 1) for x in elems]
    single, consts = stage(of_flat, [*structs, *structs])

    num_consts = len(consts)  # `of_one` outlives the trace, so it must not hold its values

    def of_one(*args: Any) -> list[Any]:
        closed, pair = args[:num_consts], args[num_consts:]
        outs = jax.core.eval_jaxpr(
            single, (), *closed, *(lax.expand_dims(x, (axis,)) for x in pair)
        )
        return [lax.squeeze(x, (axis,)) for x in outs]

    in_axes = (*(None for _ in consts), *(axis for _ in [*elems, *elems]))
    of_any = jax.vmap(of_one, in_axes=in_axes, out_axes=axis)
    length = fresh_dimension(elems[0].shape[axis], f"scanned{next(_numbers)}")
    return list(consts), Combine(of_any, consts, elems, axis, length)


# --- the primitive --------------------------------------------------------------------------


def _bind(combine: Combine, mode: str, *operands: object) -> list[Any]:
    return list(associative_scan_p.bind(*operands, combine=combine, mode=mode))


@associative_scan_p.def_abstract_eval  # type: ignore[untyped-decorator]
def _abstract_eval(*avals: object, combine: Combine, mode: str) -> list[Any]:
    consts, rest = combine.split(avals)
    elems = rest[: len(rest) if mode == PRIMAL else combine.num_elems]
    if mode == PRIMAL:
        outs = elems
    elif mode == TANGENT:
        outs = [elems[i] for i in combine.floats[1]]
    else:
        outs = combine.floats_of(consts, elems)
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in outs]


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, combine: Combine, mode: str
) -> tuple[list[Any], list[Any]]:
    outs = _bind(combine, mode, *primals)
    # Only floats have tangents: operands of the primitive hold none for other dtypes.
    floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in primals]
    dots = [ad.instantiate_zeros(t) if f else None for t, f in zip(tangents, floats, strict=True)]
    consts, elems, linear = combine.operands(primals)
    const_dots, elem_dots, linear_dots = combine.operands(dots)
    float_dots = combine.floats_of(const_dots, elem_dots)
    if mode == PRIMAL:
        changes = iter(_bind(combine, TANGENT, *consts, *elems, *float_dots))
        zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]
        floats_out = combine.floats[1]
        return outs, [next(changes) if i in floats_out else x for i, x in enumerate(zeros)]
    if mode == PULLBACK:  # the tangent of a pullback is the first half of the pullback of pairs
        c, e = map(len, combine.floats)
        c_dots, e_dots = combine.split(float_dots, floats=True)
        pairs = *consts, *c_dots, *elems, *e_dots
        pulled = _bind(combine.dual, PULLBACK, *pairs, *linear_dots, *linear)
        return outs, [*pulled[:c], *pulled[2 * c : 2 * c + e]]
    # TANGENT: the tangent of S's tangent is the second half of the tangent of the scan of pairs.
    c_linear, e_linear = combine.split(linear, floats=True)
    c_linear_dots, e_linear_dots = combine.split(linear_dots, floats=True)
    c_dots, e_dots = combine.split(float_dots, floats=True)
    pairs = *consts, *c_linear, *elems, *e_linear
    dots = [*c_dots, *c_linear_dots, *e_dots, *e_linear_dots]
    return outs, _bind(combine.dual, TANGENT, *pairs, *dots)[len(e_dots) :]


def _transpose(
    cotangents: Sequence[Any], *operands: object, combine: Combine, mode: str
) -> list[Any]:
    consts, elems, linear = combine.operands(operands)
    primals = [*consts, *elems]
    dots = [ad.instantiate_zeros(t) for t in cotangents]
    if mode == PRIMAL or any(map(ad.is_undefined_primal, primals)):
        raise NotImplementedError(
            "associative_scan: the gradient of its gradient needs sizes that are known; "
            "jax.hessian, which is forward over reverse, does not"
        )
    # Tangent and pullback are each other's transpose.
    outs = _bind(combine, PULLBACK if mode == TANGENT else TANGENT, *primals, *dots)
    wanted = [t if ad.is_undefined_primal(x) else None for t, x in zip(outs, linear, strict=True)]
    return [None] * len(primals) + wanted


# A batch axis is moved to the front of every element. Constants stay unbatched where they can.
def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, combine: Combine, mode: str
) -> tuple[list[Any], list[int]]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    consts, start = combine.num_consts, combine.num_consts + combine.num_elems
    is_batched = [d is not None or i >= consts for i, d in enumerate(dims)]
    # A constant and its tangent are batched alike. In a pullback each row has its own cotangent of
    # a constant, so constants with cotangents are batched.
    for k, i in enumerate(combine.floats[0]):
        if mode == TANGENT:
            is_batched[i] = is_batched[start + k] = is_batched[i] or dims[start + k] is not None
        is_batched[i] |= mode == PULLBACK
    rows = zip(operands, dims, is_batched, strict=True)
    front = [batching.bdim_at_front(x, d, size) if b else x for x, d, b in rows]
    outs = _bind(combine.batched(is_batched[:consts], size), mode, *front)
    return outs, [0] * len(outs)


ad.primitive_jvps[associative_scan_p] = _jvp
ad.primitive_transposes[associative_scan_p] = _transpose
batching.primitive_batchers[associative_scan_p] = _batch


# --- lowering, for exported programs: masked ones have a rule --------------------------------


lowered = lower_by(associative_scan_p, run)
