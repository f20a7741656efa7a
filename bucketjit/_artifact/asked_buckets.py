"""Which programs, buckets and constants a file needs to serve calls up to the sizes asked for.

A program of concrete traces is compared with a trace at the sizes of each call, and takes constants
such as ``math.sqrt(n)`` from it. Without the source nothing can be traced, so the file has a table
of them for all sizes of the saved buckets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from bucketjit._artifact.archive import as_bytes, name_of
from bucketjit._artifact.manifest import Axes, SizeTable
from bucketjit._compile.argument_types import at_sizes
from bucketjit._events import shown, warn
from bucketjit._ir.dynamic_axes import Tokens
from bucketjit._ir.expressions import Shape, holds, is_symbolic, smallest_holding
from bucketjit._ir.guards import Guard
from bucketjit._ir.interface import Interface, SizeConstants
from bucketjit._ir.program import Program
from bucketjit._raised import WithoutErrors
from bucketjit._runtime.decisions import Because, Decision, Masked, Unpadded
from bucketjit._runtime.engine import Engine
from bucketjit._stages.warmup import asked
from bucketjit._tracing.call import Call
from bucketjit._tracing.resolution import variables_in
from bucketjit.errors import ArtifactError, FallbackWarning, MaskingError, SpecError

BucketCall = tuple[Mapping[str, int], Call]  # padded sizes, and a call of them
Buckets = dict[Program, list[BucketCall]]

_MOST_SIZES = 4096  # logical sizes that are looked at, beside those that were asked for
_MOST_PROGRAMS = 16
_TOO_MANY = MaskingError(
    f"the function does different things at different sizes, which take more than {_MOST_PROGRAMS} "
    "programs",
    "save functions for fewer sizes each",
)
_MOST_EDGES = 16  # of a guard

# Of a table of constants.
_MOST_ROWS = 4096
_MOST_LOOKED_AT = 2**20
_MOST_BYTES = 64 * 2**20


def buckets_of(
    engine: Engine, call: Call, tokens: Tokens, sizes: Sequence[Mapping[str, int]]
) -> Buckets:
    """The buckets of calls of some sizes, by program, each once.

    Smaller sizes may take another program, or a bucket that was not asked for: size 1, where JAX
    broadcasts, and sizes on the other side of a guard. These are added, so that the file serves
    every size up to the largest. A few sizes that are not masked have programs of their own.

    Warns:
        FallbackWarning: The file will not serve some of these sizes.
    """
    search = _Search(engine, call, tokens)
    for logical in sizes:
        search.ask(logical)
    search.look_below()
    return search.buckets


def sizes_of(engine: Engine, call: Call, sizes: object) -> list[Mapping[str, int]]:
    """The logical sizes to save buckets for: those asked for, or those of the cache."""
    axes = call.signature.open_axes
    if sizes is None:
        compiled = [
            axes(call, entry.origin.shapes)[1]
            for key, entry in engine.cache.items()
            if isinstance(key[0], Interface)
            and entry.origin is not None
            and entry.origin.signature is call.signature
        ]
        if compiled:
            return list(compiled)
    logical = axes(call, call.shapes)[1]
    _, _, wanted = asked(engine, call, sizes)
    if not wanted:
        raise SpecError(f"save: sizes {sizes!r} name no size; give at least one")
    return [{**logical, **chosen} for chosen in wanted]


def unmasked(why: MaskingError, where: str = "") -> ArtifactError:
    """The error that calls are not masked."""
    remedy = f"; {why.remedy}" if why.remedy else ""
    return ArtifactError(
        f"calls{where} are not masked, so there is no bucket to save: {why.reason}{remedy}; "
        "export_dynamic exports a module of all sizes, which needs no mask"
    )


class _Search:
    """Finds the ``buckets`` of each program; see `buckets_of`."""

    def __init__(self, engine: Engine, call: Call, tokens: Tokens) -> None:
        self._engine, self._like, self._tokens = engine, call, tokens
        self.buckets: Buckets = {}
        self._unmasked: dict[Hashable, tuple[MaskingError, Call]] = {}

    def _decided(self, sizes: Mapping[str, int]) -> tuple[Call, Decision]:
        return self._engine.chosen(at_sizes(self._like, self._tokens, sizes))

    def _add(self, program: object, bucket: Mapping[str, int], call: Call) -> None:
        assert isinstance(program, Program)
        calls = self.buckets.setdefault(program, [])
        if dict(bucket) not in [padded for padded, _ in calls]:
            calls.append((dict(bucket), call))

    def ask(self, sizes: Mapping[str, int]) -> None:
        call, decision = self._decided(sizes)
        if isinstance(decision, Unpadded):
            if decision.because is Because.EMPTY:
                raise SpecError(f"sizes: one size at least is 1 or more, got {shown(call.sizes)}")
            raise unmasked(decision.why, f" at {shown(call.sizes)}")
        self._add(decision.program, decision.bucket, call)
        if fewer := decision.program.sizes_before(call.sizes, decision.bucket):
            call, decision = self._decided({**sizes, **fewer})
            if isinstance(decision, Masked):
                self._add(decision.program, decision.bucket, call)

    def look_below(self) -> None:
        """Add what sizes below the largest buckets need besides."""
        asked: dict[Tokens, list[Mapping[str, int]]] = {}
        for bucket, call in itertools.chain(*self.buckets.values()):
            asked.setdefault(call.tokens, []).append(bucket)
        count = 0
        while count < len(self.buckets):  # the guards of programs lead to others
            count = len(self.buckets)
            for opened, buckets in asked.items():
                guards = [guard for program in self._programs(opened) for guard in program.guards]
                for sizes in _sizes_below(buckets, variables_in(opened), guards):
                    self._look_at(opened, sizes, buckets)
        for key, (_, call) in list(self._unmasked.items()):
            if len(self.buckets) < _MOST_PROGRAMS:
                try:
                    with self._engine.lock:
                        program = call.signature.program_of(call, call.shapes)
                except MaskingError:
                    continue
                self._add(program, call.sizes, replace(call, program=program, refusal=None))
                del self._unmasked[key]
        if self._unmasked:
            (why, call), count = next(iter(self._unmasked.values())), len(self._unmasked)
            more = f" and {count - 1} other sizes" if count > 1 else ""
            text = f"{self._engine.name}: the file will not serve {shown(call.sizes)}{more}: {why}"
            warn(text, FallbackWarning)

    def _programs(self, opened: Tokens) -> list[Program]:
        """The programs of calls that have these open axes."""
        return [program for program, calls in self.buckets.items() if calls[0][1].tokens == opened]

    def _look_at(
        self, opened: Tokens, sizes: Mapping[str, int], asked: Sequence[Mapping[str, int]]
    ) -> None:
        """Add what some sizes need, or note that they are not masked; other variables are 0."""
        programs = (p for p in self._programs(opened) if p.size_constants(sizes) is not None)
        holder = next(programs, None)
        if holder is not None and any(holds(bucket, sizes) for bucket, _ in self.buckets[holder]):
            return
        empty, key = dict.fromkeys(variables_in(self._tokens), 0), (opened, *sizes.values())
        decision: Decision | None = None
        with WithoutErrors():  # of the function, which does not take sizes nobody asked for
            call, decision = self._decided({**empty, **sizes})
        if decision is None:
            return
        if isinstance(decision, Unpadded):
            self._unmasked[key] = decision.why, call
        elif decision.program not in self.buckets and len(self.buckets) == _MOST_PROGRAMS:
            self._unmasked[key] = _TOO_MANY, call
        else:
            self._unmasked.pop(key, None)
            program, bucket = decision.program, None
            if not program.unfitted:
                padded = ({v: bucket[v] for v in sizes} for bucket in asked)
                bucket = smallest_holding(filter(program.fits, padded), sizes)
            self._add(program, bucket or decision.bucket, call)


def _sizes_below(
    asked: Sequence[Mapping[str, int]], variables: Sequence[str], guards: Sequence[Guard]
) -> Iterator[dict[str, int]]:
    """Logical sizes up to the largest buckets, the largest first.

    All of them, or if those are many the sizes beside the edges of buckets and guards.
    """
    largest = {v: max(bucket[v] for bucket in asked) for v in variables}
    each: list[Sequence[int]] = [range(n, 0, -1) for n in largest.values()]
    if math.prod(largest.values()) > _MOST_SIZES:
        each = []
        for v, most in largest.items():
            beside = {n for bucket in asked for n in (bucket[v], bucket[v] // 2 + 1)}
            each.append(sorted({1, 2, *beside, *_edges(v, most, guards)}, reverse=True))
    for row in itertools.islice(itertools.product(*each), _MOST_SIZES):
        sizes = dict(zip(variables, row, strict=True))
        if any(holds(bucket, sizes) for bucket in asked):
            yield sizes


def _edges(variable: str, largest: int, guards: Sequence[Guard]) -> set[int]:
    """The sizes of a variable next to which a guard on it alone begins or ceases to hold."""
    looked_at = [*range(1, min(largest, _MOST_SIZES)), largest]
    if largest > _MOST_SIZES:
        looked_at[-1:] = np.geomspace(_MOST_SIZES, largest, 64).astype(int).tolist()
    edges: set[int] = set()
    for guard in guards:
        if guard.variables != {variable}:
            continue
        held = {n: guard.holds({variable: n}) for n in looked_at}
        flips = [pair for pair in itertools.pairwise(looked_at) if held[pair[0]] != held[pair[1]]]
        for low, high in flips[:_MOST_EDGES]:
            was = held[low]
            while high - low > 1:  # between sizes far from each other
                middle = (low + high) // 2
                is_low = guard.holds({variable: middle}) == was
                low, high = (middle, high) if is_low else (low, middle)
            edges.update((low, high))
    return edges


def table_of(
    program: Program, calls: Sequence[BucketCall], add: Callable[[str, bytes], str], where: str
) -> tuple[SizeTable, list[BucketCall]]:
    assert program.pairing is not None
    variables = [v for v in calls[0][1].variables if v not in program.unfitted]
    largest = {v: max(bucket[v] for bucket, _ in calls) for v in variables}
    every = itertools.product(*(range(1, largest[v] + 1) for v in variables))
    admitted = (row for row in every if program.admits(dict(zip(variables, row, strict=True))))
    count = math.prod(largest.values())
    tried = list(itertools.islice(admitted, _MOST_ROWS + 1)) if count < _MOST_LOOKED_AT else []
    if not 0 < len(tried) <= _MOST_ROWS:
        raise ArtifactError(
            f"the function is traced at concrete sizes ({program.pairing.why}), and the sizes up "
            f"to {shown(largest)} are too many to trace: at most {_MOST_ROWS}. Save smaller "
            "buckets, or compute on sizes with jax.numpy, such as jnp.sqrt(jnp.shape(x)[0])"
        )
    rows: list[tuple[int, ...]] = []
    tabulated: list[SizeConstants] = []
    taken = 0
    for row in tried:
        constants = program.size_constants(dict(zip(variables, row, strict=True)))
        if constants is None:  # another program serves these sizes
            continue
        taken += constants.nbytes
        if taken > _MOST_BYTES:
            raise ArtifactError(
                "the constants that Python computes from the sizes take more than "
                f"{_MOST_BYTES >> 20} MiB: save smaller buckets, or compute them with jax.numpy"
            )
        rows.append(row)
        tabulated.append(constants)
    members, dtypes = [], []
    for number in range(len(program.size_constant_shapes)):
        values = [np.asarray(constants.values[number]) for constants in tabulated]
        kinds = {value.dtype for value in values}
        if len(kinds) != 1:
            raise ArtifactError(
                "a constant that Python computes from the sizes is of another dtype at another "
                "size: give it one dtype"
            )
        raw = b"".join(bytes(as_bytes(value)) for value in values)
        members.append(add(f"{where}/size_constants/{number}.bin", raw))
        dtypes.append(name_of(kinds.pop()))
    table = SizeTable(
        axes=tuple(map(axes_of, program.size_constant_shapes)),
        dtypes=tuple(dtypes),
        unfitted=program.unfitted,
        rows=tuple(rows),
        extra=tuple(tuple(constants.sizes) for constants in tabulated),
        members=tuple(members),
    )
    return table, [_with_room(padded, call, variables, table) for padded, call in calls]


def _with_room(
    padded: Mapping[str, int], call: Call, variables: Sequence[str], table: SizeTable
) -> BucketCall:
    """A bucket that holds the largest unfitted sizes of all logical sizes in it."""
    room = dict(padded)
    for row, extra in zip(table.rows, table.extra, strict=True):
        if all(n <= padded[v] for v, n in zip(variables, row, strict=True)):
            room |= {v: max(room[v], n) for v, n in zip(table.unfitted, extra, strict=True)}
    return room, call


def axes_of(shape: Shape) -> Axes:
    """A shape as files have it."""
    return tuple(str(d) if is_symbolic(d) else int(d) for d in shape)
