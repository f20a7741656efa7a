"""Is the masked result the exact one? Equal where nothing is computed, close elsewhere.

As in JAX's own tests the tolerance goes by dtype. It holds against the largest finite value of
the array where a primitive accumulates, since padding changes the order of a sum; and it is
wider where a primitive iterates or is ill-conditioned, by the table below.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = {
    "bfloat16": 2e-2,
    "float16": 2e-3,
    "float32": 2e-5,
    "complex64": 2e-5,
    "float64": 1e-11,
    "complex128": 1e-11,
}
SMALL_FLOAT = 0.25  # eight bits and fewer

# These only move, choose or compare values: every bit must agree, the sign of zero included.
_MOVES = """argmax argmin bitcast_convert_type broadcast_in_dim clamp concatenate cummax cummin
    dynamic_slice dynamic_update_slice eq gather ge gt iota is_finite le lt ne pad reduce_and
    reduce_max reduce_min reduce_or reduce_window_max reduce_window_min reshape rev scatter
    scatter_max scatter_min select_and_gather_add select_n slice sort squeeze stop_gradient
    top_k transpose"""
MOVES = frozenset(_MOVES.split())

# These add up values of both signs.
_ACCUMULATES = """approx_top_k cholesky conv_general_dilated cumlogsumexp cumprod cumsum
    custom_linear_solve
    dot_general eig eigh fft lu qr reduce reduce_prod reduce_sum reduce_window_add
    reduce_window_mul scatter_add scatter_mul select_and_scatter_add svd triangular_solve
    tridiagonal_solve"""
ACCUMULATES = frozenset(_ACCUMULATES.split())

# By how much the tolerance is wider, and why.
WIDER = {
    "cumprod": 5,  # a product of many factors
    "eig": 50,  # iterates until converged
    "eigh": 50,
    "svd": 50,
    "igamma": 10,  # series of a length that depends on the whole array
    "igammac": 10,
    "regularized_incomplete_beta": 10,
    "random_gamma": 10,
}


def difference(
    got: Sequence[Any],
    want: Sequence[Any],
    primitive: str,
    *,
    gradient: bool = False,
    tied_keys: int = 0,
) -> str | None:
    """How the two differ, in a line; None if they agree.

    Args:
        got: Masked outputs, cut to their logical shapes.
        want: Exact outputs.
        primitive: What the case is about; decides how close they must be.
        gradient: The outputs are derivatives: nothing only moves.
        tied_keys: The outputs are those of an unstable sort by so many keys: what has equal keys
            may come in any order, in the plain run as well.
    """
    if tied_keys and len(got) == len(want):
        got, want = _ties_in_order(got, tied_keys), _ties_in_order(want, tied_keys)
    if len(got) != len(want):
        return f"{len(got)} outputs, exact has {len(want)}"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = (jax.random.key_data(x) if hasattr(x, "_base_array") else x for x in (a, b))
        a, b = np.asarray(a), np.asarray(b)
        if a.shape != b.shape:
            return f"output {i}: shape {a.shape}, exact {b.shape}"
        if a.dtype != b.dtype:
            return f"output {i}: dtype {a.dtype}, exact {b.dtype}"
        bad = ~_agrees(a, b, primitive, gradient)
        if bad.any():
            at = tuple(int(k) for k in np.argwhere(bad)[0])
            return (
                f"output {i} at {list(at)}: {a[at]} in place of {b[at]} "
                f"({int(bad.sum())} of {bad.size} differ)"
            )
    return None


def _ties_in_order(outs: Sequence[Any], keys: int) -> list[Any]:
    """The keys as they are; the other outputs, as rows of one table, in order."""
    flat = [np.asarray(x).ravel() for x in outs]
    order = np.lexsort(flat[::-1])
    return [*outs[:keys], *(x[order] for x in flat)]


def _agrees(a: np.ndarray, b: np.ndarray, primitive: str, gradient: bool) -> np.ndarray:
    if not jnp.issubdtype(b.dtype, jnp.inexact):
        return np.asarray(a == b)
    if jnp.issubdtype(b.dtype, jnp.complexfloating):
        parts = [(np.real(a), np.real(b)), (np.imag(a), np.imag(b))]
    else:
        parts = [(a, b)]
    wide = [(x.astype(np.float64), y.astype(np.float64)) for x, y in parts]
    agree = np.ones(b.shape, bool)
    if primitive in MOVES and not gradient:
        for x, y in wide:
            agree &= ((x == y) & (np.signbit(x) == np.signbit(y))) | (np.isnan(x) & np.isnan(y))
        return agree
    tolerance = TOLERANCE.get(b.dtype.name, SMALL_FLOAT) * WIDER.get(primitive, 1)
    tolerance *= 10 if gradient else 1
    scale = 1.0
    if gradient or primitive in ACCUMULATES:
        finite = [np.abs(y[np.isfinite(y)]) for _, y in wide]
        scale = max([1.0, *(float(y.max()) for y in finite if y.size)])
    for x, y in wide:
        agree &= np.isclose(x, y, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    if len(wide) == 2:  # a complex result is rounded as a whole: its smaller part by the larger
        agree |= np.isclose(a, b, rtol=tolerance, atol=tolerance * scale)
    return agree
