"""Which programs and buckets a file needs to serve calls up to the sizes that were asked for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from bucketjit._compile.argument_types import at_sizes
from bucketjit._events import shown
from bucketjit._raised import is_of_machine
from bucketjit._runtime.decisions import Because, Chunked, Exact, Masked, Refused
from bucketjit._runtime.engine import Engine
from bucketjit._signature.resolved_call import ResolvedCall, variables_in
from bucketjit._signature.signer import SignedCall
from bucketjit._sizes.dynamic_axes import Tokens
from bucketjit._sizes.expressions import evaluate_text
from bucketjit._sizes.guards import Guard
from bucketjit._sizes.holding import holds, smallest_holding
from bucketjit._tracing.program import Program
from bucketjit.errors import ArtifactError, MaskingError, SpecError

BucketCall = tuple[Mapping[str, int], SignedCall, ResolvedCall]  # padded sizes, and a call of them
Found = dict[Program, list[BucketCall]]

_MOST_SIZES = 4096  # logical sizes that are looked at, beside those that were asked for
_MOST_PROGRAMS = 16
_MOST_EDGES = 16  # of a guard
_MOST_COMPUTED = 64  # combinations of computed sizes


def buckets_of(
    engine: Engine, signed: SignedCall, tokens: Tokens, sizes: Sequence[Mapping[str, int]]
) -> Found:
    """The buckets of calls of some sizes, by program, each once.

    Smaller sizes may take another program, or a bucket that was not asked for: size 1, where JAX
    broadcasts, and sizes on the other side of a guard. These are added, so that the file serves
    every size up to the largest. So are programs for other computed sizes, where the function
    decides by them.

    Args:
        engine: Serves the calls.
        signed: An example of them.
        tokens: Its token for each axis of each leaf.
        sizes: The sizes that were asked for, of all variables.

    Returns:
        The buckets of each program.

    Raises:
        ArtifactError: A call of these sizes is not masked.
        SpecError: All sizes of a call are 0.
    """
    found: Found = {}
    for one in sizes:
        at = at_sizes(signed, tokens, one)
        call = engine.resolve(at)
        match engine.decide(at, call):
            case Masked(program=Program() as program, bucket=bucket):
                _add(found, program, (dict(bucket), at, call))
            case Exact(Because.EMPTY):
                raise SpecError(f"sizes: one size at least is 1 or more, got {shown(call.sizes)}")
            case Exact(_, why):
                raise unmasked(why, f" at {shown(call.sizes)}")
            case Chunked():
                raise ArtifactError(
                    f"a call with {shown(call.sizes)} is split into chunks, and chunks cannot be "
                    "saved: give sizes up to the largest bucket"
                )
            case Refused(error):
                raise error
    _add_smaller(engine, signed, tokens, found)
    _add_presumed(engine, found)
    return found


def unmasked(why: MaskingError, at: str = "") -> ArtifactError:
    """The error that calls are not masked.

    Args:
        why: Why not.
        at: At which sizes, in words.
    """
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
    known = 0
    while known < len(found):  # the guards of a program lead to others
        known = len(found)
        for opened, buckets in asked.items():
            _add_programs(engine, signed, tokens, opened, found, buckets)


def _add_programs(
    engine: Engine,
    signed: SignedCall,
    tokens: Tokens,
    opened: Tokens,
    found: Found,
    asked: Sequence[Mapping[str, int]],
) -> None:
    """Add what sizes beside the edges of buckets and guards need.

    The variables that are in `tokens`, and not in `opened`, are 0.
    """
    empty = dict.fromkeys(variables_in(tokens), 0)
    guards = [guard for program in _with_axes(opened, found) for guard in program.guards]
    for sizes in _sizes_below(asked, variables_in(opened), guards):
        own = _with_axes(opened, found)
        program = next((p for p in own if p.size_constants(sizes) is not None), None)
        if program is not None and any(holds(bucket, sizes) for bucket, _, _ in found[program]):
            continue
        if program is None and len(found) == _MOST_PROGRAMS:
            continue
        try:
            at = at_sizes(signed, tokens, {**empty, **sizes})
            call = engine.resolve(at)
            decision = engine.decide(at, call)
        except Exception as error:  # of the function, which does not take these sizes
            if is_of_machine(error):
                raise
            continue
        if isinstance(decision, Masked) and isinstance(decision.program, Program):
            bucket = _smallest(asked, sizes, decision.program) or decision.bucket
            _add(found, decision.program, (dict(bucket), at, call))


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
        decision = engine.decide(at, other)
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
    each = [list(range(n, 0, -1)) for n in largest]
    if math.prod(map(len, each)) > _MOST_SIZES:
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
    edges: set[int] = set()
    for guard in guards:
        try:
            held = [guard.holds({variable: n}) for n in range(1, largest + 1)]
        except KeyError:  # it depends on another variable
            continue
        flips = [n for n, (one, other) in enumerate(itertools.pairwise(held), 1) if one != other]
        edges.update(*((n, n + 1) for n in flips[:_MOST_EDGES]))
    return edges


def _smallest(
    asked: Sequence[Mapping[str, int]], sizes: Mapping[str, int], program: Program
) -> Mapping[str, int] | None:
    """The smallest bucket among those asked for that holds some sizes of a program."""
    if program.unfitted:
        return None
    own = ({v: bucket[v] for v in sizes} for bucket in asked)
    return smallest_holding(filter(program.fits, own), sizes)
