"""The end of a trace, at which nothing may hold its values any more."""

from __future__ import annotations

import functools
from typing import Any

from bucketjit._jax import names
from bucketjit._jax.patches.patch import Patch
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
