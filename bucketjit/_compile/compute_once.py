"""Write values to memory, so that XLA's CPU backend computes each of them once.

    before   b = exp a                     XLA may compute b in every kernel that reads it
    after    b = exp a
             c = cond(n >= 0, b, -b)       what reads b reads c, which is never computed twice

`bucketjit._compile.recomputed_values` finds the values that need this, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._masking.array_ops import kept_in_memory
from bucketjit._masking.interpreter import Hook


def computing_once(once: Mapping[Any, Hashable]) -> Callable[[], Hook]:
    """Make a hook of `interpret` that writes some values to memory."""

    def begun() -> Hook:
        kept: dict[Hashable, Any] = {}

        def hook(eqn: JaxprEqn, outs: list[Any], sizes: BucketSizes) -> list[Any]:
            # Any run-time size does: `kept_in_memory` needs a number that XLA does not know.
            size = next(iter(sizes.values.values()), None)
            found = list(outs)
            for i, (var, value) in enumerate(zip(eqn.outvars, outs, strict=True)):
                key = once.get(var)
                if key is None or size is None or not isinstance(value, jax.Array):
                    continue
                if key not in kept:
                    kept[key] = kept_in_memory(value, size)
                found[i] = kept[key]
            return found

        return hook

    return begun
