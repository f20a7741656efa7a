"""What operations that only move or fold data cost over small and large arrays.

    python -m benchmarks.table large

Each is called with a NumPy array, warm, beside `jax.jit` at the exact shape, and beside what is
written by hand: pad with NumPy, a masked executable for the bucket, cut with NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import bucketjit
from benchmarks.dispatch import bucket_of
from benchmarks.masking import chirp_transform
from benchmarks.measuring import in_turn, paired_ratio
from benchmarks.sections import Column, Options, Row, Section


class Operation(NamedTuple):
    """An operation on one array whose axes are all open, and the same by hand.

    Attributes:
        plain: The function.
        by_hand: Takes padded array and sizes. The padding of what it returns may hold anything.
        rank: The number of axes.
        share: The size of an axis over the one that makes 1,000 or 1,000,000 elements; 0 if that
            many are made of a product of the axis with itself.
    """

    plain: Callable[..., Any]
    by_hand: Callable[..., Any]
    rank: int = 1
    share: float = 1.0


def _real(x: Any, *sizes: Any) -> Any:
    """Which elements of a padded array are no padding."""
    found: Any = True
    for axis, n in enumerate(sizes):
        found = found & (lax.broadcasted_iota(jnp.int32, x.shape, axis) < n)
    return found


def _lowest(x: Any, n: Any) -> Any:
    return jnp.where(_real(x, n), x, -jnp.inf)


def _joined(x: Any, n: Any) -> Any:
    return lax.dynamic_update_slice(jnp.concatenate([x, x]), x, (n,))


def _flat(x: Any, n: Any, m: Any) -> Any:
    def step(i: Any, out: Any) -> Any:
        return lax.dynamic_update_slice(out, x[i], (i * m,))

    return lax.fori_loop(0, n, step, jnp.zeros(x.size, x.dtype))


def _spectrum(x: Any, n: Any, m: Any) -> Any:
    rows = chirp_transform(jnp.where(_real(x, n, m), x, 0), m)
    return chirp_transform(rows.T, n).T


def _outer(x: Any, n: Any) -> Any:
    product = jnp.outer(x, x)
    return jnp.where(_real(product, n, n), product, 0).sum()


OPERATIONS = {
    "reverse": Operation(lambda x: x[::-1], lambda x, n: jnp.roll(x[::-1], n - x.size)),
    "roll": Operation(lambda x: jnp.roll(x, 7), lambda x, n: x[(jnp.arange(x.size) - 7) % n]),
    "difference": Operation(jnp.diff, lambda x, n: x[1:] - x[:-1]),
    "slice": Operation(lambda x: x[10:], lambda x, n: x[10:]),
    "every other": Operation(lambda x: x[::2], lambda x, n: x[::2]),
    "concatenate": Operation(lambda x: jnp.concatenate([x, x]), _joined, share=0.5),
    "softmax": Operation(jax.nn.softmax, lambda x, n: jax.nn.softmax(_lowest(x, n))),
    "logsumexp": Operation(
        lambda x: jax.nn.logsumexp(x), lambda x, n: jax.nn.logsumexp(_lowest(x, n))
    ),
    "sum of an outer product": Operation(lambda x: jnp.outer(x, x).sum(), _outer, share=0.0),
    "transpose": Operation(lambda x: x.T, lambda x, n, m: x.T, 2),
    "flatten": Operation(lambda x: x.reshape(-1), _flat, 2),
    "lower triangle": Operation(jnp.tril, lambda x, n, m: jnp.tril(x), 2),
    "fft2": Operation(jnp.fft.fft2, _spectrum, 2, share=0.9),
}


def _by_hand(operation: Operation, shape: tuple[int, ...]) -> Callable[[np.ndarray], Any]:
    """The operation by hand, for arrays of a shape."""
    masked = jax.jit(operation.by_hand)
    inside, padded = tuple(map(slice, shape)), tuple(map(bucket_of, shape))
    result = tuple(map(slice, jax.eval_shape(operation.plain, np.zeros(shape, np.float32)).shape))

    def run(x: np.ndarray) -> Any:
        wide = np.zeros(padded, x.dtype)
        wide[inside] = x
        out = masked(wide, *map(np.int32, shape))
        return jax.device_put(np.ascontiguousarray(np.asarray(out)[result])) if result else out

    return run


def measure(name: str, elements: int, rounds: int) -> Row:
    """Median times of the three, and the medians of their paired ratios."""
    operation = OPERATIONS[name]
    total = elements ** (1 / (operation.rank if operation.share else 2))
    shape = (int(round(total) * (operation.share or 1)),) * operation.rank
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    axes = ", ".join("nm"[: operation.rank])
    ways = {
        "jit": jax.jit(operation.plain),
        "hand": _by_hand(operation, shape),
        "ours": bucketjit.jit(operation.plain, dynamic_axes=(axes,), buckets="pow2"),
    }
    want, *others = (np.asarray(way(x)) for way in ways.values())
    for got in others:
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3 * np.abs(want).max())
    calls = {k: lambda way=way: jax.block_until_ready(way(x)) for k, way in ways.items()}
    in_turn(calls, [()] * 3)
    times = in_turn(calls, [()] * rounds)
    return {
        "elements": f"{elements:,} elements",
        "operation": name,
        **{f"{k}_us": median(times[k]) * 1e6 for k in calls},
        "over_jit": paired_ratio(times, "ours", "jit"),
        "over_hand": paired_ratio(times, "ours", "hand"),
    }


def by_operation(options: Options) -> list[Row]:
    """A row for each operation and number of elements."""
    chosen, rounds = (list(OPERATIONS)[:2], 3) if options.quick else (OPERATIONS, 40)
    return [measure(name, n, rounds) for n in (1_000, 1_000_000) for name in chosen]


SECTIONS = (
    Section(
        "large",
        "Small and large arrays",
        "Warm calls of single operations with a NumPy array, in powers of two, beside `jax.jit` at "
        "the exact shape and beside the same by hand for the bucket (NumPy pads and cuts). For "
        "1,000,000 elements the buckets are 2^20, or 1024 x 1024 for 1000 x 1000 (for `fft2`, of "
        "900 x 900). The sum of an outer product has so many products. Whatever is done, an "
        "argument is copied into its padding, and a result of two open axes is copied out of it.",
        (
            Column("operation", "operation"),
            Column("jit_us", "jit, us", ".0f"),
            Column("hand_us", "by hand, us", ".0f"),
            Column("ours_us", "bucketjit, us", ".0f"),
            Column("over_jit", "over jit", ".2f"),
            Column("over_hand", "over by hand", ".2f"),
        ),
        "benchmarks.large:by_operation",
        "elements",
    ),
)
