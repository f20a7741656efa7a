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
- The host function of a callback with results, which looks up that of the trace of its call.
- Data that is no array in the tree of the results. The tree is then taken from the trace at the
  logical sizes of a call, not from the program.

The expressions are guesses, and no call trusts them. Before a program serves a call, the function
is traced at the logical sizes of that call. The skeleton, every size and every constant of this
trace must be those of the program at these sizes, and size constants, unfitted sizes and trees are
taken from it. So the masked run computes what the exact run computes, even if an expression fits by
coincidence. The cost is one trace for each logical size, and never a compile.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import cachetools
import jax
import numpy as np
from jax import export
from jax.extend.core import Jaxpr

from bucketjit._ir.expressions import bind_unique_names, evaluate_text, fit
from bucketjit._ir.guards import Guard, decide_even, parse_constraint
from bucketjit._ir.interface import SizeConstants
from bucketjit._ir.program import Program, TraceRefused
from bucketjit._jax.user_code import in_brackets, raising_line
from bucketjit._raised import in_one_line, is_of_machine, text_of
from bucketjit._tracing.concrete import Concrete, Sizes, Tracer, at_other_sizes
from bucketjit._tracing.held_output import same_tree
from bucketjit._tracing.merged_axes import keep_apart
from bucketjit._tracing.skeleton import Skeleton, is_key, recompose, same_constant
from bucketjit._tracing.symbolic import COMPUTE, program_of

_SAMPLES = 6  # traces that a program is made from, at most

_REMEMBERED = 1 << 26  # bytes of size constants that each program keeps

_TRIALS = 14  # sizes that are tried to get them: traces may fail, or have another skeleton


def pair(
    tracer: Tracer,
    sizes: Sizes,
    constraints: Sequence[str] = (),
    tried: Sequence[Sizes] = (),
    why: str = "",
) -> Program:
    """Make one program from traces at the sizes of a call and at sizes near them."""
    first = tracer.at(sizes)
    traces, samples = [first], [dict(sizes)]
    differences, failures = list[str](), list[Exception]()
    guards = [parse_constraint(c) for c in constraints]
    trials = (c for c in _candidates(sizes, tried) if all(g.holds(c) for g in guards))
    for candidate in itertools.islice(trials, _TRIALS):
        if candidate in samples:
            continue
        if len(samples) == _SAMPLES or _is_predicted(tracer, traces, samples):
            break
        trace = at_other_sizes(functools.partial(tracer.at, candidate), failures.append)
        if trace is None:
            continue
        if difference := _difference(first, trace):
            differences.append(difference)
        else:
            traces.append(trace)
            samples.append(candidate)
    if not _tells_apart(samples, tracer.variables):
        raised = [
            f"at others it raises {type(error).__name__}{in_brackets(raising_line(error))}"
            for error in failures
        ]
        why_not = [*differences, *raised, "none was tried"][0]
        raise TraceRefused(
            "traced at concrete sizes, the function does different things at different sizes "
            f"({why_not})",
            COMPUTE,
        )
    # JAX may refuse an axis that a mesh need not cut evenly. Each turn adds a constraint for one.
    texts = list(constraints)
    while True:
        try:
            return _merged(tracer, traces, samples, texts, why)
        except TraceRefused:
            raise
        except Exception as error:  # JAX refuses some symbolic size
            if is_of_machine(error):
                raise
            guards = list(map(parse_constraint, texts))
            evens = [decide_even(text_of(error), s, guards) for s in samples]
            if None in evens:
                raise TraceRefused(
                    f"traces at several sizes do not make one program: {in_one_line(error)}",
                    COMPUTE,
                ) from error
            texts.append(str(evens[0]))


def _difference(first: Concrete, trace: Concrete) -> str | None:
    if trace.out_tree.num_leaves != first.out_tree.num_leaves:
        return "it returns more arrays at one size than at another"
    if difference := first.skeleton.difference(trace.skeleton):
        return difference
    pairs = zip(first.skeleton.values, trace.skeleton.values, strict=True)
    for i, (a, b) in enumerate(pairs):
        if type(a) is not type(b) and not np.isscalar(a):
            line = first.skeleton.line_of_constant(i)
            return f"a constant of another type at another size{line}"
    return None


def _candidates(sizes: Sizes, samples: Sequence[Sizes]) -> Iterator[dict[str, int]]:
    """Sizes to trace at: each variable changed alone, and all changed in different proportions."""
    yield from map(dict, samples)
    # At size 1 JAX broadcasts with other equations, so the second round keeps sizes of 1.
    larger = sorted(v for v, n in sizes.items() if n > 1)
    for names in dict.fromkeys((tuple(sorted(sizes)), tuple(larger))):
        for i, name in enumerate(names):
            yield {**sizes, name: sizes[name] + 1 + i}
        yield {**sizes, **{v: sizes[v] * 2 + i for i, v in enumerate(names)}}
        for name in names:
            if sizes[name] > 2:
                yield {**sizes, name: sizes[name] - 1}
        for offset in (3, 4):
            yield {**sizes, **{v: sizes[v] + offset * (i + 1) + i for i, v in enumerate(names)}}
        for i, name in enumerate(names):  # multiples: every divisor of the size still divides it
            yield {**sizes, name: sizes[name] * (2 + i)}
        yield {**sizes, **{v: sizes[v] * (3 + i) for i, v in enumerate(names)}}


def _is_predicted(tracer: Tracer, traces: Sequence[Concrete], samples: Sequence[Sizes]) -> bool:
    """Whether expressions that fit all samples but the last give each size of the last one, too.

    A trace of a large program takes seconds, so no more are made then. Each variable has changed
    alone, and in the last sample all have: ``a * b`` is a line along each axis.
    """
    *earlier, last = samples
    every = set(tracer.variables)
    changed = [{v for v in every if sample[v] != samples[0][v]} for sample in samples]
    if changed[-1] != every or any({v} not in changed[:-1] for v in every):
        return False
    columns = list(dict.fromkeys(zip(*(t.skeleton.sizes for t in traces), strict=True)))
    labels, unfitted = _labels([column[:-1] for column in columns], tracer, earlier, ())
    return not unfitted and all(
        (label if isinstance(label, int) else evaluate_text(label, last)) == column[-1]
        for label, column in zip(labels, columns, strict=True)
    )


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


@dataclasses.dataclass(eq=False)
class Pairing:
    """Checks a program of concrete traces against the trace at the logical sizes of a call.

    Safe to use from several threads.

    Attributes:
        tracer: Traces the function at concrete sizes.
        skeleton: The parts and constants that every other trace must have, size constants aside.
        out_tree: The tree of the outputs that every other trace must have.
        samples: The sizes that the program was made from.
        labels: A size or an expression for each set of equal sizes of the skeleton.
        label_of_size: The position of its label, for each size of the skeleton.
        unfitted: For each unfitted size the position of its label, and what to take from it.
        numbers: For each constant, its number if it is a size constant.
        nests_by_size: Whether the tree of the outputs is taken from the trace of a call, too.
        why: Why the function is not traced with symbolic sizes.
    """

    tracer: Tracer
    skeleton: Skeleton
    out_tree: Any
    samples: Sequence[Sizes]
    labels: Sequence[int | str]
    label_of_size: np.ndarray
    unfitted: dict[str, tuple[int, int]]
    numbers: Sequence[int | None]
    nests_by_size: bool
    why: str

    def __post_init__(self) -> None:
        self.num_size_constants = sum(number is not None for number in self.numbers)
        self._remembered: Any = cachetools.LRUCache(_REMEMBERED, getsizeof=_bytes_of)
        self._lock = threading.Lock()

    def size_constants(self, sizes: Sizes) -> SizeConstants | None:
        """What the program needs from the trace at these logical sizes."""
        key = tuple(sizes[v] for v in self.tracer.variables)
        with self._lock:
            if key in self._remembered:
                return self._remembered[key]
        # Outside the lock: this traces, which takes long and runs user code.
        constants = self._traced_at(sizes)
        if _bytes_of(constants) <= _REMEMBERED:
            with self._lock:
                self._remembered[key] = constants
        return constants

    def unfitted_sizes(self, sizes: Sizes) -> dict[str, int] | None:
        """The unfitted sizes at the padded sizes of a bucket."""
        if not self.unfitted:
            return {}
        constants = at_other_sizes(lambda: self.size_constants(sizes))
        return None if constants is None else dict(zip(self.unfitted, constants.sizes, strict=True))

    def _traced_at(self, sizes: Sizes) -> SizeConstants | None:
        try:
            trace = self.tracer.at(sizes)
        except Exception as error:  # the exact run raises it again, to the user
            if is_of_machine(error):
                raise
            return None
        tree = trace.out_tree
        if not (self.nests_by_size or same_tree(tree, self.out_tree)):
            return None
        if trace.skeleton.difference(self.skeleton):
            return None
        traced = np.asarray(trace.skeleton.sizes, np.int64)
        unfitted = {
            name: int(traced[np.argmax(self.label_of_size == label)]) - offset
            for name, (label, offset) in self.unfitted.items()
        }
        if any(n < 1 for n in unfitted.values()):  # jax.export takes every variable to be 1 or more
            return None
        # Every size of the trace must be what the expression of its label gives.
        values = {**sizes, **unfitted}
        expected = [x if isinstance(x, int) else evaluate_text(x, values) for x in self.labels]
        if expected and (np.asarray(expected, np.int64)[self.label_of_size] != traced).any():
            return None
        constants = [*zip(self.skeleton.values, self.numbers, trace.skeleton.values, strict=True)]
        if not all(same_constant(kept, x) for kept, number, x in constants if number is None):
            return None
        return SizeConstants(
            tuple(unfitted.values()),
            tuple(np.asarray(x) for _, number, x in constants if number is not None),
            tree if self.nests_by_size else None,
            tuple(trace.skeleton.hosts),
        )

    def host_at(self, index: int, sizes: Sizes) -> Any:
        """A host function of the trace at the logical sizes of a call that is being served."""
        constants = self.size_constants({v: int(sizes[v]) for v in self.tracer.variables})
        return constants and constants.hosts[index]


def _bytes_of(size_constants: SizeConstants | None) -> int:
    return 1024 + (0 if size_constants is None else size_constants.nbytes)


def _merged(
    tracer: Tracer,
    traces: Sequence[Concrete],
    samples: Sequence[Sizes],
    constraints: Sequence[str],
    why: str,
) -> Program:
    first = traces[0]
    # A column is one size of the skeleton in every trace; equal columns share a label.
    number: dict[tuple[int, ...], int] = {}
    columns = zip(*(t.skeleton.sizes for t in traces), strict=True)
    label_of_size = np.asarray([number.setdefault(c, len(number)) for c in columns], np.intp)
    fixed = [v for v in tracer.variables if len({s[v] for s in samples}) == 1]
    labels, unfitted = _labels(list(number), tracer, samples, fixed)
    nests_by_size = not all(same_tree(t.out_tree, first.out_tree) for t in traces)
    numbers = _numbers_of_size_constants(traces)
    kept = zip(first.skeleton.values, numbers, strict=True)
    skeleton = Skeleton(
        first.skeleton.parts, values=[v if number is None else None for v, number in kept]
    )
    pairing = Pairing(
        *(tracer, skeleton, first.out_tree, samples, labels, label_of_size, unfitted, numbers),
        *(nests_by_size, why),
    )
    scope = export.SymbolicScope(tuple(constraints))
    texts = ", ".join(map(str, (*labels, tracer.variables[0])))
    *dims, size = export.symbolic_shape(texts, scope=scope)
    jaxpr, consts, size_constant_shapes = recompose(
        *(first.jaxpr, first.consts, [dims[i] for i in label_of_size], numbers),
        *(size, pairing.host_at),
    )
    return program_of(
        *(jaxpr, _with_axes_apart(jaxpr, consts)),
        jax.tree.structure((0,) * len(jaxpr.outvars)) if nests_by_size else first.out_tree,
        guards=(
            *map(parse_constraint, constraints),
            *(Guard(v, "==", str(samples[0][v])) for v in fixed),
        ),
        lower={v: 1 for v in tracer.variables},
        unfitted=tuple(unfitted),
        size_constant_shapes=size_constant_shapes,
        pairing=pairing,
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
) -> tuple[list[int | str], dict[str, tuple[int, int]]]:
    """An expression of the dimension variables for each column of sizes; see `Pairing.unfitted`."""
    declared = {tuple(evaluate_text(t, s) for s in samples): t for t in tracer.tokens}
    varying = [{v: n for v, n in s.items() if v not in fixed} for s in samples]
    labels: list[int | str] = []
    unfitted: dict[str, tuple[int, int]] = {}
    for column in columns:
        label = declared.get(column) if len(set(column)) > 1 else column[0]
        if label is None:
            label = fit(column, varying)
        if label is None:
            name = bind_unique_names("found", {*tracer.variables, *unfitted})
            offset = min(0, min(column) - 1)  # jax.export takes a variable to be 1 or more
            unfitted[name] = len(labels), offset
            label = f"{name} - {-offset}" if offset else name
        labels.append(label)
    return labels, unfitted


def _numbers_of_size_constants(traces: Sequence[Concrete]) -> list[int | None]:
    """For each constant, its position among those that differ between traces, or None."""
    numbers: list[int | None] = []
    for i, values in enumerate(zip(*(t.skeleton.values for t in traces), strict=True)):
        same = all(same_constant(values[0], v) for v in values[1:])
        numbers.append(None if same else sum(number is not None for number in numbers))
        if not same and any(map(is_key, values)):
            raise TraceRefused(
                "a random key in the program depends on a size"
                + traces[0].skeleton.line_of_constant(i),
                "pass it as an argument, or use jax.random.fold_in with the size",
            )
    return numbers
