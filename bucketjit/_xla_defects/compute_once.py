"""Keep values in memory, so that XLA's CPU backend computes them once.

`bucketjit._xla_defects.recomputed_values` says which values need that, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from bucketjit._masking.array_ops import kept_in_memory
from bucketjit._masking.interpreter import Hook
from bucketjit._sizes.bucket_sizes import BucketSizes


def computing_once(once: Mapping[Any, Hashable]) -> Callable[[], Hook]:
    """A hook of `interpret` that keeps some values in memory.

    Args:
        once: A key for each variable to keep: those of one program with the same key are equal,
            so one of them is kept for all.
    """

    def begun() -> Hook:
        kept: dict[Hashable, Any] = {}

        def hook(eqn: JaxprEqn, outs: list[Any], sizes: BucketSizes) -> list[Any]:
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
