"""Which programs and buckets a file needs to serve calls up to the sizes that were asked for."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from bucketjit._compile.argument_types import at_sizes
from bucketjit._events import shown
from bucketjit._raised import frames_inside, is_of_machine
from bucketjit._runtime.decisions import Because, Exact, Masked, Refused
from bucketjit._runtime.engine import Engine
from bucketjit._signature.resolved_call import ResolvedCall, variables_in
from bucketjit._signature.signer import SignedCall
from bucketjit._sizes.dynamic_axes import Tokens
from bucketjit._sizes.expressions import evaluate_text
from bucketjit._sizes.guards import Guard
from bucketjit._sizes.holding import holds, smallest_holding
from bucketjit._tracing.program import Program
from bucketjit.errors import ArtifactError, FallbackWarning, MaskingError, SpecError

BucketCall = tuple[Mapping[str, int], SignedCall, ResolvedCall]  # padded sizes, and a call of them
Found = dict[Program, list[BucketCall]]
Unmasked = dict[Hashable, tuple[MaskingError, SignedCall, ResolvedCall]]

_MOST_SIZES = 4096  # logical sizes that are looked at, beside those that were asked for
_MOST_PROGRAMS = 16
_TOO_MANY = MaskingError(
    f"the function does different things at different sizes, which take more than {_MOST_PROGRAMS} "
    "programs",
    "save functions for fewer sizes each",
)
_MOST_EDGES = 16  # of a guard
_MOST_COMPUTED = 64  # combinations of computed sizes


def buckets_of(
    engine: Engine, signed: SignedCall, tokens: Tokens, sizes: Sequence[Mapping[str, int]]
) -> Found:
    """The buckets of calls of some sizes, by program, each once.

    Smaller sizes may take another program, or a bucket that was not asked for: size 1, where JAX
    broadcasts, and sizes on the other side of a guard. These are added, so that the file serves
    every size up to the largest. So are programs for other computed sizes, where the function
    decides by them. A few sizes that are not masked have programs of their own.

    Warns:
        FallbackWarning: The file will not serve some of these sizes.
    """
    found: Found = {}
    for one in sizes:
        at = at_sizes(signed, tokens, one)
        call = engine.resolve(at)
        match engine.chosen(at, call):
            case Masked(program=Program() as program, bucket=bucket):
                _add(found, program, (dict(bucket), at, call))
            case Exact(Because.EMPTY):
                raise SpecError(f"sizes: one size at least is 1 or more, got {shown(call.sizes)}")
            case Exact(_, why):
                raise unmasked(why, f" at {shown(call.sizes)}")
            case Refused(error):
                raise error
    _add_smaller(engine, signed, tokens, found)
    _add_presumed(engine, found)
    return found


def unmasked(why: MaskingError, at: str = "") -> ArtifactError:
    """The error that calls are not masked."""
    remedy = f"; {why.remedy}" if why.remedy else ""
    return ArtifactError(
        f"calls{at} are not masked, so there is no bucket to save: {why.reason}{remedy}; "
        "export_dynamic exports a module of all sizes, which needs no mask"
    )


def _add(found: Found, program: Program, one: BucketCall) -> None:
    known = found.setdefault(program, [])
    if all(dict(bucket) != dict(one[0]) for bucket, _, _ in known):
        known.append(one)


def _add_smaller(engine: Engine, signed: SignedCall, tokens: Tokens, found: Found) -> None:
    """Add what sizes below the largest buckets need besides."""
    asked: dict[Tokens, list[Mapping[str, int]]] = {}
    for calls in found.values():
        for bucket, _, call in calls:
            asked.setdefault(call.tokens, []).append(bucket)
    unmasked: Unmasked = {}
    known = 0
    while known < len(found):  # the guards of a program lead to others
        known = len(found)
        for opened, buckets in asked.items():
            _add_programs(engine, signed, tokens, opened, found, buckets, unmasked)
    for key, (_, at, call) in list(unmasked.items())[: _MOST_PROGRAMS - len(found)]:
        try:
            with engine.lock:
                program = at.signature.program_of(call, at.shapes)
        except MaskingError:
            continue
        _add(found, program, (call.sizes, at, replace(call, program=program, refusal=None)))
        del unmasked[key]
    if unmasked:
        (why, at, call), count = next(iter(unmasked.values())), len(unmasked)
        more = f" and {count - 1} other sizes" if count > 1 else ""
        text = f"{engine.name}: the file will not serve {shown(call.sizes)}{more}: {why}"
        warnings.warn(text, FallbackWarning, stacklevel=frames_inside())


def _add_programs(
    engine: Engine,
    signed: SignedCall,
    tokens: Tokens,
    opened: Tokens,
    found: Found,
    asked: Sequence[Mapping[str, int]],
    unmasked: Unmasked,
) -> None:
    """Add what sizes beside the edges of buckets and guards need, and note what is not masked.

    The variables that are in `tokens`, and not in `opened`, are 0.
    """
    empty = dict.fromkeys(variables_in(tokens), 0)
    guards = [guard for program in _with_axes(opened, found) for guard in program.guards]
    for sizes in _sizes_below(asked, variables_in(opened), guards):
        own = _with_axes(opened, found)
        program = next((p for p in own if p.size_constants(sizes) is not None), None)
        if program is not None and any(holds(bucket, sizes) for bucket, _, _ in found[program]):
            continue
        try:
            at = at_sizes(signed, tokens, {**empty, **sizes})
            call = engine.resolve(at)
            decision = engine.chosen(at, call)
        except Exception as error:  # of the function, which does not take these sizes
            if is_of_machine(error):
                raise
            continue
        key = opened, *sizes.values()
        match decision:
            case Exact(_, why):
                unmasked[key] = why, at, call
            case Masked(program=Program() as program, bucket=bucket):
                if program not in found and len(found) == _MOST_PROGRAMS:
                    unmasked[key] = _TOO_MANY, at, call
                    continue
                unmasked.pop(key, None)
                _add(found, program, (dict(_smallest(asked, sizes, program) or bucket), at, call))


def _with_axes(opened: Tokens, found: Found) -> list[Program]:
    """The programs of calls that have these open axes."""
    return [program for program, calls in found.items() if calls[0][2].tokens == opened]


def _add_presumed(engine: Engine, found: Found) -> None:
    """Add the programs of calls that compute other sizes than a program presumes."""
    known = 0
    while known < len(found):  # the guards of a program lead to others
        known = len(found)
        for program, calls in list(found.items()):
            for one in list(calls) if program.presumed else ():
                for computed in _computed_sizes(program, one[2].sizes):
                    if len(found) < _MOST_PROGRAMS:
                        _add_for(engine, one, computed, found)


def _add_for(engine: Engine, one: BucketCall, computed: Mapping[str, int], found: Found) -> None:
    """Add the bucket of a call to the program that serves it if it computes these sizes."""
    bucket, at, call = one
    try:
        with engine.lock:
            other = at.signature.resolve_again(call, at.shapes, computed)
        decision = engine.chosen(at, other)
        if not isinstance(decision, Masked) or not isinstance(decision.program, Program):
            return
        wanted = bucket if decision.program.fits(bucket) else decision.bucket
        decision.program.padded_sizes(wanted)
    except Exception as error:  # of the function, which does not take these sizes
        if is_of_machine(error):
            raise
        return
    _add(found, decision.program, (dict(wanted), at, other))


def _computed_sizes(program: Program, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Values of the computed sizes of a call, beside the edges of what is presumed of them."""
    rows: list[dict[str, int]] = [{}]
    for variable, made in program.computed.items():
        longer: list[dict[str, int]] = []
        for row in rows:
            most = 1 + evaluate_text(made.bound, {**sizes, **row})
            edges = {most}
            if variable in program.counts:
                edges |= {1, 2, *_edges(variable, most, program.presumed)}
            longer += [{**row, variable: n} for n in sorted(edges) if n <= most]
        rows = longer[:_MOST_COMPUTED]
    for row in rows:
        yield {v: row[v] for v in program.counts}


def _sizes_below(
    asked: Sequence[Mapping[str, int]], variables: Sequence[str], guards: Sequence[Guard]
) -> Iterator[dict[str, int]]:
    """Logical sizes up to the largest buckets, the largest first.

    All of them, or if those are many the sizes beside the edges of buckets and guards.
    """
    largest = [max(bucket[v] for bucket in asked) for v in variables]
    each: list[Sequence[int]] = [range(n, 0, -1) for n in largest]
    if math.prod(largest) > _MOST_SIZES:
        each = [
            sorted(
                {
                    1,
                    2,
                    *(n for b in asked for n in (b[v], b[v] // 2 + 1)),
                    *_edges(v, most, guards),
                },
                reverse=True,
            )
            for v, most in zip(variables, largest, strict=True)
        ]
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
        try:
            held = {n: guard.holds({variable: n}) for n in looked_at}
        except KeyError:  # it depends on another variable
            continue
        flips = [pair for pair in itertools.pairwise(looked_at) if held[pair[0]] != held[pair[1]]]
        for low, high in flips[:_MOST_EDGES]:
            was = held[low]
            while high - low > 1:  # between sizes far from each other
                middle = (low + high) // 2
                is_low = guard.holds({variable: middle}) == was
                low, high = (middle, high) if is_low else (low, middle)
            edges.update((low, high))
    return edges


def _smallest(
    asked: Sequence[Mapping[str, int]], sizes: Mapping[str, int], program: Program
) -> Mapping[str, int] | None:
    """The smallest bucket among those asked for that holds some sizes of a program."""
    if program.unfitted:
        return None
    own = ({v: bucket[v] for v in sizes} for bucket in asked)
    return smallest_holding(filter(program.fits, own), sizes)
