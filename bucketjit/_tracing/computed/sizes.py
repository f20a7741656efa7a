"""The computed sizes of a traced program: which ones it returns, and what cannot be served.

    traced   outs: y[size_1 - 1]           guard: size_1 - 1 >= 1
    program  outs: y[size_1 - 1], count    presumed: size_1 - 1 >= 1

A result of a computed size is cut on the host, so the program returns the count too. One thing is
presumed of a computed size where Python or JAX asks for it: that the array is not empty. It is
checked on the counts that a run returns, and where it does not hold, the call runs eagerly. Other
decisions by a computed size are refused. A size that is made in a loop or branch has no value
outside of it, so neither is possible there.

    executable   (results, counts:i32[k])       counts of `Interface.counts`
    host         wait for the counts, check them, cut the results

`Padded` results are not cut, so they wait for nothing: each asks for its size when it is needed.
Only counts that must be checked are waited for at once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
from jax.extend.core import Jaxpr

from bucketjit._arrays.results import Change
from bucketjit._ir.bounds import is_never_negative
from bucketjit._ir.expressions import evaluate_text, is_symbolic, variables_in, variables_of
from bucketjit._ir.guards import Guard, shapes_in
from bucketjit._ir.interface import Computed, Interface
from bucketjit._ir.primitives import makes_size
from bucketjit._ir.program import TraceRefused, unchecked_reshapes
from bucketjit._jax import jaxprs
from bucketjit._jax.patches.patch import as_open
from bucketjit._jax.user_code import in_brackets, raising_code, raising_line, source_line
from bucketjit._raised import text_of
from bucketjit.errors import ArgumentError, MaskingError

if TYPE_CHECKING:
    from bucketjit._tracing.computed.sizing import Sizing

_STAGED = frozenset({"remat2", "checkpoint"})  # their programs are traced apart when masked

_SIZED_OUTSIDE = "call bucketjit.sized outside of it"

_REMEDY = "compute with masks (jnp.where) there, or make the selection outside"

_KEPT = 64  # rows of counts that are remembered

_MISMATCH = re.compile(r"incompatible|broadcast|concatenat|same|match|differ|(?<!or )equal", re.I)


# --- a trace ---


class SizeIsComputed(Exception):
    """The function computes a size, and is traced where it cannot."""


class Noticing:
    """Stops a trace where it would compute a size.

    Attributes:
        noticed: Whether it has stopped one. User code may have caught the error.
    """

    def __init__(self) -> None:
        self.noticed = False

    def nonzero(self, *_: Any, **__: Any) -> Any:
        """Raise `SizeIsComputed`."""
        self.noticed = True
        raise SizeIsComputed

    def ended(self, trace: Any) -> None:
        """Nothing is known of a trace."""

    refuse = cut = first = size = position = extend = nonzero

    def sizing(self, scope: Any, sizes: dict[str, int], taken: Set[str]) -> Noticing | Sizing:
        """What makes the sizes of the next trace: this, until it has stopped one."""
        if not self.noticed:
            return self
        from bucketjit._tracing.computed.sizing import Sizing

        return Sizing(scope, sizes, taken)

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which traces of this thread stop."""
        with as_open(self):
            yield


def meeting_of_sizes(error: Exception, sizing: Noticing | Sizing | None) -> TraceRefused | None:
    """The refusal of arrays of different computed sizes that meet, in an addition, say."""
    text = text_of(error)
    if isinstance(sizing, Noticing | None) or isinstance(error, MaskingError):
        return None
    shapes = {f"({', '.join(shape)})" for shape in shapes_in(text)}
    met = [v for v in sizing.computed if re.search(rf"\b{v}\b", " ".join(shapes))]
    if not met or len(shapes) < 2 or not _MISMATCH.search(text):
        return None
    sizes = (sizing.computed[v] for v in met)
    sides = ", and ".join(
        f"some rows of {size.bound}{f', computed at {size.line}' if size.line else ''}"
        for size in sizes
    )
    whole = "compute on whole arrays, by jnp.where(mask, x, 0)"
    if len(met) == 1:
        what, remedy = f"an array of a computed size meets one of another size: {sides}", whole
    else:
        what = f"arrays of different computed sizes meet: {sides}; select both by one mask"
        remedy = f"or {whole}"
    code, line = raising_code(error), raising_line(error)
    return TraceRefused(f"{f'{code}: ' if code else ''}{what}{in_brackets(line)}", remedy, error)


def counts_of_trace(sizing: Sizing, outs: Sequence[Any], trace: object) -> dict[str, Any]:
    """The counts that a trace can return after its results, int32 scalars by variable."""
    counts: dict[str, Any] = {}
    of_outs = variables_in(d for x in outs for d in getattr(x, "shape", ()))
    numbers = sizing.numbers_in(trace)
    for variable, dim in sizing.dims.items():
        if variable in numbers:
            counts[variable] = numbers[variable]
        elif variable in of_outs and is_symbolic(dim):
            counts[variable] = dim.dimension_as_value()
    return counts


def always_holds(guard: Guard, computed: Mapping[str, Computed]) -> bool:
    """Whether a guard follows from the bounds of computed sizes: ``n - (size_1 - 1) >= 0``."""
    most_of = tuple((v, f"({size.bound}) + 1") for v, size in computed.items())
    above, below = f"({guard.left}) - ({guard.right})", f"({guard.right}) - ({guard.left})"
    texts = {">=": [above], "<=": [below], "!=": [f"{above} - 1", f"{below} - 1"]}
    return any(is_never_negative(text, most_of) for text in texts.get(guard.op, ()))


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
    for eqn in jaxprs.all_equations(jaxpr):
        if jaxprs.name_of(eqn) in jaxprs.CALLS - _STAGED:
            continue
        for body in jaxprs.bodies(eqn):
            returned = variables_in(d for v in body.outvars for d in jaxprs.shape_of(v))
            if returned & _defined_by(jaxprs.all_equations(body)):
                line = source_line(eqn, jaxprs.equations_around(jaxpr, eqn))
                raise TraceRefused(
                    f"{eqn.primitive.name}: it returns an array, or needs one for a derivative, "
                    f"whose size is computed inside of it{in_brackets(line)}",
                    _REMEDY,
                )


def with_sizes_alive(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr without dead code, but with the equations that make the sizes it mentions.

    A size can be read without the array that has it: ``x.sum() / x[x > 0].shape[0]``.
    """
    kept: list[Any] = []
    while True:
        more = jaxprs.without_dead_code(_returning(jaxpr, [*jaxpr.outvars, *kept]))
        living = _returning(more, more.outvars[: len(jaxpr.outvars)])
        every, alive = (_defined_by(jaxprs.all_equations(of)) for of in (jaxpr, living))
        lacking = (_mentioned(living) & every) - alive
        if not lacking:
            return living
        kept += [e.outvars[0] for e in jaxpr.eqns if _defined_by([e]) & lacking]
        if not lacking <= _defined_by(jaxpr.eqns):
            return jaxpr  # one of a program inside: nothing is removed


def _returning(jaxpr: Jaxpr, outvars: Sequence[Any]) -> Jaxpr:
    consts = jaxprs.open_jaxpr(jaxpr)[1]
    return jaxprs.rebuilt_jaxpr(jaxpr, jaxpr.constvars, consts, jaxpr.invars, outvars, jaxpr.eqns)


def _defined_by(eqns: Iterable[Any]) -> set[str]:
    return {eqn.params["variable"] for eqn in eqns if makes_size(eqn)}


def _mentioned(jaxpr: Jaxpr) -> set[str]:
    """The variables in the shapes and parameters of an open jaxpr, at any depth."""
    sizes: list[Any] = []
    for eqn in jaxprs.all_equations(jaxpr):
        sizes += [d for v in (*eqn.invars, *eqn.outvars) for d in jaxprs.shape_of(v)]
        sizes += jax.tree_util.tree_leaves(list(eqn.params.values()), is_leaf=is_symbolic)
    return variables_in(sizes)


def with_counts(
    jaxpr: Jaxpr, results: int, sizing: Sizing, counts: Sequence[str], guards: Sequence[Guard]
) -> tuple[Jaxpr, tuple[Guard, ...], dict[str, Any]]:
    """A program that returns the counts which are needed, its guards, and what else it knows."""
    computed = sizing.computed.keys()
    asked = [g for g in guards if g.variables & computed and not always_holds(g, sizing.computed)]
    presumptions = [admitted(g, sizing) for g in asked]
    if None in presumptions:
        raise refused_decision(asked[presumptions.index(None)], None, "")
    presumed = tuple(dict.fromkeys(filter(None, presumptions)))
    checked = {v: size for v, size in sizing.computed.items() if size.is_checked}
    reshapes = unchecked_reshapes(jaxpr)
    decided = {v for g in presumed for v in g.variables}
    reshaped = variables_in(d for pair in reshapes for shape in pair for d in shape)
    inside = "computed in a loop, a branch or a function under jit"
    # A number of rows is compared with those that there are, which may be computed too.
    rows = {v for size in checked.values() for v in variables_of(size.bound)}
    wanted = (
        (decided, f"a decision depends on a size that is {inside}", _REMEDY),
        (reshaped, f"a reshape of a size that is {inside} cannot be checked", _REMEDY),
        ({*checked, *rows}, f"sized: a size that is {inside} cannot be checked", _SIZED_OUTSIDE),
    )
    needed = variables_in(d for v in jaxpr.outvars[:results] for d in jaxprs.shape_of(v)) & computed
    for names, why, remedy in wanted:
        if missing := (names & computed) - set(counts):
            raise TraceRefused(f"{why}{in_brackets(sizing.computed[min(missing)].line)}", remedy)
        needed |= names & computed
    kept = [v for v, name in zip(jaxpr.outvars[results:], counts, strict=True) if name in needed]
    jaxpr = _returning(jaxpr, [*jaxpr.outvars[:results], *kept])
    refuse_sizes_that_escape(jaxpr)
    if presumed and jaxpr.effects:
        raise TraceRefused(
            f"a decision depends on a computed size ({presumed[0]}), so the function may run "
            f"twice, and it has an effect: {jaxprs.first_effect(jaxpr)}",
            "leave out the effect, or the decision",
        )
    returned = tuple(v for v in counts if v in needed)
    more = {"computed": sizing.computed, "counts": returned, "presumed": presumed}
    return jaxpr, tuple(g for g in guards if not g.variables & computed), more


# --- a run ---


class NothingSelected(MaskingError):
    """A run has selected nothing, where its program is traced for an array that is not empty.

    Its results are wrong, and are dropped.
    """


class Selected(Protocol):
    """Learns what runs have selected; see `bucketjit._runtime.counters.Counters`."""

    def selected(self, program: Interface, rows: Mapping[str, tuple[int, int]]) -> None:
        """Count a run."""


def counts_of(
    program: Interface, sizes: Mapping[str, int], observer: Selected | None
) -> Callable[[Any], tuple[int, ...]]:
    """A function that waits for the computed sizes of a run, and checks them.

    The runs are of calls of equal sizes. Each different row of counts is checked once.
    """

    @functools.lru_cache(_KEPT)
    def checked(rows: tuple[int, ...]) -> Mapping[str, tuple[int, int]]:
        """For each count, the number of rows that were selected, and of those there are."""
        computed = {v: n + 1 for v, n in zip(program.counts, rows, strict=True)}
        every_size = {**sizes, **computed}
        for guard in program.presumed:
            if not guard.holds(every_size):
                origin = program.computed[min(guard.variables & program.computed.keys())]
                where = f" [{origin.line}]" if origin.line else ""
                raise NothingSelected(
                    f"a decision needs an array that is not empty ({guard}), and it is{where}",
                    "say what an empty array gives, as in x[mask].max(initial=0)",
                )
        bounds = _bounds(program, every_size)
        if program.computed_reshapes:
            program.check_reshapes(every_size)
        return {v: (computed[v] - 1, of) for v, of in bounds.items()}

    def wait(returned: Any) -> tuple[int, ...]:
        rows = tuple(np.asarray(returned).tolist())
        selected = checked(rows)
        if observer is not None:
            observer.selected(program, selected)
        return tuple([n + 1 for n in rows])

    return wait


def _bounds(program: Interface, sizes: Mapping[str, int]) -> dict[str, int]:
    """The number of rows that each count is chosen from, where it is known."""
    bounds = {}
    for variable in program.counts:
        origin = program.computed[variable]
        if not sizes.keys() >= set(variables_of(origin.bound)):
            continue
        rows = bounds[variable] = evaluate_text(origin.bound, sizes)
        n = sizes[variable] - 1
        if origin.is_checked and not 0 <= n <= rows:
            where = f" [{origin.line}]" if origin.line else ""
            raise ArgumentError(
                f"a size that the function computes is {n}{where}; it must be from 0 to {rows}"
            )
    return bounds


def finisher_of_counts(
    wait: Callable[[Any], tuple[int, ...]],
    finisher_at: Callable[[Sequence[int]], Change | None],
    later: Callable[[Callable[[], Sequence[int]]], Change | None] | None = None,
) -> Change:
    """Make the function that cuts the results of an executable which returns counts."""
    cached = functools.lru_cache(_KEPT)(finisher_at)

    def finish(pair: Any) -> Any:
        results, returned = pair
        if later is None:
            change = cached(wait(returned))
        else:  # results that have computed sizes share the answer of one run
            change = later(functools.cache(lambda: wait(returned)))
        return results if change is None else change(results)

    return finish
