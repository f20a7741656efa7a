"""Install the patches of `bucketjit._jax.patches` while a function is traced.

They replace functions of JAX that refuse symbolic sizes without need. The replacements are global,
so other threads call them, too. For plain sizes they do what the originals do.
"""

from __future__ import annotations

from bucketjit._ir.associative_scan import associative_scan_of
from bucketjit._ir.primitives import (
    axis_of_shards,
    mean_over_shards,
    refuse_groups,
    sum_over_shards,
)
from bucketjit._jax.patches.lifetimes import CACHES, leaving_nothing, weak_finalizers
from bucketjit._jax.patches.operations import (
    DEBUG_CALLBACKS,
    SEARCHES,
    SHUFFLES,
    SYMBOLIC_INDICES,
    associative_scans,
    open_reductions,
    open_scans,
    uneven_collectives,
)
from bucketjit._jax.patches.patch import Replacing
from bucketjit._jax.patches.selections import SELECTIONS
from bucketjit._jax.patches.shapes import (
    BRIEF_DECISIONS,
    INDICES,
    inferred_sizes,
    lengths,
    squeezes,
)

lenient_jax = Replacing(
    associative_scans(associative_scan_of),
    open_scans,
    *SEARCHES,
    *SHUFFLES,
    open_reductions,
    *DEBUG_CALLBACKS,
    *INDICES,
    *BRIEF_DECISIONS,
    *SYMBOLIC_INDICES,
    lengths,
    inferred_sizes,
    squeezes,
)
"""While active, JAX traces more programs with symbolic sizes."""

selecting_jax = Replacing(*SELECTIONS)
"""While active, selections ask `bucketjit._jax.patches.patch.selecting` what to do."""

uneven_shards = Replacing(
    *uneven_collectives(axis_of_shards, mean_over_shards, sum_over_shards, refuse_groups)
)
"""While active, collectives know uneven shards; see `bucketjit._ir.primitives`."""

forgetful_jax = Replacing(weak_finalizers, *CACHES, context=leaving_nothing)
"""While active, traces that fail can be freed, and none leaves anything behind in JAX."""
