"""Install the patches of `bucketjit._jax.patches` while a function is traced.

They replace functions of JAX that refuse symbolic sizes without need. The replacements are global,
so other threads call them, too. For plain sizes they do what the originals do.
"""

from __future__ import annotations

from bucketjit._ir.associative_scan import associative_scan_of
from bucketjit._jax.patches import operations, shapes
from bucketjit._jax.patches.lifetimes import CACHES, leaving_nothing, weak_finalizers
from bucketjit._jax.patches.patch import Replacing
from bucketjit._jax.patches.selections import SELECTIONS

lenient_jax = Replacing(
    operations.associative_scans(associative_scan_of),
    operations.open_scans,
    *operations.SEARCHES,
    *operations.SHUFFLES,
    operations.open_reductions,
    *operations.DEBUG_CALLBACKS,
    *shapes.INDICES,
    *shapes.BRIEF_DECISIONS,
    *operations.SYMBOLIC_INDICES,
    shapes.lengths,
    shapes.inferred_sizes,
    shapes.squeezes,
)
"""While active, JAX traces more programs with symbolic sizes."""

selecting_jax = Replacing(*SELECTIONS)
"""While active, selections ask `bucketjit._jax.patches.patch.selecting` what to do."""

forgetful_jax = Replacing(weak_finalizers, *CACHES, context=leaving_nothing)
"""While active, traces that fail can be freed, and none leaves anything behind in JAX."""
