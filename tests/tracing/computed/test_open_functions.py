"""Functions of JAX whose result has a computed size, in executors: equal to the eager function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec, Check, Fallback
from bucketjit.errors import FallbackError, FallbackWarning
from tests.tracing.computed.test_computed_sizes import EDGES, arrays, checked, few_or_all


def count(x: Any) -> Any:
    """How many entries are chosen: an integer that is computed, from 0 to the size."""
    return jnp.sum(x > 0)


def table(x: Any) -> Any:
    """A matrix with more rows than columns, of open sizes."""
    return x[:, None] * jnp.arange(1.0, 4.0) + jnp.arange(x.shape[0])[:, None]


def whole(x: Any) -> Any:
    """Small integers, some negative."""
    return jnp.nan_to_num(jnp.round(2 * x)).astype(jnp.int32)


SLICES: dict[str, Callable[..., Any]] = {
    "to": lambda x: x[: count(x)],
    "to_beyond": lambda x: x[: 3 * count(x)],
    "to_negative": lambda x: x[: -count(x)],
    "from": lambda x: x[count(x) :],
    "from_negative": lambda x: x[-count(x) - 1 :],
    "between": lambda x: x[count(x) // 2 : count(x)],
    "between_crossed": lambda x: x[count(x) : count(x) // 2],
    "from_number": lambda x: x[2 : count(x) + 1],
    "to_number": lambda x: x[count(x) // 2 : 5],
    "to_size": lambda x: x[count(x) : x.shape[0] - 1],
    "to_large_number": lambda x: x[count(x) : 2**40],
    "two_axes": lambda x: table(x)[: count(x), : count(x) + 1],
    "new_axis": lambda x: table(x)[None, count(x) :, 0],
    "with_positions": lambda x: table(x)[: count(x), jnp.array([0, 2])],
    "with_mask": lambda x: table(x)[x > 0, : count(x)],
    "of_argmax": lambda x: x[: jnp.argmax(x) + 1].sum(),
    "of_unsigned": lambda x: x[: count(x).astype(jnp.uint8)],
    "of_get": lambda x: x.at[: count(x)].get(),
    "add_arange": lambda x: x[: count(x)] * jnp.arange(count(x)),
    "add_selected": lambda x: x[: count(x)] + x[x > 0],
    "set": lambda x: x.at[: count(x)].set(7),
    "set_values": lambda x: x.at[: count(x)].set(x[: count(x)] * 2),
    "set_selected": lambda x: x.at[: count(x)].set(x[x > 0]),
    "set_between": lambda x: x.at[1 : count(x)].set(-x[1 : count(x)]),
    "multiply_rows": lambda x: table(x).at[: count(x), 1].multiply(x[: count(x)]),
    "max_columns": lambda x: table(x).at[:, : count(x)].max(1.5),
    "add_row": lambda x: table(x).at[: count(x)].add(jnp.array([1.0, 2.0, 3.0])),
    "apply": lambda x: x.at[: count(x)].apply(jnp.sin),
    "gradient": jax.grad(lambda x: (x[: count(x)] ** 2).sum()),
    "gradient_of_set": jax.grad(lambda x: (x.at[: count(x)].set(x[: count(x)] ** 2)).sum()),
    "dynamic_slice": lambda x: jax.lax.dynamic_slice(x, (0,), (count(x),)),
    "dynamic_slice_moved": lambda x: jax.lax.dynamic_slice(x, (x.shape[0] - 1,), (count(x),)),
    "dynamic_slice_in_dim": lambda x: jax.lax.dynamic_slice_in_dim(table(x), 1, count(x), axis=0),
    "dynamic_slice_columns": lambda x: jax.lax.dynamic_slice(
        table(x), jnp.array([1, 2]), (2, jnp.minimum(count(x), 3))
    ),
    "slice_in_dim": lambda x: jax.lax.slice_in_dim(x, 0, count(x)),
    "slice": lambda x: jax.lax.slice(table(x), (0, 1), (count(x), 3)),
    "split": lambda x: jnp.split(x, [count(x)]),
}

SHAPES: dict[str, Callable[..., Any]] = {
    "ones": lambda x: jnp.ones((count(x),)),
    "full": lambda x: jnp.full(count(x), x[0]),
    "empty": lambda x: jnp.empty((2, count(x))).shape[1] * jnp.ones(2),
    "arange": lambda x: jnp.arange(count(x)),
    "arange_from": lambda x: jnp.arange(2, count(x) + 1),
    "arange_down": lambda x: jnp.arange(count(x), 0, -1),
    "arange_by": lambda x: jnp.arange(0, count(x), 2, dtype=jnp.float32),
    "arange_of_size": lambda x: jnp.arange(count(x), x.shape[0]),
    "arange_argmax": lambda x: jnp.arange(jnp.argmax(x) + 1),
    "arange_clipped": lambda x: jnp.arange(jnp.clip(whole(x)[0], 0, x.shape[0])),
    "arange_of_sized": lambda x: (bucketjit.sized(x, count(x)), jnp.arange(count(x))),
    "linspace": lambda x: jnp.linspace(0.0, 1.0, count(x) + 2),
    "broadcast": lambda x: jnp.broadcast_to(x[0], (count(x),)),
    "tile": lambda x: jnp.tile(x[:2], (count(x), 2)),
    "top_k": lambda x: jax.lax.top_k(x, count(x)),
    "keys": lambda x: jax.random.key_data(jax.random.split(jax.random.key(0), count(x) + 1)),
    "eye": lambda x: jnp.eye(count(x)),
    "segment_sum": lambda x: jax.ops.segment_sum(x, jnp.clip(whole(x), 0, 3)),
    "random": lambda x: jax.random.normal(jax.random.key(0), (count(x),)).shape[0] + x,
    "selected": lambda x: x[x > 0] * jnp.arange(count(x)) + jnp.ones((count(x),)),
    "matrix_selected": lambda x: (
        table(x)[table(x) > 2] + jnp.arange(jnp.sum(table(x) > 2)),
        jnp.ones(jnp.count_nonzero(x > 0)) + x[x > 0],
    ),
    "repeat_mask": lambda x: jnp.repeat(x, x > 0),
    "repeat_clipped": lambda x: jnp.repeat(x, jnp.clip(whole(x), 0, 3)),
    "repeat_rows": lambda x: jnp.repeat(table(x), jnp.abs(whole(x)) % 3, axis=0),
    "repeat_scalar": lambda x: jnp.repeat(x, jnp.minimum(count(x), 2)),
    "repeat_method": lambda x: (x.repeat(x > 0), x.repeat(x > 0).sum()),
    "repeat_gradient": jax.grad(lambda x: (x.repeat(x > 0) ** 2).sum()),
    "bincount": lambda x: jnp.bincount(jnp.clip(whole(x), 0, 5)),
    "bincount_upper": lambda x: jnp.bincount(jnp.minimum(whole(x), 6)),
    "bincount_weights": lambda x: jnp.bincount(jnp.abs(whole(x)) % 4, weights=jnp.ones_like(x)),
    "bincount_least": lambda x: jnp.bincount((x > 0), minlength=4),
    "bincount_selected": lambda x: jnp.bincount(jnp.clip(whole(x), 0, 5)[x > 0]),
}

MASKS: dict[str, Callable[..., Any]] = {
    "unique_values": lambda x: jnp.unique_values(jnp.round(x)),
    "unique_nan": lambda x: jnp.unique(jnp.round(x), equal_nan=False),
    "union1d": lambda x: jnp.union1d(jnp.round(x), jnp.array([0.0, 1.0])),
    "unique_counts": lambda x: tuple(jnp.unique_counts(jnp.round(x))),
    "unique_inverse": lambda x: tuple(jnp.unique_inverse(jnp.round(x))),
    "setxor1d": lambda x: jnp.setxor1d(jnp.round(x), jnp.array([0.0, 1.0])),
    "intersect1d": lambda x: jnp.intersect1d(
        jnp.round(x), jnp.array([0.0, 1.0, -1.0]), return_indices=True
    ),
    "isin": lambda x: jnp.isin(jnp.round(x), jnp.array([0.0, 1.0])),
    "nonzero_of_size": lambda x: jnp.nonzero(x > 0, size=3, fill_value=-1),
    "get": lambda x: x.at[x > 0].get(),
    "multiply": lambda x: x.at[x > 0].multiply(x[x > 0]),
    "least": lambda x: x.at[x > 0].min(0.5),
    "apply": lambda x: x.at[x > 0].apply(jnp.sqrt),
    "set_column": lambda x: table(x).at[x > 0, 0].set(-1),
    "rows_and_slice": lambda x: table(x)[x > 0, :2],
    "rows_and_position": lambda x: table(x)[x > 0, 1],
    "rows_and_positions": lambda x: table(x)[x > 0, jnp.nonzero(x > 0)[0] % 3],
    "mask_and_new_axis": lambda x: table(x).T[:, x > 0, None],
    "true": lambda x: x[True],
    "matrix_mask_and_slice": lambda x: jnp.stack([table(x)] * 2, 2)[table(x) > 1, :1],
    "where_of_matrix": lambda x: jnp.where(table(x) > 1),
    "argwhere_of_matrix": lambda x: jnp.argwhere(table(x) > 1),
    "compress_columns": lambda x: jnp.compress(x > 0, table(x).T, axis=1),
    "extract_of_matrix": lambda x: jnp.extract(table(x) > 1, table(x)),
    "methods": lambda x: (x.nonzero(), x.compress(x > 0)),
}

QUOTIENTS: dict[str, Callable[..., Any]] = {
    "two_thirds": lambda x: x[: count(x) * 2 // 3],
    "percent": lambda x: (x[: count(x) * 95 // 100], x[: x.shape[0] - count(x) * 5 // 100]),
    "arange": lambda x: jnp.arange(count(x) * 3 // 7),
    "least": lambda x: x[: jnp.minimum(count(x), x.shape[0] * 2 // 3)],
    "most": lambda x: x[: jnp.maximum(count(x), x.shape[0] * 2 // 3)],
    "bincount": lambda x: jnp.bincount(jnp.arange(x.shape[0]) * 10 // 7),
    "one_at_least": lambda x: jnp.sort(x)[::-1][: jnp.maximum(1, count(x) // 2)],
    "three_at_most": lambda x: x[: jnp.minimum(3, count(x) // 2)],
    "clip": lambda x: x[: jnp.clip(count(x) // 2, 1, 5)],
    "where": lambda x: x[: jnp.where(x[0] > 0, 1, count(x) // 2)],
    "less_one": lambda x: x[: jnp.maximum(count(x) // 2 - 1, 0)],
}

PROGRAMS = {
    f"{kind}-{name}": fn
    for kind, programs in (
        ("slices", SLICES),
        ("shapes", SHAPES),
        ("masks", MASKS),
        ("quotients", QUOTIENTS),
    )
    for name, fn in programs.items()
}


@pytest.mark.sampled(
    *(2, "slices-set_values-few_arrays", "shapes-arange_argmax-few_arrays"),
    *("slices-slice-few_arrays", "shapes-arange_by-few_arrays"),
    *("slices-to_large_number-few_arrays", "slices-dynamic_slice_moved-few_arrays"),
    *("shapes-tile-few_arrays", "shapes-arange_of_size-few_arrays"),
    *("slices-of_unsigned-few_arrays", "shapes-bincount_least-few_arrays"),
)
@few_or_all
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_the_eager_function(name: str, inputs: Any) -> None:
    fn = PROGRAMS[name]
    executor = BucketedExec(fn, dynamic_axes="n", check=Check.POISON).with_pow2(min=8)
    for x in inputs():
        checked(executor, fn, x)
    told = executor.stats()
    # One for each bucket, and one where a guard tells a size of 1 apart.
    assert told.fallback_calls == 0 and told.compiles <= 2 + (len(told.programs) > 1)


def some_bits(x: Any) -> Any:
    return jax.random.bits(jax.random.key(x.shape[0])).astype(jnp.int32)


def less_four(x: Any) -> Any:
    return (count(x).astype(jnp.uint32) - jnp.uint32(4)).astype(jnp.int32)


@jax.jit
def searchsorted(a: Any, v: Any) -> Any:
    """A function of a user, with the name of one of JAX."""
    return jnp.sum(a > v) * 3


# Functions of an array of ones, and its size. Their sizes are not what unbounded numbers would be.
INEXACT: dict[str, tuple[Callable[..., Any], int]] = {
    "name_of_jax": (lambda x: jnp.arange(searchsorted(x, 0.5)), 5),
    "random_bits": (lambda x: x[: jax.lax.rem(some_bits(x), 3)], 4),
    "least_of_bits": (lambda x: jnp.arange(jnp.minimum(some_bits(x), 3)), 4),
    "wrapped_unsigned": (lambda x: x.at[: less_four(x)].set(0), 2),
    "slice_to_wrapped": (lambda x: jnp.concatenate([x, -x])[: less_four(x)], 3),
    "large_factor": (lambda x: x[: jax.lax.rem(x.shape[0] * jnp.int32(1103515245), 3)], 2),
    "byte_and_number": (lambda x: jnp.arange(jnp.sum(x > 0, dtype=jnp.uint8) + jnp.uint8(250)), 9),
    "byte_of_negated": (lambda x: jnp.arange(jnp.sum(~(x < 0), dtype=jnp.uint8)), 300),
    "nan": (lambda x: jnp.arange(jnp.clip(jnp.sum(x) * jnp.nan, -9, -5).astype(jnp.int32) + 6), 3),
    "barrier": (lambda x: x[: jax.lax.optimization_barrier((x, count(x)))[1]], 5),
    "device_put": (lambda x: x[: jax.device_put((x, count(x)))[1]], 5),
}


@pytest.mark.sampled(4, "nan", "least_of_bits")
@pytest.mark.parametrize("name", INEXACT)
def test_integers_that_wrap_and_numbers_that_are_rounded(name: str) -> None:
    fn, size = INEXACT[name]
    executor = BucketedExec(fn, dynamic_axes="n", fallback=Fallback.ERROR)
    x = np.ones(size, np.float32)
    checked(executor.with_buckets([size]), fn, x)
    checked(executor.with_pow2(min=8), fn, x)


def test_a_size_of_a_random_key_that_is_closed_over() -> None:
    key = jax.random.key(0)

    def fn(x: Any) -> Any:
        return x[: jax.random.randint(key, (), 0, x.shape[0])]

    executor = BucketedExec(fn, dynamic_axes="n", fallback=Fallback.ERROR).with_pow2()
    checked(executor, fn, np.ones(5, np.float32))


def test_the_sizes_of_a_bound_that_sized_gives() -> None:
    """Without it, nothing bounds the sum of the counts."""

    def fn(x: Any, counts: Any) -> Any:
        room = bucketjit.sized(jnp.zeros(64), counts.sum())
        return jnp.repeat(x, counts) + room, jnp.arange(counts.sum())

    executor = BucketedExec(fn, dynamic_axes=("n", "n"), fallback=Fallback.ERROR)
    executor = executor.with_pow2(min=8)
    for size in EDGES:
        x, counts = np.arange(size, dtype=np.float32), np.arange(size, dtype=np.int32)
        got, places = executor(x, counts)
        np.testing.assert_array_equal(got, np.repeat(x, counts))
        np.testing.assert_array_equal(places, np.arange(counts.sum()))
    with pytest.raises(bucketjit.errors.ArgumentError, match="computes is 65"):
        executor(x, np.array([65, *[0] * (size - 1)], np.int32))


UNBOUNDED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "arange": (lambda x: jnp.arange(x.astype(int).sum()), "jnp.arange: ", "jnp.minimum(k"),
    "ones": (lambda x: jnp.ones((x.astype(int).sum(),)), "computed shape: ", "jnp.minimum(k"),
    "repeat": (lambda x: jnp.repeat(x, x.astype(int)), "jnp.repeat: ", "jnp.minimum(counts"),
    "bincount": (lambda x: jnp.bincount(x.astype(int)), "jnp.bincount: ", "jnp.minimum(x"),
    "halves": (lambda x: jnp.arange((count(x) * 0.5).astype(int)), "jnp.arange: ", "jnp.minimum(k"),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_size_without_a_bound_names_the_line_and_says_what_to_do(name: str) -> None:
    fn, what, remedy = UNBOUNDED[name]
    x = np.arange(4, dtype=np.float32)
    executor = BucketedExec(fn, dynamic_axes="n", fallback=Fallback.ERROR).with_pow2()
    with pytest.raises(FallbackError) as told:
        executor(x)
    text = str(told.value)
    assert what in text and "nothing in the program bounds it" in text
    assert "static_argnames" in text
    line = fn.__code__.co_firstlineno
    assert f"test_open_functions.py:{line} (" in text
    assert remedy in told.value.remedy and "bucketjit.sized(array, k)" in told.value.remedy
    executor = BucketedExec(fn, dynamic_axes="n").with_pow2()
    with pytest.warns(FallbackWarning, match="nothing in the program bounds it"):
        np.testing.assert_array_equal(executor(x), fn(jnp.asarray(x)))


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "step": (lambda x: x[:: count(x)], "a slice has a step"),
    "by_two": (lambda x: x[: count(x) : 2], "a slice has a step"),
    "set_backwards": (lambda x: x.at[count(x) :: -2].set(-1), "a slice has a step"),
    "delete_mask": (lambda x: jnp.delete(x, x > 2), "jnp.delete: its size is computed"),
    "delete_slice": (lambda x: jnp.delete(x, slice(0, count(x))), "jnp.delete: its size"),
    "delete_one": (lambda x: jnp.delete(x, count(x) // 2), "jnp.delete: its size"),
    "trim_zeros": (lambda x: jnp.trim_zeros(x - 1), "jnp.trim_zeros: its size is computed"),
    "floats": (lambda x: jnp.arange(0.5, count(x)), "jnp.arange: an end"),
    "step_of_floats": (lambda x: jnp.arange(0, count(x), 0.5), "jnp.arange: an end"),
    "vmap": (lambda x: jax.vmap(lambda a: x[: jnp.sum(x > a)].sum())(x), "vmap over a selection"),
    "positions": (
        lambda x: table(x).at[: count(x), jnp.array([0, 1])].set(jnp.ones(2)),
        "an update by a slice of a computed size and an index array",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    fn, reason = REFUSED[name]
    executor = BucketedExec(fn, dynamic_axes="n", fallback=Fallback.ERROR).with_pow2()
    with pytest.raises(FallbackError, match=reason) as told:
        executor(np.arange(1, 5, dtype=np.float32))
    assert "test_open_functions.py" in str(told.value) and told.value.remedy
    if name not in ("vmap", "step"):  # which eager JAX refuses, too
        executor = BucketedExec(fn, dynamic_axes="n").with_pow2()
        for x in arrays(5):
            checked(executor, fn, x)


OUT_OF_BOUNDS: dict[str, Callable[..., Any]] = {
    "dynamic_slice": lambda x: jax.lax.dynamic_slice(x, (0,), (count(x) + 1,)),
    "slice_in_dim": lambda x: jax.lax.slice_in_dim(x, 0, count(x) + 1),
    "slice_crossed": lambda x: jax.lax.slice_in_dim(x, count(x) + 1, count(x)),
    "ones": lambda x: jnp.ones((count(x) - 1,)),
}


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_sizes_out_of_bounds_raise_as_in_jax(name: str) -> None:
    fn = OUT_OF_BOUNDS[name]
    executor = BucketedExec(fn, dynamic_axes="n", fallback=Fallback.ERROR).with_pow2()
    raised = 0
    for x in arrays(8):
        try:
            fn(jnp.asarray(x))
        except TypeError:
            raised += 1
        checked(executor, fn, x)
    assert raised


MEETINGS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "where": lambda x, y: jnp.where(x > 1, y, 0),
    "concatenate": lambda x, y: jnp.concatenate([x[None], y[None]]),
    "dot": lambda x, y: x @ y,
    "update": lambda x, y: jnp.zeros_like(x).at[:].set(y),
}


@pytest.mark.sampled(2, "concatenate")
@pytest.mark.parametrize("name", MEETINGS)
def test_different_selections_that_meet_are_named(name: str) -> None:
    meet = MEETINGS[name]

    def fn(x: Any) -> Any:
        above = x[x > 0]
        below = x[x < 0]
        return meet(above, below)

    executor = BucketedExec(fn, dynamic_axes="n", fallback=Fallback.ERROR).with_pow2()
    with pytest.raises((FallbackError, TypeError, ValueError)) as told:  # or that of the function
        executor(np.array([1, -1, 2, 3, 4], np.float32))
    line = fn.__code__.co_firstlineno
    text = "".join([str(told.value), *getattr(told.value, "__notes__", ())])
    assert "arrays of different computed sizes meet" in text
    for place in (line + 1, line + 2):
        assert f"some rows of n, computed at {__file__}:{place} (" in text
    assert "select both by one mask" in text
    assert "jnp.where" in getattr(told.value, "remedy", "jnp.where")


def test_the_error_of_the_eager_function_names_both_selections() -> None:
    executor = BucketedExec(lambda x: x[x > 0] @ x[x < 0], dynamic_axes="n").with_pow2()
    with pytest.warns(FallbackWarning):
        assert executor(np.array([1, -1, 2, -2], np.float32)) == -5
    with pytest.raises(TypeError, match="contracting") as raised:
        executor(np.array([1, -1, 2, 3, 4], np.float32))
    (note,) = (n for n in raised.value.__notes__ if n.startswith("bucketjit runs"))
    assert note.count("some rows of n") == 2 and "select both by one mask" in note


def test_jax_itself_is_as_before() -> None:
    names = ["arange", "ones", "repeat", "bincount", "delete", "trim_zeros", "nonzero"]
    before = [getattr(jnp, name) for name in names]
    BucketedExec(PROGRAMS["shapes-ones"], dynamic_axes="n").with_pow2()(np.ones(3, np.float32))
    assert [getattr(jnp, name) for name in names] == before
    for fn in (*UNBOUNDED.values(), (PROGRAMS["slices-to"], "", "")):
        with pytest.raises((TypeError, IndexError)):
            jax.jit(fn[0])(jnp.ones(3))
