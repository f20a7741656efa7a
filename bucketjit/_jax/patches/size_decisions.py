"""A bound of the steps that JAX takes to decide a comparison of symbolic sizes."""

from __future__ import annotations

import math
import threading
import weakref
from typing import Any

from bucketjit._jax import names
from bucketjit._jax.patches.patch import patch


class _TooLong(Exception):
    """A comparison of sizes takes too many steps."""


# Most steps of one comparison; nearly all take fewer than 100. After `_PATIENCE` comparisons of a
# scope have been given up, later ones in it get `_FEWER_STEPS`.
_MOST_STEPS, _FEWER_STEPS, _PATIENCE = 2000, 100, 3

_deciding = threading.local()  # `left`: the steps left to the comparison of this thread, or None

_given_up: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # in each scope

_MOST_CONSTRAINTS = 300  # known to a decision; beyond, combining them derives no more

_owner = names.module("export.shape_poly_decision")._DecisionByElimination


@patch(_owner, "combine_constraint_with_existing")
def _combined(original: Any, self: Any, *constraint: Any) -> set[Any]:
    """No more is derived where much is known. Since export, 0.4.27. Until `_bounds`."""
    known = sum(map(len, self._expr_constraints.values()))
    return set() if known > _MOST_CONSTRAINTS else original(self, *constraint)


@patch(_owner, "_bounds_for_sorted_terms")
def _bounds(original: Any, self: object, scope: object, *rest: object) -> tuple[Any, Any]:
    """A comparison that takes too long counts as unknown: it becomes a guard of the program.

    JAX tries all ways to combine an expression with what is known of its terms, which takes minutes
    for sizes that are halved five times over, each half compared with 1. Since
    export.shape_poly_decision, 0.4.27. Until JAX bounds the steps.
    """
    left = getattr(_deciding, "left", None)
    if left is None:  # the outermost call of a comparison; the function calls itself
        is_late = _given_up.get(scope, 0) >= _PATIENCE
        _deciding.left = _FEWER_STEPS if is_late else _MOST_STEPS
        try:
            return original(self, scope, *rest)
        except _TooLong:
            _given_up[scope] = _given_up.get(scope, 0) + 1
            return -math.inf, math.inf
        finally:
            _deciding.left = None
    if left == 0:
        raise _TooLong
    _deciding.left = left - 1
    return original(self, scope, *rest)


BRIEF_DECISIONS = (_bounds, _combined)
"""The procedure that compares symbolic sizes gives up after a number of steps."""
