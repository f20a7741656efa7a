"""A bound of the steps that JAX takes to decide a comparison of symbolic sizes."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

from bucketjit._jax import names
from bucketjit._jax.patches.patch import Patch

_decision = names.module("export.shape_poly_decision")


class _TooLong(Exception):
    """A comparison of sizes takes too many steps."""


# Most steps of one comparison; nearly all take fewer than 100. After `_PATIENCE` comparisons of a
# scope have been given up, later ones in it get `_FEWER_STEPS`.
_MOST_STEPS, _FEWER_STEPS, _PATIENCE = 2000, 100, 3

_deciding = threading.local()  # `left`: the steps left to the comparison of this thread, or None

_MOST_CONSTRAINTS = 300  # known to a decision; beyond, combining them derives no more


def brief_decisions() -> list[Patch]:
    """The procedure that compares symbolic sizes gives up after a number of steps.

    A comparison that takes too long counts as unknown. Then the sizes of the call decide it, and
    the program gets a guard. JAX has no bound (``export.shape_poly_decision``, since 0.4.27).
    """
    owner = _decision._DecisionByElimination
    combine: Callable[..., set[Any]] = owner.combine_constraint_with_existing
    original = owner._bounds_for_sorted_terms

    @functools.wraps(combine)
    def combined(self: Any, *constraint: Any) -> set[Any]:
        known = sum(map(len, self._expr_constraints.values()))
        return set() if known > _MOST_CONSTRAINTS else combine(self, *constraint)

    given_up: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    def bounds(
        self: object, scope: object, terms: object, i: int, precision: object
    ) -> tuple[Any, Any]:
        left = getattr(_deciding, "left", None)
        if left is None:  # the outermost call of a comparison; the function calls itself
            is_late = given_up.get(scope, 0) >= _PATIENCE
            _deciding.left = _FEWER_STEPS if is_late else _MOST_STEPS
            try:
                return original(self, scope, terms, i, precision)
            except _TooLong:
                given_up[scope] = given_up.get(scope, 0) + 1
                return -math.inf, math.inf
            finally:
                _deciding.left = None
        if left == 0:
            raise _TooLong
        _deciding.left = left - 1
        return original(self, scope, terms, i, precision)

    reasons: dict[str, Any] = {
        "why": "It tries all ways to combine an expression with what is known of its terms, and "
        "each constraint with all others. That takes minutes for sizes that are halved five times "
        "over, each half compared with 1.",
        "since": "export.shape_poly_decision, 0.4.27",
        "delete_when": "JAX bounds the steps of a comparison of sizes",
    }
    return [
        Patch(owner, "_bounds_for_sorted_terms", bounds, **reasons),
        Patch(owner, "combine_constraint_with_existing", combined, **reasons),
    ]
