"""The primitives that bucketjit adds to programs: size constants, computed sizes, uneven shards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn
from jax.interpreters import ad, batching

from bucketjit._ir.expressions import Dim
from bucketjit.errors import MaskingError

# --- size constant ------------------------------------------------------------------------------

# The primitive of size constants: constants whose value depends on the logical sizes.
#
#     before   a = f32[3]{0.5 1 1.5} at n = 3, f32[4]{...} at n = 4         two programs
#     after    a:f32[n] = size_constant[index=0 aval=f32[n] depends_on=n]   one program
#
# The values are arguments of the executable (`SizeConstants`); ``index`` says which one.

size_constant_p = jex_core.Primitive("size_constant")


@size_constant_p.def_abstract_eval  # type: ignore[untyped-decorator]
def _abstract_eval(*, index: int, aval: object, depends_on: Dim) -> Any:
    return aval


# --- sized --------------------------------------------------------------------------------------

# The primitive of sizes that a program computes: arrays are cut to their first ``n`` rows.
#
#     b:f32[size_1 - 1] = sized[bound=n dim=size_1 - 1 variable=size_1] k:i32[] a:f32[n]
#
# The variable is new. Its value is ``k + 1``, since dimension variables are at least 1 and ``k``
# may be 0. The masking rule of the primitive stores it, so that all later rules mask by it. The
# transpose is `unsized_p`, which adds rows of zeros up to the bound. Other arrays that are cut to
# the same size are cut by equations that do not define the variable again.


def _with_rows(array: Any, rows: Dim) -> Any:
    weak = bool(getattr(array, "weak_type", False))
    return jax.core.ShapedArray((rows, *array.shape[1:]), array.dtype, weak_type=weak)


def _cut_jvp(
    primitive: Any, primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    outs = primitive.bind(*primals, **params)
    changes = [
        ad.Zero(jax.typeof(out).to_tangent_aval())
        if type(tangent) is ad.Zero
        else primitive.bind(primals[0], tangent, **{**params, "defines": False})[0]
        for out, tangent in zip(outs, tangents[1:], strict=True)
    ]
    return outs, changes


def _cut_transpose(
    inverse: Any, cotangents: Sequence[Any], n: Any, *arrays: Any, **params: Any
) -> list[Any]:
    linear = {**params, "defines": False}
    cut: list[Any] = [None]
    for ct, x in zip(cotangents, arrays, strict=True):
        is_dropped = type(ct) is ad.Zero or not ad.is_undefined_primal(x)
        cut.append(ct if is_dropped else inverse.bind(n, ct, **linear)[0])
    return cut


def _cut_batch(
    primitive: Any, operands: Sequence[Any], axes: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    (n, *arrays), (of_n, *of_arrays) = operands, axes
    if of_n is not None:
        raise MaskingError(
            "vmap over a selection whose size differs from row to row",
            "use jnp.where with masks, or loop over the rows with jax.lax.map",
        )
    # The rows stay the first axis.
    pairs = zip(arrays, of_arrays, strict=True)
    moved = [x if axis is None else jnp.moveaxis(x, axis, 1) for x, axis in pairs]
    outs = primitive.bind(n, *moved, **params)
    return outs, [None if axis is None else 1 for axis in of_arrays]


def _cutting(name: str, rows: str) -> Any:
    """A primitive with its rules; the parameter ``rows`` is how many rows its results have."""
    primitive = jex_core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(
        lambda n, *arrays, **params: [_with_rows(array, params[rows]) for array in arrays]
    )
    ad.primitive_jvps[primitive] = functools.partial(_cut_jvp, primitive)
    batching.primitive_batchers[primitive] = functools.partial(_cut_batch, primitive)
    return primitive


sized_p, unsized_p = _cutting("sized", "dim"), _cutting("unsized", "bound")
ad.primitive_transposes[sized_p] = functools.partial(_cut_transpose, unsized_p)
ad.primitive_transposes[unsized_p] = functools.partial(_cut_transpose, sized_p)


def makes_size(eqn: JaxprEqn) -> bool:
    """Whether an equation gives a dimension variable its value."""
    return eqn.primitive is sized_p and bool(eqn.params["defines"])


# --- shards -------------------------------------------------------------------------------------

# The primitives of combinations over shards whose sizes differ: the weighed mean, and the sum.
#
#     b:f32[] = shard_mean[axis=d rows=n] a:f32[]        psum(a * n) / psum(n)
#     c:f32[] = shard_psum[axis=d size=n] a:f32[]        psum(a)
#
# The mean is its own transpose. With ``w`` the rows of a shard divided by those of all, its matrix
# is ``M[i, j] = w[j]``, and in the inner product that weighs by ``w``, which a mean of gradients
# takes, ``M`` is symmetric. So the gradient of a mean, averaged over the shards, is that of the
# whole batch, whether the loss was averaged before or not, and through the statistics of a batch as
# well.
#
# The sum is its own transpose in the plain inner product, which a sum of gradients takes. The two
# do not mix on uneven shards. So a transposed equation says that it is one, and
# `bucketjit._processes.on_shards` refuses programs that mix them.


def _jvp(primitive: Any, primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    (x,), (tangent,) = primals, tangents
    out = primitive.bind(x, **params)
    if type(tangent) is ad.Zero:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, primitive.bind(tangent, **params)


def _transpose(
    primitive: Any, cotangent: Any, x: Any, is_transposed: bool, **params: Any
) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [cotangent]
    return [primitive.bind(cotangent, is_transposed=not is_transposed, **params)]


def _batch(
    primitive: Any,
    whole: Callable[[Any, int], Any],
    mapped: Any,
    operands: Sequence[Any],
    places: Sequence[Any],
    **params: Any,
) -> Any:
    """The rule for ``vmap``, whose own axis may have the name of the shards' and then hides it."""
    (x,), (place,) = operands, places
    if mapped.name != params["axis"]:
        return primitive.bind(x, **params), place
    if place is None:
        x, place = jnp.broadcast_to(x, (mapped.size, *jnp.shape(x))), 0
    return whole(x, place), None


def _combination(name: str, whole: Callable[[Any, int], Any]) -> Any:
    """A primitive with its rules; ``whole`` combines along an axis of one array."""
    primitive = jex_core.Primitive(name)
    primitive.def_abstract_eval(
        lambda x, **_: jax.core.ShapedArray(x.shape, x.dtype, weak_type=bool(x.weak_type))
    )
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive)
    ad.primitive_transposes[primitive] = functools.partial(_transpose, primitive)
    batching.fancy_primitive_batchers[primitive] = functools.partial(_batch, primitive, whole)
    return primitive


shard_mean_p = _combination("shard_mean", jnp.mean)
shard_psum_p = _combination("shard_psum", jnp.sum)

COMBINED = frozenset((shard_mean_p, shard_psum_p))
"""The primitives whose result is the same on all shards."""
