"""What has a size that the program computes, while a function is traced for buckets.

JAX raises for these in a trace, since their size is known at run time only. While a function is
traced for buckets, the program computes it; see `bucketjit._ir.computed_sizes`. In other threads,
and in other traces, JAX's own functions run. With ``size=``, ``length=`` or
``total_repeat_length=`` they do what JAX does.

- Masks (`.masks`): ``x[mask]`` with masks of any rank, among slices, integers and index arrays;
  ``x.at[mask].set``, ``get``, ``add``, ``multiply``, ``min``, ``max``, ``apply`` and others;
  ``jnp.nonzero``, ``flatnonzero``, ``argwhere``, ``where`` of one argument; ``compress``,
  ``extract``; ``unique`` and ``unique_values``, ``unique_counts``, ``unique_inverse``,
  ``unique_all``; ``setdiff1d``, ``union1d``, ``intersect1d``, ``setxor1d``.
- Slices (`.slices`): ``x[:k]``, ``x[k:]``, ``x[a:b]``, ``x[..., :k, :m]``, clamped as
  in Python; ``x.at[:k].set`` and others; ``lax.dynamic_slice``, ``dynamic_slice_in_dim``,
  ``lax.slice`` and ``slice_in_dim`` with sizes and ends that are computed.
- Shapes (`.computed_shapes`), where the size has a bound: ``jnp.ones``, ``zeros``, ``full``,
  ``empty``, ``broadcast_to``, ``eye``, ``linspace``, ``tile``, ``lax.top_k``, random numbers,
  ``jax.random.split`` and ``permutation``, ``arange``; ``repeat`` by counts; ``bincount``.
"""

from __future__ import annotations

from typing import Any

import jax

from bucketjit._jax import names
from bucketjit._jax.patches.computed_shapes import SHAPES
from bucketjit._jax.patches.masks import MASKS
from bucketjit._jax.patches.slices import SLICES
from bucketjit._jax.patches.traced_sizes import opened

_partial_eval = names.module("interpreters.partial_eval")


def _ended(open_: Any, original: Any, self: Any) -> None:
    """What makes sizes knows values of a trace until it ends.

    There JAX looks for values that outlive it (jax_check_tracer_leaks). Since core.Trace, 0.4.36.
    Until sizes can be computed.
    """
    open_.ended(self)
    original(self)


_ENDS = tuple(
    opened(owner, "invalidate", everywhere=False)(_ended)
    for owner in (jax.core.Trace, _partial_eval.DynamicJaxprTrace)
)

SELECTIONS = (*MASKS, *SLICES, *SHAPES, *_ENDS)
"""All patches for sizes that the program computes."""
