"""The sizes that decide comparisons in a trace: those of the call, and presumed computed ones.

    y = x[mask]        taken to have half of the rows: neither `y` nor ``x[~mask]`` is empty
    y + x              fails; the size that makes the two equal is presumed
    top_k(y, 2)        raises for a single row; a size that decides otherwise is presumed

When a run has returned other sizes, the function is traced again, and nothing is presumed of these.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set

from jax import export

from bucketjit._ir.computed_sizes import Sizing
from bucketjit._ir.expressions import evaluate_text, solve, variables_of
from bucketjit._ir.guards import Guard, shapes_in
from bucketjit._ir.open_sizes import Noticing
from bucketjit._ir.ranges import solved_for
from bucketjit._tracing.computed_sizes import always_holds
from bucketjit.errors import MaskingError

_CONSTANT = "requires a constant"  # JAX says it of int(size), and where Python iterates

_MOST_GUESSES = 4  # traces that fail, each of which decides otherwise

_NEAR = 32  # numbers of rows next to none, and next to all, that are looked at


def _near_the_ends(most: int) -> list[int]:
    """Values of a size from 1 to ``most``, the ones between the ends first."""
    ends = (most + 1) // 2
    values = [n for i in range(min(_NEAR, ends)) for n in (1 + i, most - i)]
    return list(dict.fromkeys(reversed(values)))


class PresumedSizes:
    """The sizes that decide comparisons in a trace.

    Attributes:
        of_call: The variables of the call.
        known: Their sizes, and presumed values of computed ones.
        presumed: What is presumed of computed sizes, since a run has returned it; else see
            `Sizing`.
        guessed: What is presumed in its place, since the trace fails otherwise.
        are_computed: Whether the function is known to compute sizes.
        first_failure: The first error that `_guess_otherwise` was asked about, and the sizes of its
            trace: the one to tell of if no guess helps.
    """

    def __init__(self, sizes: Mapping[str, int], presumed: Mapping[str, int]) -> None:
        self.of_call = frozenset(sizes)
        self.known = dict(sizes)
        self.presumed = presumed
        self.guessed: dict[str, int] = {}
        self.are_computed = False
        self.first_failure: tuple[Exception, Noticing | Sizing] | None = None
        self._failed: list[list[Guard]] = []  # decisions of computed sizes that led to an error

    def guess_again(
        self, failure: Exception, sizing: Noticing | Sizing, guards: Sequence[Guard]
    ) -> list[Guard] | None:
        """Presume other computed sizes, since a trace has failed."""
        if self._guess_equal(failure, sizing) or self._guess_otherwise(failure, sizing, guards):
            return [guard for guard in guards if guard.variables <= self.of_call]
        return None

    def _guess_equal(self, failure: Exception, sizing: Noticing | Sizing) -> bool:
        """Presume values by which two shapes in the error are equal."""
        free = self._free(sizing) - self.guessed.keys()
        shapes = shapes_in(str(failure)) if free else []
        for one, other in itertools.permutations(shapes, 2):
            for left, right in zip(one, other, strict=False):
                found = self._solved(left, right, free)
                if found:
                    self.guessed |= found
                    return True
        return False

    def _guess_otherwise(
        self, failure: Exception, sizing: Noticing | Sizing, guards: Sequence[Guard]
    ) -> bool:
        """Presume values that decide otherwise than all traces which failed, the last first."""
        self.first_failure = self.first_failure or (failure, sizing)
        free = self._free(sizing)
        decided = [guard for guard in guards if guard.variables & free]
        if isinstance(failure, MaskingError) or _CONSTANT in str(failure):
            return False  # no size allows it
        self._failed.append(decided)
        if not decided or len(self._failed) > _MOST_GUESSES:
            return False
        assert isinstance(sizing, Sizing)
        for variable in (v for g in reversed(decided) for v in sorted(g.variables & free)):
            most = evaluate_text(sizing.computed[variable].bound, self.known) + 1
            for value in _near_the_ends(most):
                at = {**self.known, variable: value}
                if not any(all(g.holds(at) for g in path) for path in self._failed):
                    earlier = set(itertools.takewhile(variable.__ne__, sizing.computed))
                    self.guessed = {v: n for v, n in self.guessed.items() if v in earlier}
                    self.guessed[variable] = value
                    return True
        return False

    def _free(self, sizing: Noticing | Sizing) -> set[str]:
        """The computed sizes whose values no run has returned."""
        computed = sizing.computed.keys() if isinstance(sizing, Sizing) else set()
        return computed - self.presumed.keys()

    def _solved(self, left: str, right: str, free: Set[str]) -> dict[str, int]:
        """The other value of a computed size by which ``left`` is ``right``; ``{}`` if none."""
        try:
            value = evaluate_text(right, self.known)
            for variable in sorted(free & set(variables_of(left))):
                if variable in variables_of(right):  # two parts of one selection
                    known = self.known[variable]
                    for n in (known - 1, known + 1):
                        at = {**self.known, variable: n}
                        if n >= 1 and evaluate_text(left, at) == evaluate_text(right, at):
                            return {variable: n}
                    continue
                others = {k: v for k, v in self.known.items() if k != variable}
                found = solve(left, value, others)
                if found.get(variable, 0) >= 1 and found != {variable: self.known[variable]}:
                    return found
        except (SyntaxError, KeyError, ValueError, TypeError):
            pass  # not expressions of sizes
        return {}

    def pinned(self, guard: Guard | None, sizing: Noticing | Sizing) -> Guard | None:
        """The guard, or one that an array is empty, if that is what it is about.

        JAX traces more programs for an array that is known to be empty.
        """
        if guard is None or not isinstance(sizing, Sizing) or guard.variables <= self.of_call:
            return guard
        if always_holds(guard, sizing.computed):
            return guard
        if len(guard.variables) == 1 and self.known[min(guard.variables)] == 1:
            return Guard(min(guard.variables), "==", "1")
        for side in (guard.left, guard.right) if guard.op in (">=", "<=") else ():
            if variables_of(side) and evaluate_text(side, self.known) == 0:
                empty = self._solved_for_a_variable(Guard(side, "==", "0"))
                guard = empty if empty.left in self.known else guard
        return self._solved_for_a_variable(guard) if guard.op == "==" else guard

    def with_guard(self, guards: Sequence[Guard], guard: Guard) -> list[Guard]:
        """The guards and one more. One for a computed size replaces it, so others are decided anew.

        JAX does not end where it replaces a size in comparisons of expressions that hold others.
        """
        replaces = guard.op == "==" and guard.left in self.known.keys() - self.of_call
        kept = [g for g in guards if not (replaces and guard.left in g.variables)]
        return [*kept, guard]

    def _solved_for_a_variable(self, guard: Guard) -> Guard:
        """An equality in the form ``variable == expression``, which ``jax.export`` can assume.

        The variable is the last one that the program computes: the sizes in the expression are
        known when it is.
        """
        computed = [v for v in self.known if v in guard.variables and v not in self.of_call]
        if not computed or guard.left == computed[-1]:
            return guard
        scope = export.SymbolicScope()
        left, right = (export.symbolic_shape(x, scope=scope)[0] for x in (guard.left, guard.right))
        value = solved_for(left - right, computed[-1])
        return guard if value is None else Guard(computed[-1], "==", str(value))
