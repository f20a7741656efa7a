"""What has a size that the program computes, while a function is traced for buckets.

JAX raises for these in a trace, since their size is known at run time only. While a function is
traced for buckets, the program computes it; see `bucketjit._ir.computed_sizes`. In other threads,
and in other traces, JAX's own functions run. With ``size=``, ``length=`` or
``total_repeat_length=`` they do what JAX does.

- Masks (`.masks`): ``x[mask]`` with masks of any rank, among slices, integers and index arrays;
  ``x.at[mask].set``, ``get``, ``add``, ``multiply``, ``min``, ``max``, ``apply`` and others;
  ``jnp.nonzero``, ``flatnonzero``, ``argwhere``, ``where`` of one argument; ``compress``,
  ``extract``; ``delete`` of a mask or of positions; ``unique`` and ``unique_values``,
  ``unique_counts``, ``unique_inverse``, ``unique_all``; ``setdiff1d``, ``union1d``,
  ``intersect1d``, ``setxor1d``.
- Slices (`.slices`): ``x[:k]``, ``x[k:]``, ``x[a:b]``, ``x[a:b:2]``, ``x[..., :k, :m]``, clamped as
  in Python; ``x.at[:k].set`` and others; ``lax.dynamic_slice``, ``dynamic_slice_in_dim``,
  ``lax.slice`` and ``slice_in_dim`` with sizes and ends that are computed.
- Shapes (`.computed_shapes`), where the size has a bound: ``jnp.ones``, ``zeros``, ``full``,
  ``empty``, ``broadcast_to``, ``eye``, ``linspace``, ``tile``, ``lax.top_k``, random numbers,
  ``jax.random.split`` and ``permutation``, ``arange``; ``repeat`` by counts; ``bincount``;
  ``trim_zeros``.
"""

from __future__ import annotations

import functools
from typing import Any

from bucketjit._jax import names
from bucketjit._jax.patches.computed_shapes import open_shapes
from bucketjit._jax.patches.masks import open_masks
from bucketjit._jax.patches.patch import Patch
from bucketjit._jax.patches.slices import open_slices
from bucketjit._jax.patches.traced_sizes import Selecting

_core = names.module("core")
_partial_eval = names.module("interpreters.partial_eval")


def ends_of_traces(selecting: Selecting) -> list[Patch]:
    """Each trace that ends is told to what makes sizes, which knows values of it."""

    def telling(owner: Any) -> Patch:
        original = owner.invalidate

        @functools.wraps(original)
        def invalidate(self: Any) -> None:
            open_ = selecting()
            if open_ is not None:
                open_.ended(self)
            original(self)

        return Patch(
            owner,
            "invalidate",
            invalidate,
            why="JAX looks for values that outlive their trace (jax_check_tracer_leaks) where the "
            "trace ends, and bucketjit knows of them until then.",
            since="core.Trace.invalidate, 0.4.36",
            delete_when="JAX has arrays whose size is computed",
        )

    return [telling(owner) for owner in (_core.Trace, _partial_eval.DynamicJaxprTrace)]


def open_selections(selecting: Selecting) -> list[Patch]:
    """All patches for sizes that the program computes."""
    return [
        *open_masks(selecting),
        *open_slices(selecting),
        *open_shapes(selecting),
        *ends_of_traces(selecting),
    ]
