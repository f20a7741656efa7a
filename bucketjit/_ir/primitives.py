"""The primitives that bucketjit adds to programs: size constants, computed sizes, uneven shards."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn
from jax.interpreters import ad, batching

from bucketjit._ir.expressions import Dim
from bucketjit._jax.config import shard_keys
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

sized_p = jex_core.Primitive("sized")
unsized_p = jex_core.Primitive("unsized")
sized_p.multiple_results = unsized_p.multiple_results = True


def makes_size(eqn: JaxprEqn) -> bool:
    """Whether an equation gives a dimension variable its value."""
    return eqn.primitive is sized_p and bool(eqn.params["defines"])


def _with_rows(array: Any, rows: Dim) -> Any:
    weak = bool(getattr(array, "weak_type", False))
    return jax.core.ShapedArray((rows, *array.shape[1:]), array.dtype, weak_type=weak)


@sized_p.def_abstract_eval  # type: ignore[untyped-decorator]
def _sized_types(n: Any, *arrays: Any, dim: Dim, **_: Any) -> list[Any]:
    return [_with_rows(array, dim) for array in arrays]


@unsized_p.def_abstract_eval  # type: ignore[untyped-decorator]
def _unsized_types(n: Any, *arrays: Any, bound: Dim, **_: Any) -> list[Any]:
    return [_with_rows(array, bound) for array in arrays]


def cut_to_size(n: Any, arrays: Sequence[Any], *, dim: Dim, **params: Any) -> list[Any]:
    """Cut arrays to a size, which is new or is defined already."""
    return list(sized_p.bind(n, *arrays, dim=dim, bound=arrays[0].shape[0], **params))


def extended(n: Any, array: Any, *, dim: Dim, bound: Dim) -> Any:
    """Add rows of zeros to an array of a computed size."""
    (out,) = unsized_p.bind(
        n, array, dim=dim, bound=bound, variable="", is_checked=False, defines=False
    )
    return out


def _cut_jvp(primitive: Any) -> Any:
    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        n, *_ = primals
        outs = primitive.bind(*primals, **params)
        linear = {**params, "defines": False}
        changes = [
            ad.Zero(jax.typeof(out).to_tangent_aval())
            if type(tangent) is ad.Zero
            else primitive.bind(n, tangent, **linear)[0]
            for out, tangent in zip(outs, tangents[1:], strict=True)
        ]
        return outs, changes

    return jvp


def _cut_transpose(inverse: Any) -> Any:
    def transpose(cotangents: Sequence[Any], n: Any, *arrays: Any, **params: Any) -> list[Any]:
        return [
            None,
            *(
                ct
                if type(ct) is ad.Zero or not ad.is_undefined_primal(array)
                else inverse.bind(n, ct, **{**params, "defines": False})[0]
                for ct, array in zip(cotangents, arrays, strict=True)
            ),
        ]

    return transpose


def _cut_batch(primitive: Any) -> Any:
    def batch(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> Any:
        (n, *arrays), (of_n, *of_arrays) = operands, axes
        if of_n is not None:
            _refuse_rows()
        # The rows stay the first axis.
        moved = [
            x if axis is None else jax.numpy.moveaxis(x, axis, 1)
            for x, axis in zip(arrays, of_arrays, strict=True)
        ]
        outs = primitive.bind(n, *moved, **params)
        return outs, [None if axis is None else 1 for axis in of_arrays]

    return batch


def _refuse_rows() -> NoReturn:
    raise MaskingError(
        "vmap over a selection whose size differs from row to row",
        "use jnp.where with masks, or loop over the rows with jax.lax.map",
    )


ad.primitive_jvps[sized_p] = _cut_jvp(sized_p)
ad.primitive_jvps[unsized_p] = _cut_jvp(unsized_p)
ad.primitive_transposes[sized_p] = _cut_transpose(unsized_p)
ad.primitive_transposes[unsized_p] = _cut_transpose(sized_p)
batching.primitive_batchers[sized_p] = _cut_batch(sized_p)
batching.primitive_batchers[unsized_p] = _cut_batch(unsized_p)

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

shard_mean_p = jex_core.Primitive("shard_mean")
shard_psum_p = jex_core.Primitive("shard_psum")

COMBINED = frozenset((shard_mean_p, shard_psum_p))
"""The primitives whose result is the same on all shards."""


@shard_mean_p.def_abstract_eval  # type: ignore[untyped-decorator]
@shard_psum_p.def_abstract_eval  # type: ignore[untyped-decorator]
def _type(x: Any, **_: Any) -> Any:
    return jax.core.ShapedArray(x.shape, x.dtype, weak_type=bool(x.weak_type))


@dataclass(frozen=True)
class Shards:
    """The shards that a function is traced for.

    Attributes:
        axis: The name of their axis.
        rows: The rows of a shard, a size; None if that is not known.
        why: Why it is not known.
        size: Any open size, as masking rules are asked for equations that mention one.
    """

    axis: Any
    rows: Any
    why: str = ""
    size: Any = 1


_of_thread = threading.local()


def _shards() -> Shards | None:
    return getattr(_of_thread, "shards", None)


@contextmanager
def tracing_for(shards: Shards) -> Iterator[None]:
    """A context in which this thread traces a function of one shard."""
    before = _shards()
    _of_thread.shards = shards
    try:
        # Traces that JAX keeps of inner functions belong to the shards that they were made for.
        with shard_keys(str(shards)):
            yield
    finally:
        _of_thread.shards = before


def axis_of_shards() -> Any:
    """The axis of the shards for which this thread traces a function; None if it does not."""
    shards = _shards()
    return None if shards is None else shards.axis


def mean_over_shards(x: Any) -> Any:
    """The mean of an array over the shards, by their rows."""
    shards = _shards()
    assert shards is not None
    if shards.rows is None:
        raise MaskingError(
            f"pmean weighs by the rows of each shard, and {shards.why}",
            "divide jax.lax.psum of a sum by jax.lax.psum of what it counts",
        )
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = jnp.true_divide(x, 1)
    return shard_mean_p.bind(x, axis=shards.axis, rows=shards.rows, is_transposed=False)


def sum_over_shards(x: Any) -> Any:
    """The sum of a float array over the shards."""
    shards = _shards()
    assert shards is not None
    given = {"axis": shards.axis, "size": shards.size, "is_transposed": False}
    return shard_psum_p.bind(jnp.asarray(x), **given)


def refuse_groups() -> NoReturn:
    """Raise for a mean over groups of shards."""
    raise MaskingError(
        "pmean over groups of shards (axis_index_groups)",
        "divide jax.lax.psum of a sum by jax.lax.psum of what it counts",
    )


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


ad.primitive_jvps[shard_mean_p] = functools.partial(_jvp, shard_mean_p)
ad.primitive_jvps[shard_psum_p] = functools.partial(_jvp, shard_psum_p)
ad.primitive_transposes[shard_mean_p] = functools.partial(_transpose, shard_mean_p)
ad.primitive_transposes[shard_psum_p] = functools.partial(_transpose, shard_psum_p)
batching.fancy_primitive_batchers[shard_mean_p] = functools.partial(_batch, shard_mean_p, jnp.mean)
batching.fancy_primitive_batchers[shard_psum_p] = functools.partial(_batch, shard_psum_p, jnp.sum)
