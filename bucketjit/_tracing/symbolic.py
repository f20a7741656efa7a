"""Trace a function once with symbolic sizes, and collect the guards under which the trace holds.

User code may compare sizes (``if x.shape[0] > 4``), and symbolic sizes cannot answer::

    attempt 1   n > 4 raises InconclusiveDimensionOperation; the call has n = 7
    attempt 2   with the constraint n >= 5, n > 4 is True, and the trace succeeds
    program     guards (n >= 5,)

So the sizes of the call decide each such comparison. The answer becomes a constraint of the scope,
the function is traced again, and the constraint is kept as a guard of the program. A call whose
sizes break a guard gets another program.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr
from jax.tree_util import PyTreeDef

from bucketjit._ir import program
from bucketjit._ir.expressions import evaluate, variables_in
from bucketjit._ir.guards import Guard, decide, guards_instead, lower_bounds, parse_constraint
from bucketjit._ir.jax_patches import forgetful_jax
from bucketjit._ir.opaque import EqualityOfSizes, decisions_inside
from bucketjit._ir.program import Leaf, Program, TraceRefused
from bucketjit._jax.jaxprs import open_jaxpr, shape_of, without_dead_code
from bucketjit._jax.names import REMEDY_OF_VERSIONS, trouble_of_versions
from bucketjit._jax.patches.shapes import repeats_by_size
from bucketjit._jax.size_hooks import LengthIsInt
from bucketjit._jax.user_code import in_brackets, raising_code, raising_line, raising_text
from bucketjit._raised import first_line, handled_before, is_of_machine, text_of
from bucketjit._tracing.attempt import Attempt
from bucketjit._tracing.computed import sizes as computed_sizes
from bucketjit._tracing.computed.sizes import Noticing
from bucketjit._tracing.held_output import tree_holds_a_size
from bucketjit._tracing.merged_axes import keep_apart
from bucketjit._tracing.own_constants import own_constants
from bucketjit._tracing.size_floats import refuse_decisions
from bucketjit.errors import MaskingError

MAX_RETRACES = 24  # attempts of one trace, each of which adds a guard

# Messages about operations that Python's ints have, and symbolic sizes do not.
_OF_INTS = re.compile(r"size has no __r?(l|r)?(shift|and|or|xor|invert|abs|pos)__")

_INT = re.compile(r"Symbolic dimension '(.+?)' used in a context that requires a constant")


@forgetful_jax()
def trace(
    fn: Callable[..., Any],
    in_tree: PyTreeDef,
    leaves: Sequence[Leaf],
    sizes: Mapping[str, int],
    constraints: Sequence[str] = (),
) -> Program:
    """Trace ``fn`` with the symbolic sizes of ``leaves``."""
    noticing = Noticing()
    try:
        return _traced(fn, in_tree, leaves, dict(sizes), constraints, noticing)
    except TraceRefused as refusal:
        is_by_name = isinstance(refusal.cause, TraceRefused)
        refusal.computes_sizes = noticing.noticed or is_by_name
        raise


def _traced(
    fn: Callable[..., Any],
    in_tree: PyTreeDef,
    leaves: Sequence[Leaf],
    sizes: dict[str, int],
    constraints: Sequence[str],
    noticing: Noticing,
) -> Program:
    """See `trace`; the sizes get half of the rows for each computed size."""
    guards = list[Guard]()
    line, places = "", dict[Guard, str]()  # the line of the last decision, and of each guard
    handled = sys.exception()  # what the caller of this function is handling, if anything
    for _ in range(MAX_RETRACES):
        places |= {guard: line for guard in guards if guard not in places}
        try:
            attempt = Attempt(leaves, [*constraints, *map(str, guards)], sizes, noticing)
        except (ValueError, NotImplementedError) as error:
            if (instead := guards_instead(error, guards, sizes)) is None:
                raise _not_held(error, guards, line) from error
            guards = instead
            continue
        closed, failure = attempt.run(fn, in_tree)
        if noticing.noticed and attempt.sizing is noticing:
            continue
        if failure is not None:
            line = in_brackets(raising_line(failure))
        # User code may catch the error of a size, and return or raise an unrelated one. The error
        # of the size counts then.
        if attempt.raised and (closed is not None or (failure and is_of_machine(failure))):
            closed, failure = None, attempt.raised[0]
        # Equalities come before the failure: a wrong answer to one may have led to it.
        if equal := attempt.equalities():
            line = in_brackets(attempt.line)
            if (guard := computed_sizes.admitted(equal[0], attempt.sizing)) is None:
                raise computed_sizes.refused_decision(equal[0], failure, line)
            if guard in guards:  # JAX still answers False under this constraint
                raise _refusal(ValueError(f"cannot assume {guard}"))
            guards.append(guard)
            continue
        if closed is not None:
            guard = _guard_inside(closed, sizes, guards)
            if guard is None or guard in guards:
                return _program(closed, attempt, in_tree, constraints, guards, places)
            guards.append(guard)
            continue
        assert failure is not None
        if is_of_machine(failure) and not _stands_for_another(failure, handled):
            if attempt.texts:  # a text that holds a symbolic size may have led to it
                raise _size_in_text(attempt.texts[0]) from failure
            raise failure
        decision = decide(failure, sizes, guards)
        guard = computed_sizes.admitted(decision, attempt.sizing)
        if guard is None or guard in guards:
            raise _refusal(failure, attempt.sizing, decision) from failure
        guards.append(guard)
    raise TraceRefused(
        f"tracing needed more than {MAX_RETRACES} decisions about sizes{line}",
        "loop with jax.lax, or decide by fewer sizes there, or leave that axis static",
    )


def _not_held(error: Exception, guards: Sequence[Guard], line: str) -> TraceRefused:
    what = ", ".join(map(str, guards)) or "the spec"
    return TraceRefused(
        f"jax.export cannot hold the sizes to {what}: {error}{line}",
        "decide by other sizes, or by fewer, or leave the axis static",
    )


def _guard_inside(closed: Any, sizes: Mapping[str, int], guards: Sequence[Guard]) -> Guard | None:
    """A guard under which the implementation of a primitive of another library can be traced."""
    for failure in decisions_inside(open_jaxpr(closed)[0]):
        guard = decide(failure, sizes, guards)
        if isinstance(failure, EqualityOfSizes) and len(failure.args) == 2:
            left, right = failure.args
            if not variables_in([left, right]) <= sizes.keys():  # a size that is computed
                continue
            more = evaluate(left, sizes) - evaluate(right, sizes)
            op, limit = (">=", right + 1) if more > 0 else ("<=", right - 1)
            guard = Guard(str(left), *((op, str(limit)) if more else ("==", str(right))))
        if guard is not None:
            return guard
    return None


def _stands_for_another(error: Exception, handled: BaseException | None) -> bool:
    """Whether user code raised a plain ``RuntimeError`` while it handled an error of a size."""
    caught = handled_before(error)
    is_plain = type(error) is RuntimeError
    return is_plain and caught not in (None, handled) and not is_of_machine(caught)


def _size_in_text(line: str) -> TraceRefused:
    return TraceRefused(
        f"a size is made a text{in_brackets(line)}",
        "leave that axis static; to print it, use jax.debug.print",
    )


def _refusal(error: Exception, sizing: Any = None, decision: Guard | None = None) -> TraceRefused:
    """A refusal in words, with the line and the remedy that suit an error of tracing."""
    if met := computed_sizes.meeting_of_sizes(error, sizing):
        return met
    if decision is not None and computed_sizes.admitted(decision, sizing) is None:
        return computed_sizes.refused_decision(decision, error, in_brackets(raising_line(error)))
    message = first_line(error)
    code, text = raising_code(error), raising_text(error)
    line, remedy = in_brackets(raising_line(error)), COMPUTE
    if isinstance(error, MaskingError):
        line = "" if error.names_a_line else line
        return TraceRefused(f"{error.reason}{line}", error.remedy, error)
    as_int = _INT.search(text_of(error))
    loops = code.startswith((*_LOOPS, *_ITERATE) if as_int else _LOOPS)
    if repeats_by_size(error) or loops or f"range({code})" in text:
        reason = f"a Python loop or list is as long as an open axis: {text.rstrip(':')}{line}"
        return TraceRefused(reason, LOOP, error)
    if isinstance(error, LengthIsInt):
        code = code if code.startswith("len(") else "len(x)"
        size = f"{code[4:-1]}.shape[0]"
        what = f"{code} is always a Python int, where {size} stays symbolic"
        remedy = f"write {size} in place of {code}, or leave that axis static"
    else:
        if as_int:
            message = f"size {as_int[1]!r} is used as a Python int"
        elif "cannot be interpreted as an integer" in message and "_DimExpr" in message:
            message = "a symbolic size is used as a Python int"
        if _OF_INTS.search(message):
            remedy = "use +, -, *, //, % and comparisons of sizes, or leave that axis static"
        what = f"{f'{code}: ' if code else ''}{type(error).__name__}: {message}"
    reason = f"cannot trace with symbolic sizes: {what}{line}"
    if trouble := trouble_of_versions(error):
        reason, remedy = f"{reason}; {trouble}", f"{remedy}, or {REMEDY_OF_VERSIONS}"
    return TraceRefused(reason, remedy, error)


COMPUTE = "compute on the size with jax.numpy, or leave that axis static"

_LOOPS = ("range(", "list(", "enumerate(", "zip(")
# They loop over an array, but what they call may raise as well.
_ITERATE = ("sum(", "tuple(", "map(", "iter(", "next(", "sorted(", "max(", "min(")

LOOP = "loop with jax.lax.scan, map or fori_loop, or use jax.vmap, or leave that axis static"


def _program(
    closed: Any,
    attempt: Attempt,
    in_tree: PyTreeDef,
    constraints: Sequence[str],
    guards: Sequence[Guard],
    places: Mapping[Guard, str],
) -> Program:
    jaxpr, consts = open_jaxpr(closed)
    program.refuse_tracers(consts)
    jaxpr, consts = own_constants(jaxpr, consts)
    declared = [*map(parse_constraint, constraints), *guards]
    all_guards = tuple(dict.fromkeys([*declared, *attempt.assumed.values()]))
    more: dict[str, Any] = {}
    if not isinstance(attempt.sizing, Noticing):
        jaxpr, all_guards, more = computed_sizes.with_counts(
            jaxpr, attempt.out_tree.num_leaves, attempt.sizing, attempt.counts, all_guards
        )
    if attempt.texts:
        raise _size_in_text(attempt.texts[0])
    in_data = tree_holds_a_size(attempt.out_tree, in_tree)
    if in_data:  # None: the tree is compared with that of a concrete trace, see `may_hold_sizes`
        raise program.size_in_data()
    living = without_dead_code(jaxpr) if not more else computed_sizes.with_sizes_alive(jaxpr)
    refuse_decisions(living)
    return program_of(
        *(jaxpr, keep_apart(living, consts), attempt.out_tree),
        guards=all_guards,
        lower=lower_bounds(attempt.variables, declared),
        reshapes=program.unchecked_reshapes(jaxpr),
        may_hold_sizes=in_data is None,
        computes_sizes=not isinstance(attempt.sizing, Noticing),
        places=places,
        **more,
    )


def program_of(jaxpr: Jaxpr, kept: tuple[Any, Sequence[Any]], tree: Any, **more: Any) -> Program:
    """The program with the types of a jaxpr, and the body and constants that are kept of it."""
    outs: list[Any] = [v.aval for v in jaxpr.outvars[: tree.num_leaves]]
    body, consts = kept
    return Program(
        jaxpr=body,
        consts=tuple(consts),
        in_shapes=tuple(map(shape_of, jaxpr.invars)),
        out_shapes=tuple(tuple(a.shape) for a in outs),
        out_types=tuple((a.dtype, bool(getattr(a, "weak_type", False))) for a in outs),
        out_tree=tree,
        **more,
    )
