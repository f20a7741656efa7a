"""Make a program from traces at several concrete sizes, where symbolic sizes are refused.

Some code turns a size into a Python number: ``math.sqrt(n)``, ``np.arange(n)``, ``int(n)``. It
cannot be traced with symbolic sizes, but it can be traced at any concrete sizes::

    n = 4    b:f32[8] = pad a        c:f32[8] = mul b 2.0
    n = 5    b:f32[10] = pad a       c:f32[10] = mul b 2.236...
    program  b:f32[2*n] = pad a      c:f32[2*n] = mul b <size constant 0>

Traces at several sizes make one program if their skeletons are equal (see
`bucketjit._tracing.skeleton`). What may differ between them:

- A size. It becomes an expression of the dimension variables. If no expression fits, it becomes an
  *unfitted size*: an additional dimension variable.
- A constant. It becomes a *size constant*: an input of the executable.
- Data that is no array in the tree of the results. The tree is then taken from the trace at the
  logical sizes of a call, not from the program.

The expressions are guesses, and no call trusts them. Before a program serves a call, the function
is traced at the logical sizes of that call. The skeleton, every size and every constant of this
trace must be those of the program at these sizes, and size constants, unfitted sizes and trees are
taken from it. So the masked run computes what the exact run computes, even if an expression fits by
coincidence. The cost is one trace for each logical size, and never a compile.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from jax.extend.core import Jaxpr

from bucketjit._ir.expressions import bind_unique_names, evaluate_text
from bucketjit._ir.fit import fit
from bucketjit._ir.guards import Guard, decide_even, parse_constraint
from bucketjit._ir.host_functions import Hosts
from bucketjit._ir.program import Program, TraceRefused
from bucketjit._jax.user_code import raising_line
from bucketjit._raised import in_one_line, is_of_machine
from bucketjit._tracing.concrete import Concrete, Sizes, Tracer, at_other_sizes
from bucketjit._tracing.merged_axes import keep_apart
from bucketjit._tracing.output_trees import flat, same_tree
from bucketjit._tracing.paired import Pairing
from bucketjit._tracing.recompose import recompose
from bucketjit._tracing.skeleton import Skeleton, same_constant
from bucketjit._tracing.symbolic import COMPUTE

_SAMPLES = 6  # traces that a program is made from, at most

_TRIALS = 14  # sizes that are tried to get them: traces may fail, or have another skeleton


def _failure_at_others(failures: Sequence[Exception]) -> str:
    """The first error that the function raised at other sizes, and its line, in words."""
    if not failures:
        return "none was tried"
    line = raising_line(failures[0])
    told = f"at others it raises {type(failures[0]).__name__}"
    return f"{told} [{line}]" if line else told


def pair(
    tracer: Tracer,
    sizes: Sizes,
    constraints: Sequence[str] = (),
    others: Sequence[Sizes] = (),
    why: str = "",
) -> Program:
    """Make one program from traces at the sizes of a call and at sizes near them."""
    first = tracer.at(sizes)
    traces, samples = [first], [dict(sizes)]
    difference, failures = None, list[Exception]()
    guards = [parse_constraint(c) for c in constraints]
    trials = (c for c in _candidates(sizes, others) if all(g.holds(c) for g in guards))
    for candidate in itertools.islice(trials, _TRIALS):
        if len(samples) == _SAMPLES:
            break
        if candidate in samples:
            continue
        trace = at_other_sizes(functools.partial(tracer.at, candidate), failures.append)
        if trace is None:
            continue
        if trace.out_tree.num_leaves != first.out_tree.num_leaves:
            difference = difference or "it returns more arrays at one size than at another"
        elif differs := first.skeleton.difference(trace.skeleton):
            difference = difference or differs
        elif (other := _of_another_type(first.skeleton, trace.skeleton)) is not None:
            line = first.skeleton.line_of_constant(other)
            difference = difference or f"a constant of another type at another size{line}"
        else:
            traces.append(trace)
            samples.append(candidate)
    if not _tells_apart(samples, tracer.variables):
        raise TraceRefused(
            "traced at concrete sizes, the function does different things at different sizes "
            f"({difference or _failure_at_others(failures)})",
            COMPUTE,
        )
    # JAX may refuse an axis that a mesh need not cut evenly. Each turn adds a constraint for one.
    held = list(constraints)
    while True:
        try:
            return _merged(tracer, traces, samples, held, why)
        except TraceRefused:
            raise
        except Exception as error:  # JAX refuses some symbolic size
            if is_of_machine(error):
                raise
            known = [parse_constraint(c) for c in held]
            evens = [decide_even(str(error), s, known) for s in samples]
            if None in evens:
                raise TraceRefused(
                    f"traces at several sizes do not make one program: {in_one_line(error)}",
                    COMPUTE,
                ) from error
            held.append(str(evens[0]))


def _of_another_type(one: Skeleton, other: Skeleton) -> int | None:
    """The position of the first constant whose type differs between two traces; None if none."""
    pairs = enumerate(zip(one.values, other.values, strict=True))
    return next((i for i, (v, w) in pairs if type(v) is not type(w) and not np.isscalar(v)), None)


def _candidates(sizes: Sizes, others: Sequence[Sizes]) -> Iterator[dict[str, int]]:
    """Sizes to trace at: each variable changed alone, and all changed in different proportions."""
    for other in others:
        yield dict(other)
    # At size 1 JAX broadcasts with other equations, so the second round keeps sizes of 1.
    larger = sorted(v for v, n in sizes.items() if n > 1)
    for names in dict.fromkeys((tuple(sorted(sizes)), tuple(larger))):
        for i, name in enumerate(names):
            yield {**sizes, name: sizes[name] + 1 + i}
            if sizes[name] > 2:
                yield {**sizes, name: sizes[name] - 1}
        for offset in (3, 4):
            yield {**sizes, **{v: sizes[v] + offset * (i + 1) + i for i, v in enumerate(names)}}
        for i, name in enumerate(names):  # multiples: every divisor of the size still divides it
            yield {**sizes, name: sizes[name] * (2 + i)}
        yield {**sizes, **{v: sizes[v] * (3 + i) for i, v in enumerate(names)}}


def _tells_apart(samples: Sequence[Sizes], variables: Sequence[str]) -> bool:
    """Whether the samples show which size comes from which variable.

    True if some variables vary, and no two of them have equal sizes in every sample; or if no
    variable varies and all of them are 1. A variable that does not vary keeps its size in every
    call that the program serves: a Python loop over the positions of a sequence does different
    things at each length, but the same for each batch size.
    """
    columns = [tuple(s[v] for s in samples) for v in variables]
    varying = [c for c in columns if len(set(c)) > 1]
    if not varying:
        return all(c[0] == 1 for c in columns)
    return len(set(varying)) == len(varying)


def _merged(
    tracer: Tracer,
    traces: Sequence[Concrete],
    samples: Sequence[Sizes],
    constraints: Sequence[str],
    why: str,
) -> Program:
    """One program from concrete traces with equal skeletons."""
    first = traces[0]
    # A column is one size of the skeleton in every trace; equal columns share a label.
    number: dict[tuple[int, ...], int] = {}
    columns = zip(*(t.skeleton.sizes for t in traces), strict=True)
    label_of_size = [number.setdefault(column, len(number)) for column in columns]
    fixed = [v for v in tracer.variables if len({s[v] for s in samples}) == 1]
    labels, found = _labels(list(number), tracer, samples, fixed)
    size_constants = _positions_of_size_constants(traces)
    nests_by_size = not all(same_tree(t.out_tree, first.out_tree) for t in traces)
    hosts = Hosts()
    scope = export.SymbolicScope(tuple(constraints))
    dims = [x if isinstance(x, int) else _dimension(x, scope) for x in labels]
    jaxpr, consts, size_constant_shapes = recompose(
        first.jaxpr,
        first.consts,
        [dims[i] for i in label_of_size],
        size_constants,
        _dimension(tracer.variables[0], scope),
        hosts,
    )
    out_avals = [v.aval for v in jaxpr.outvars]
    in_shapes = tuple(tuple(v.aval.shape) for v in jaxpr.invars)
    jaxpr, consts = _with_axes_apart(jaxpr, consts)
    return Program(
        jaxpr=jaxpr,
        consts=tuple(consts),
        in_shapes=in_shapes,
        out_shapes=tuple(tuple(a.shape) for a in out_avals),
        out_types=tuple((a.dtype, bool(getattr(a, "weak_type", False))) for a in out_avals),
        out_tree=flat(len(out_avals)) if nests_by_size else first.out_tree,
        guards=(
            *map(parse_constraint, constraints),
            *(Guard(v, "==", str(samples[0][v])) for v in fixed),
        ),
        lower={v: 1 for v in tracer.variables},
        unfitted=tuple(found),
        size_constant_shapes=size_constant_shapes,
        pairing=Pairing(
            *(
                tracer,
                first,
                samples,
                labels,
                found,
                label_of_size,
                size_constants,
                hosts,
                nests_by_size,
            ),
            why,
        ),
    )


def _with_axes_apart(jaxpr: Jaxpr, consts: Sequence[Any]) -> tuple[Jaxpr, Sequence[Any]]:
    """The program with merged axes kept apart, or as it is where JAX does not trace it so.

    JAX does not trace every symbolic program that can be written down.
    """
    try:
        return keep_apart(jaxpr, consts)
    except Exception as error:
        if is_of_machine(error):
            raise
        return jaxpr, consts


def _labels(
    columns: Sequence[tuple[int, ...]],
    tracer: Tracer,
    samples: Sequence[Sizes],
    fixed: Sequence[str],
) -> tuple[list[int | str], dict[str, int]]:
    """An expression of the dimension variables for each column of sizes."""
    declared = {tuple(evaluate_text(t, s) for s in samples): t for t in tracer.tokens}
    varying = [{v: n for v, n in s.items() if v not in fixed} for s in samples]
    labels: list[int | str] = []
    found: dict[str, int] = {}
    for column in columns:
        label = declared.get(column) if len(set(column)) > 1 else column[0]
        if label is None:
            label = fit(column, varying)
        if label is None:
            name = bind_unique_names("found", {*tracer.variables, *found})
            found[name] = min(0, min(column) - 1)  # jax.export takes a variable to be 1 or more
            label = f"{name} - {-found[name]}" if found[name] else name
        labels.append(label)
    return labels, found


def _positions_of_size_constants(traces: Sequence[Concrete]) -> list[int | None]:
    """For each constant, its position among those that differ between traces, or None."""
    size_constants: list[int | None] = []
    for i, values in enumerate(zip(*(t.skeleton.values for t in traces), strict=True)):
        same = all(same_constant(values[0], v) for v in values[1:])
        size_constants.append(None if same else sum(index is not None for index in size_constants))
        if not same and not _can_be_given(values):
            raise TraceRefused(
                "a random key in the program depends on a size"
                + traces[0].skeleton.line_of_constant(i),
                "pass it as an argument, or use jax.random.fold_in with the size",
            )
    return size_constants


def _can_be_given(values: Sequence[Any]) -> bool:
    """Whether these constants can be inputs of an executable: random keys cannot."""
    dtypes = [getattr(v, "dtype", None) for v in values]
    return not any(d is not None and jax.dtypes.issubdtype(d, jax.dtypes.extended) for d in dtypes)


def _dimension(text: str, scope: export.SymbolicScope) -> Any:
    return export.symbolic_shape(text, scope=scope)[0]
