"""The primitives of combinations over shards whose sizes differ: the weighed mean, and the sum.

    b:f32[] = shard_mean[axis=d rows=n] a:f32[]        psum(a * n) / psum(n)
    c:f32[] = shard_psum[axis=d size=n] a:f32[]        psum(a)

The mean is its own transpose. With ``w`` the rows of a shard divided by those of all, its matrix is
``M[i, j] = w[j]``, and in the inner product that weighs by ``w``, which a mean of gradients takes,
``M`` is symmetric. So the gradient of a mean, averaged over the shards, is that of the whole batch,
whether the loss was averaged before or not, and through the statistics of a batch as well.

The sum is its own transpose in the plain inner product, which a sum of gradients takes. The two do
not mix on uneven shards. So a transposed equation says that it is one, and
`bucketjit._processes.on_shards` refuses programs that mix them.
"""

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
from jax.interpreters import ad, batching

from bucketjit._jax.config import shard_keys
from bucketjit.errors import MaskingError

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
