"""The computed sizes of a traced program: which ones it returns, and what cannot be served.

    traced   outs: y[size_1 - 1]           guard: size_1 - 1 >= 1
    program  outs: y[size_1 - 1], count    presumed: size_1 - 1 >= 1

A result of a computed size is cut on the host, so the program returns the count too. One thing is
presumed of a computed size where Python or JAX asks for it: that the array is not empty. It is
checked on the counts that a run returns, and where it does not hold, the call runs eagerly. Other
decisions by a computed size are refused. A size that is made in a loop or branch has no value
outside of it, so neither is possible there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import jax
from jax.extend.core import Jaxpr

from bucketjit._ir.bounds import is_never_negative
from bucketjit._ir.expressions import is_symbolic, variables_in, variables_of
from bucketjit._ir.guards import Guard, shapes_in
from bucketjit._ir.primitives import makes_size
from bucketjit._ir.program import TraceRefused, unchecked_reshapes
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
from bucketjit._jax.patches.patch import Noticing
from bucketjit._jax.user_code import in_brackets, raising_code, raising_line, source_line
from bucketjit._raised import text_of
from bucketjit.errors import MaskingError

if TYPE_CHECKING:
    from bucketjit._ir.computed_sizes import Computed, Sizing

_STAGED = frozenset({"remat2", "checkpoint"})  # their programs are traced apart when masked

_SIZED_OUTSIDE = "call bucketjit.sized outside of it"

_REMEDY = "compute with masks (jnp.where) there, or make the selection outside"


_MISMATCH = re.compile(r"incompatible|broadcast|concatenat|same|match|differ|(?<!or )equal", re.I)


def meeting_of_sizes(error: Exception, sizing: Noticing | Sizing | None) -> TraceRefused | None:
    """The refusal of arrays of different computed sizes that meet, in an addition, say."""
    text = text_of(error)
    if isinstance(sizing, Noticing | None) or isinstance(error, MaskingError):
        return None
    shapes = {f"({', '.join(shape)})" for shape in shapes_in(text)}
    met = [v for v in sizing.computed if re.search(rf"\b{v}\b", " ".join(shapes))]
    if not met or len(shapes) < 2 or not _MISMATCH.search(text):
        return None
    sides = ", and ".join(_told(sizing.computed[v]) for v in met)
    whole = "compute on whole arrays, by jnp.where(mask, x, 0)"
    if len(met) == 1:
        what, remedy = f"an array of a computed size meets one of another size: {sides}", whole
    else:
        what = f"arrays of different computed sizes meet: {sides}; select both by one mask"
        remedy = f"or {whole}"
    code, line = raising_code(error), raising_line(error)
    return TraceRefused(f"{f'{code}: ' if code else ''}{what}{in_brackets(line)}", remedy, error)


def _told(made: Computed) -> str:
    return f"some rows of {made.bound}{f', computed at {made.line}' if made.line else ''}"


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


def admitted(guard: Guard | None, sizing: Noticing | Sizing) -> Guard | None:
    """The guard that a decision by sizes becomes; None for one that a computed size decides.

    Only one thing is presumed of computed sizes: that an array is not empty.
    """
    if guard is None or isinstance(sizing, Noticing) or not guard.variables & sizing.dims.keys():
        return guard
    if always_holds(guard, sizing.computed):
        return guard
    asks_for_any = (guard.op, guard.right) in ((">=", "1"), ("<=", "0"), ("==", "0"), ("!=", "0"))
    return Guard(guard.left, ">=", "1") if asks_for_any and "mod(" not in guard.left else None


def refused_decision(guard: Guard, error: BaseException | None, where: str) -> TraceRefused:
    """The refusal of a decision by a computed size."""
    return TraceRefused(
        f"a decision depends on a computed size ({guard}){where}",
        "decide with jnp.where; only whether an array is empty may be asked",
        error,
    )


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


def _refuse(guard: Guard) -> NoReturn:
    raise refused_decision(guard, None, "")


def with_counts(
    jaxpr: Jaxpr, results: int, sizing: Sizing, counts: Sequence[str], guards: Sequence[Guard]
) -> tuple[Jaxpr, tuple[Guard, ...], dict[str, Any]]:
    """A program that returns the counts which are needed, its guards, and what else it knows."""
    computed = sizing.computed.keys()
    asked = [g for g in guards if g.variables & computed and not always_holds(g, sizing.computed)]
    presumed = tuple(dict.fromkeys(admitted(g, sizing) or _refuse(g) for g in asked))
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


@dataclass
class TraceSizes:
    """The sizes that decide comparisons in a trace.

    Attributes:
        of_call: The sizes of the call.
        known: These, and half of the rows for each computed size.
        are_computed: Whether the function is known to compute sizes.
    """

    of_call: Mapping[str, int]
    known: dict[str, int] = field(default_factory=dict)
    are_computed: bool = False

    def __post_init__(self) -> None:
        self.known |= self.of_call
