"""The computed sizes of a traced program: which ones it returns, and what cannot be served.

    traced   outs: y[size_1 - 1]           guard: size_1 - 1 >= 3
    program  outs: y[size_1 - 1], count    presumed: size_1 - 1 >= 3

A result of a computed size is cut on the host, so the program returns the count too. A guard of a
computed size was decided by presumed sizes. It is checked on the counts that a run returns, and
where it does not hold, the function is traced again. A size that is made in a loop or branch has no
value outside of it, so neither is possible there.

A comparison in a trace is decided by the sizes of the call, and by presumed computed sizes:

    y = x[mask]        taken to have half of the rows: neither `y` nor ``x[~mask]`` is empty
    y + x              fails; the size that makes the two equal is presumed
    top_k(y, 2)        raises for a single row; a size that decides otherwise is presumed

When a run has returned other sizes, the function is traced again, and nothing is presumed of these.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import jax
from jax import export
from jax.extend.core import Jaxpr

from bucketjit._ir.bounds import is_never_negative
from bucketjit._ir.expressions import evaluate_text, is_symbolic, solve, variables_in, variables_of
from bucketjit._ir.guards import Guard, shapes_in
from bucketjit._ir.open_sizes import Noticing
from bucketjit._ir.primitives import makes_size
from bucketjit._ir.program import TraceRefused, unchecked_reshapes
from bucketjit._ir.ranges import solved_for
from bucketjit._jax.jaxprs import (
    CALLS,
    all_equations,
    bodies,
    equations_around,
    first_effect,
    name_of,
    open_jaxpr,
    rebuilt_jaxpr,
    shape_of,
    without_dead_code,
)
from bucketjit._jax.user_code import in_brackets, raising_code, raising_line, source_line
from bucketjit._raised import text_of
from bucketjit.errors import MaskingError

if TYPE_CHECKING:
    from bucketjit._ir.computed_sizes import Computed, Sizing

_STAGED = frozenset({"remat2", "checkpoint"})  # their programs are traced apart when masked

_SIZED_OUTSIDE = "call bucketjit.sized outside of it"

_REMEDY = "compute with masks (jnp.where) there, or make the selection outside"


_MISMATCH = re.compile(r"incompatible|broadcast|concatenat|same|match|differ|(?<!or )equal", re.I)


def meeting_of_sizes(
    error: Exception, sizing: Noticing | Sizing | None, presumed: Mapping[str, int]
) -> TraceRefused | None:
    """The refusal of arrays of different computed sizes that meet, in an addition, say."""
    text = text_of(error)
    if isinstance(sizing, Noticing | None) or isinstance(error, MaskingError):
        return None
    shapes = {f"({', '.join(shape)})" for shape in shapes_in(text)}
    met = [v for v in sizing.computed if re.search(rf"\b{v}\b", " ".join(shapes))]
    if not met or len(shapes) < 2 or not _MISMATCH.search(text):
        return None
    sides = ", and ".join(_told(v, sizing, presumed) for v in met)
    whole = "compute on whole arrays, by jnp.where(mask, x, 0)"
    if len(met) == 1:
        what, remedy = f"an array of a computed size meets one of another size: {sides}", whole
    else:
        what = f"arrays of different computed sizes meet: {sides}; select both by one mask"
        remedy = f"or {whole}"
    code, line = raising_code(error), raising_line(error)
    return TraceRefused(f"{f'{code}: ' if code else ''}{what}{in_brackets(line)}", remedy, error)


def _told(variable: str, sizing: Sizing, presumed: Mapping[str, int]) -> str:
    made = sizing.computed[variable]
    n = presumed.get(variable, 0) - 1
    rows = "some rows" if n < 0 else f"{n} row{'' if n == 1 else 's'}"
    return f"{rows} of {made.bound}{f', computed at {made.line}' if made.line else ''}"


def counts_of(sizing: Sizing, outs: Sequence[Any], trace: object) -> dict[str, Any]:
    """The counts that a trace can return after its results, int32 scalars by variable."""
    counts: dict[str, Any] = {}
    of_outs = variables_in(d for x in outs for d in getattr(x, "shape", ()))
    made = sizing.numbers_in(trace)
    for variable, dim in sizing.dims.items():
        if variable in made:
            counts[variable] = made[variable]
        elif variable in of_outs and is_symbolic(dim):
            counts[variable] = dim.dimension_as_value()
    return counts


def always_holds(guard: Guard, computed: Mapping[str, Computed]) -> bool:
    """Whether a guard follows from the bounds of computed sizes: ``n - (size_1 - 1) >= 0``."""
    most_of = tuple((v, f"({made.bound}) + 1") for v, made in computed.items())
    above, below = (
        f"({a}) - ({b})" for a, b in ((guard.left, guard.right), (guard.right, guard.left))
    )
    match guard.op:
        case ">=":
            return is_never_negative(above, most_of)
        case "<=":
            return is_never_negative(below, most_of)
        case "!=":
            return any(is_never_negative(f"{x} - 1", most_of) for x in (above, below))
    return False


def refuse_sizes_that_escape(jaxpr: Jaxpr) -> None:
    """Refuse a program where a loop or branch returns an array of a size that is computed in it."""
    for eqn in all_equations(jaxpr):
        if name_of(eqn) in CALLS - _STAGED:
            continue
        for body in bodies(eqn):
            if _made_in(all_equations(body)) & variables_in(
                d for v in body.outvars for d in shape_of(v)
            ):
                line = source_line(eqn, equations_around(jaxpr, eqn))
                raise TraceRefused(
                    f"{eqn.primitive.name}: it returns an array, or needs one for a derivative, "
                    f"whose size is computed inside of it{in_brackets(line)}",
                    _REMEDY,
                )


def refuse_effects(jaxpr: Jaxpr, presumed: Sequence[Guard]) -> None:
    """Refuse a program that may have to run twice, and has effects."""
    if presumed and jaxpr.effects:
        raise TraceRefused(
            f"a decision depends on a computed size ({presumed[0]}), so the function may run "
            f"twice, and it has an effect: {first_effect(jaxpr)}",
            "leave out the effect, or the decision",
        )


def with_sizes_alive(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr without dead code, but with the equations that make the sizes it mentions.

    A size can be read without the array that has it: ``x.sum() / x[x > 0].shape[0]``.
    """
    kept: list[Any] = []
    while True:
        more = without_dead_code(_returning(jaxpr, [*jaxpr.outvars, *kept]))
        living = _returning(more, more.outvars[: len(jaxpr.outvars)])
        lacking = (_mentioned(living) & _made_in(all_equations(jaxpr))) - _made_in(
            all_equations(living)
        )
        if not lacking:
            return living
        kept += [e.outvars[0] for e in jaxpr.eqns if _made_in([e]) & lacking]
        if not lacking <= _made_in(jaxpr.eqns):
            return jaxpr  # one of a program inside: nothing is removed


def _returning(jaxpr: Jaxpr, outvars: Sequence[Any]) -> Jaxpr:
    consts = open_jaxpr(jaxpr)[1]
    return rebuilt_jaxpr(jaxpr, jaxpr.constvars, consts, jaxpr.invars, outvars, jaxpr.eqns)


def _made_in(eqns: Iterable[Any]) -> set[str]:
    """The computed sizes that equations make."""
    return {eqn.params["variable"] for eqn in eqns if makes_size(eqn)}


def _mentioned(jaxpr: Jaxpr) -> set[str]:
    """The variables in the shapes and parameters of an open jaxpr, at any depth."""
    found: set[str] = set()
    for eqn in all_equations(jaxpr):
        found |= variables_in(d for v in (*eqn.invars, *eqn.outvars) for d in shape_of(v))
        params = jax.tree_util.tree_leaves(list(eqn.params.values()), is_leaf=is_symbolic)
        found |= variables_in(params)
    return found


def with_counts(
    jaxpr: Jaxpr, results: int, sizing: Sizing, counts: Sequence[str], guards: Sequence[Guard]
) -> tuple[Jaxpr, tuple[Guard, ...], dict[str, Any]]:
    """A program that returns the counts which are needed, its guards, and what else it knows."""
    computed = sizing.computed.keys()
    presumed = tuple(
        g for g in guards if g.variables & computed and not always_holds(g, sizing.computed)
    )
    checked = {v: made for v, made in sizing.computed.items() if made.is_checked}
    reshapes = unchecked_reshapes(jaxpr)
    decided = {v for g in presumed for v in g.variables}
    reshaped = variables_in(d for pair in reshapes for shape in pair for d in shape)
    inside = "computed in a loop, a branch or a function under jit"
    # A number of rows is compared with those that there are, which may be computed too.
    rows = {v for made in checked.values() for v in variables_of(made.bound)}
    wanted = (
        (decided, f"a decision depends on a size that is {inside}", _REMEDY),
        (reshaped, f"a reshape of a size that is {inside} cannot be checked", _REMEDY),
        ({*checked, *rows}, f"sized: a size that is {inside} cannot be checked", _SIZED_OUTSIDE),
    )
    needed = variables_in(d for v in jaxpr.outvars[:results] for d in shape_of(v)) & computed
    for names, why, remedy in wanted:
        own = names & computed
        if missing := own - set(counts):
            raise TraceRefused(f"{why}{in_brackets(sizing.computed[min(missing)].line)}", remedy)
        needed |= own
    kept = [v for v, name in zip(jaxpr.outvars[results:], counts, strict=True) if name in needed]
    jaxpr = _returning(jaxpr, [*jaxpr.outvars[:results], *kept])
    refuse_sizes_that_escape(jaxpr)
    refuse_effects(jaxpr, presumed)
    returned = tuple(v for v in counts if v in needed)
    more = {"computed": sizing.computed, "counts": returned, "presumed": presumed}
    return jaxpr, tuple(g for g in guards if not g.variables & computed), more


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
        shapes = shapes_in(text_of(failure)) if free else []
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
        if isinstance(failure, MaskingError) or _CONSTANT in text_of(failure):
            return False  # no size allows it
        self._failed.append(decided)
        if not decided or len(self._failed) > _MOST_GUESSES:
            return False
        assert not isinstance(sizing, Noticing)
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
        computed = set() if isinstance(sizing, Noticing) else sizing.computed.keys()
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
        if guard is None or isinstance(sizing, Noticing) or guard.variables <= self.of_call:
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
