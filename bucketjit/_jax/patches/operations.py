"""Operations of JAX that ask for the int of a size: scans, searches, reductions, collectives."""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.interpreters import batching

from bucketjit._jax import names
from bucketjit._jax.jaxprs import primitives, value_of_size
from bucketjit._jax.patches.patch import Patch, patch
from bucketjit.errors import MaskingError

# --- searchsorted ---

# ``jnp.searchsorted`` in an array of symbolic size.


_numpy_hijax = names.module("numpy.hijax")


def _search(original: Any, array: Any, query: Any, /, **options: Any) -> Any:
    """The steps of the binary search are taken in a loop.

    JAX unrolls as many as the size has bits, a Python int. Since numpy.hijax, 0.10. Until
    jnp.searchsorted takes an array of symbolic size.
    """
    is_plain = (options.get("dimension", 0), options.get("batch_dims", 0)) == (0, 0)
    is_complex = jnp.iscomplexobj(array) or jnp.iscomplexobj(query)
    if not is_plain or is_complex or not is_symbolic_dim(array.shape[0]):
        return original(array, query, **options)
    is_left = options.get("side", "left") == "left"
    array, query = jax.lax.stop_gradient(array), jax.lax.stop_gradient(query)
    size = value_of_size(array.shape[0]).astype(np.int32)

    def halve(_: Any, ends: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = ends
        middle = low + (high - low) // 2
        element = array.at[middle].get(mode="clip")
        left = _at_most(query, element) if is_left else ~_at_most(element, query)
        return jnp.where(left, low, middle), jnp.where(left, middle, high)

    # As many steps as the size has bits, as JAX unrolls.
    ends = (jnp.zeros(query.shape, np.int32), jnp.full(query.shape, size))
    steps = 32 - jax.lax.clz(size)
    return jax.lax.fori_loop(0, steps, halve, ends)[1].astype(options["dtype"])


def _at_most(left: Any, right: Any) -> Any:
    """``left <= right`` in the order of ``jnp.sort``, where NaN is the largest."""
    return (left <= right) | jnp.isnan(right)


# The second name is there in 0.10 only.
SEARCHES = tuple(
    patch(_numpy_hijax, name)(_search)
    for name in ("searchsorted", "searchsorted_via_expand")
    if hasattr(_numpy_hijax, name)
)


# --- shuffles ---

# ``jax.random.permutation`` and ``shuffle`` along an axis of symbolic size.


@patch(names.module("random.core"), "_shuffle")
def _shuffle(original: Any, key: Any, x: Any, axis: int) -> Any:
    """The number of rounds is found by comparisons of sizes, which become guards.

    JAX shuffles in rounds, one more for each power of the size, and asks for a Python int to count
    them. Since random.core, 0.1. Until jax.random.permutation takes an axis of symbolic size.
    """
    if not is_symbolic_dim(x.size):
        return original(key, x, axis)
    rounds = 0
    # Each comparison is decided by the sizes of the call, and kept as a guard.
    while x.size > _largest_shuffled_in(rounds):
        rounds += 1
    for _ in range(rounds):
        key, subkey = jax.random.split(key)
        _, x = jax.lax.sort_key_val(jax.random.bits(subkey, x.shape, np.uint32), x, axis)
    return x


def _of_numbers(original: Any, key: Any, x: Any, *more: Any, **options: Any) -> Any:
    """A symbolic count becomes an array of numbers. Since random.core, 0.1. Until `_shuffle`."""
    return original(key, jax.numpy.arange(x) if is_symbolic_dim(x) else x, *more, **options)


@functools.lru_cache(maxsize=64)
def _largest_shuffled_in(rounds: int) -> int:
    """The largest size that JAX shuffles in at most this many rounds."""

    def needed(size: int) -> int:  # the formula of `jax.random.permutation`
        return int(np.ceil(3 * np.log(max(1, size)) / np.log(np.iinfo(np.uint32).max)))

    low, high = 1, 1 << 62
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= rounds else (low, middle)
    return low


SHUFFLES = (
    _shuffle,
    patch(jax.random, "permutation", everywhere=True)(_of_numbers),
    patch(jax.random, "choice", everywhere=True)(_of_numbers),
)


# --- scan ---

# ``lax.scan`` of a symbolic length, and ``lax.associative_scan`` as one equation.


@patch(jax.lax, "scan", everywhere=True)
def open_scans(
    original: Any, f: Any, init: Any, xs: Any = None, length: Any = None, *more: Any, **kw: Any
) -> Any:
    """``lax.scan`` accepts a symbolic length, with or without arrays.

    JAX insists on an int. Since lax.control_flow.loops, 0.1. Until it takes a symbolic length.
    """
    if not is_symbolic_dim(length):
        return original(f, init, xs, length, *more, **kw)
    if jax.tree_util.tree_leaves(xs):  # their leading axis has the length
        return original(f, init, xs, None, *more, **kw)
    steps = jax.lax.broadcasted_iota(np.int32, (length,), 0)
    # ``xs`` has no leaves, but `f` expects its tree, such as None or ().
    return original(lambda carry, _: f(carry, xs), init, steps, *more, **kw)


def associative_scans(replaced: Callable[[Any], Any]) -> Patch:
    """``lax.associative_scan`` becomes one equation.

    JAX slices in halves as often as the size allows, which no symbolic size tells. The derivatives
    of cumprod, cummax and the like call it by its name. Since lax.control_flow.loops, 0.1. Until it
    is a primitive.
    """
    return Patch(jax.lax, "associative_scan", replaced, everywhere=True)


# --- reductions ---

# The derivative of ``lax.reduce`` for arrays with an axis of symbolic size.


@patch(names.module("lax.lax"), "_reduce_jvp")
def open_reductions(
    original: Any, reducer: Any, init: Any, primals: Any, tangents: Any, axes: Any
) -> Any:
    """Closed axes are halved, as JAX does; of an open one the last running product is taken.

    JAX halves only where no size at all is symbolic. Since lax.lax, 0.2. Until the derivative of
    jnp.prod takes an axis of symbolic size.
    """
    shape = primals[0].shape
    opened = [a for a in axes if is_symbolic_dim(shape[a])]
    is_of_jax = getattr(reducer, "__module__", "") == "jax._src.lax.lax"
    # JAX pads odd halves with the start value, so how often that counts depends on the size. Only
    # for JAX's own product, which starts with 1, this does not matter.
    if not any(map(is_symbolic_dim, shape)) or (opened and not is_of_jax):
        return original(reducer, init, primals, tangents, axes)
    kept = [a for a in range(len(shape)) if a not in axes]

    def flat(x: Any) -> Any:
        for a in opened:
            running = jax.lax.cumprod(x, axis=a)
            x = jax.lax.dynamic_slice_in_dim(running, x.shape[a] - 1, 1, axis=a)
        x = jax.lax.transpose(x, (*axes, *kept))
        return jax.lax.reshape(x, (math.prod(x.shape[: len(axes)]), *x.shape[len(axes) :]))

    # The reducer takes scalars: map it over the halved axis and each kept one.
    rows = reducer
    for _ in range(len(kept) + 1):
        rows = jax.vmap(rows)

    def halved(*xs: Any) -> Any:
        xs = tuple(map(flat, xs))
        while (n := xs[0].shape[0]) > 1:
            half = (n + 1) // 2
            first = [x[:half] for x in xs]
            second = [x[half:] for x in xs]
            if n % 2:
                config = [(0, 1, 0), *[(0, 0, 0)] * len(kept)]
                pairs = zip(second, init, strict=True)
                second = [jax.lax.pad(x, i, config) for x, i in pairs]
            xs = rows(*first, *second)
        return tuple(jax.lax.squeeze(x, (0,)) for x in xs)

    return jax.jvp(halved, tuple(primals), tuple(tangents))


# --- convolution ---

# Convolutions whose padding, and Fourier transforms whose length, are symbolic.


class OperatorOfSizes(names.Forwarding):
    """The module ``operator`` with an ``index`` that returns a symbolic size unchanged.

    It replaces the name ``operator`` in modules of JAX whose functions call ``operator.index``. The
    primitives take symbolic lengths and padding. Explicit padding, which every gradient of a
    convolution has, and the lengths of transforms pass through ``operator.index``. Since
    lax.convolution, 0.4, and numpy.fft, 0.2. Until jnp.fft.fft takes a symbolic length, and
    conv_general_dilated symbolic padding.
    """

    @staticmethod
    def index(value: Any) -> Any:
        return value if is_symbolic_dim(value) else operator.index(value)


SYMBOLIC_INDICES = tuple(
    Patch(names.module(name), "operator", OperatorOfSizes)
    for name in ("lax.convolution", "numpy.fft")
)


# --- callbacks ---

# ``jax.debug.callback`` under ``jax.vmap`` over an axis of symbolic size.


def _rolled(prim: Any, original: Any, axis: Any, args: Any, dims: Any, **params: Any) -> Any:
    """Callbacks that are mapped over an open axis run once per row of it, in a scan.

    JAX makes one equation for every row, for which the size must be an int. Rules in the public
    ``primitive_batchers`` do not get the size. Since batching.fancy_primitive_batchers, 0.4.31.
    Until jax.vmap of jax.debug.callback takes an axis of symbolic size.
    """
    mapped = [i for i, d in enumerate(dims) if d is not None]
    if not (mapped and is_symbolic_dim(axis.size)):
        return original(axis, args, dims, **params)

    # A scan runs the rows in order, as JAX's equations do.
    def step(carry: Any, rows: Any) -> Any:
        every = list(args)
        for i, row in zip(mapped, rows, strict=True):
            every[i] = row
        prim.bind(*every, **params)
        return carry, None

    jax.lax.scan(step, None, [jax.numpy.moveaxis(args[i], dims[i], 0) for i in mapped])
    return [], ()


DEBUG_CALLBACKS = tuple(
    patch(batching.fancy_primitive_batchers, p)(functools.partial(_rolled, p))
    for p in primitives("debug_callback", "debug_print")
)


# --- collectives over shards ----------------------------------------------------------------------

_parallel = names.module("lax.parallel")


def uneven_collectives(
    axis: Callable[[], Any], mean: Callable[[Any], Any], total: Callable[[Any], Any]
) -> tuple[Patch, ...]:
    """Collectives over an axis of shards whose sizes differ.

    User code may hold ``pmean`` under any name, as ``functools.partial`` does, so it stays: it
    divides what its own call of ``psum`` returns.
    """
    pmean = jax.lax.pmean

    def others_of(axis_name: Any) -> tuple[Any, ...] | None:
        """The other axes of a collective that names the axis of shards; None for any other."""
        current = axis()
        names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
        if current is None or current not in names:
            return None
        return tuple(name for name in names if name != current)

    def with_sizes(is_sum: bool, original: Any, x: Any, axis_name: Any, **options: Any) -> Any:
        """A collective that takes sizes for values that differ from shard to shard.

        JAX takes a size for a constant that all shards share, and every shard to have as many
        rows: psum of a size is the size times the number of shards, and pmean divides by it.
        """
        others = others_of(axis_name)
        if others is None:
            return original(x, axis_name, **options)

        def combined(leaf: Any) -> Any:
            leaf = value_of_size(leaf)
            is_plain = is_sum and not options.get("axis_index_groups")
            if not is_plain or not jnp.issubdtype(jax.dtypes.result_type(leaf), jnp.inexact):
                return original(leaf, axis_name, **options)
            return total(original(leaf, others, **options) if others else leaf)

        return jax.tree_util.tree_map(combined, x)

    def psum(original: Any, x: Any, axis_name: Any, **options: Any) -> Any:
        """The same, and the sum of ``pmean`` is a mean. Since lax.parallel, 0.1. Until: never."""
        others = others_of(axis_name)
        # Frame 1 is the function around this one.
        if others is None or sys._getframe(2).f_code is not pmean.__code__:
            return with_sizes(True, original, x, axis_name, **options)
        if options.get("axis_index_groups") is not None:
            raise MaskingError(
                "pmean over groups of shards (axis_index_groups)",
                "divide jax.lax.psum of a sum by jax.lax.psum of what it counts",
            )
        if others:
            x = pmean(x, others)
        return jax.tree_util.tree_map(lambda leaf: _Mean(mean(value_of_size(leaf))), x)

    def cast(original: Any, x: Any, axis_name: Any, **options: Any) -> Any:
        """A cast between types that say along which axes of a mesh values differ.

        JAX casts only inside of shard_map. A function of one shard is traced outside of it, and its
        masked program runs under shard_map(check_vma=False), where a cast does nothing. Since
        lax.parallel, 0.8. Until: never.
        """
        others = others_of(axis_name)
        if others is None:
            return original(x, axis_name, **options)
        return original(x, others, **options) if others else x

    def extreme(*args: Any, **options: Any) -> Any:
        """``pmax`` or ``pmin`` of sizes. Since lax.parallel, 0.1. Until: never."""
        return with_sizes(False, *args, **options)

    def any_psum(*args: Any, **options: Any) -> Any:
        """User code may hold psum under any name. Since lax.parallel, 0.10. Until: never."""
        return with_sizes(True, *args, **options)

    return (
        patch(_parallel, "_psum_is_async")(any_psum),
        patch(jax.lax, "pcast", everywhere=True)(cast),
        patch(jax.lax, "psum", everywhere=True)(psum),
        patch(jax.lax, "pmax", everywhere=True)(extreme),
        patch(jax.lax, "pmin", everywhere=True)(extreme),
    )


class _Mean:
    """A mean that is divided by the number of shards once more, and stays what it is."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __truediv__(self, count: Any) -> Any:
        return self._value
