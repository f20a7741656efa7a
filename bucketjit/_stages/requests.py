"""Which sizes a warm-up is for, and what to compile for calls of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import reprlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bucketjit import strategies
from bucketjit._compile.argument_types import at_sizes
from bucketjit._compile.requests import CompileRequest
from bucketjit._compile.rows import Rows
from bucketjit._config import Fallback, is_int_from
from bucketjit._ir.dynamic_axes import Tokens
from bucketjit._runtime.decisions import Because, Masked, Unpadded
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.rows.batchable import why_not_batched
from bucketjit._tracing.call import Call
from bucketjit._tracing.resolution import Resolution
from bucketjit.errors import FallbackError, SpecError
from bucketjit.strategies.boundaries import MOST_LISTED

_LOOKED_AT_EACH = 4096  # combinations that are not thinned; looking up the bucket of one is 0.1 ms
_MOST_SIZES = 1 << 22  # sizes of one variable
_MOST_DICTS = 1 << 20  # dicts of a list, or of any other iterable

BucketOf = Callable[[str, int], Hashable]


def combinations(
    sizes: Any, variables: Sequence[str], own: Mapping[str, int], bucket_of: BucketOf
) -> list[dict[str, int]]:
    """The combinations of sizes that a warm-up is for.

    Too many combinations are thinned: of the sizes in one bucket of a variable, only the smallest
    and the largest are kept.
    """
    if sizes is None:
        return [dict(own)]
    if _is_strategy(sizes):
        if len(variables) != 1:
            raise SpecError(
                f"sizes: {sizes!r} is for sizes of one dimension, and these arguments have "
                f"{_listed(variables)}; give a dict of each to its sizes"
            )
        sizes = {variables[0]: sizes}
    if isinstance(sizes, Mapping):
        check_names(sizes, variables)
        each = {v: _sizes_of(v, given) for v, given in sizes.items()}
        if _count(each) > _LOOKED_AT_EACH:
            each = {v: _ends(ns, functools.partial(bucket_of, v)) for v, ns in each.items()}
        if (count := _count(each)) > MOST_LISTED:
            raise SpecError(
                f"sizes: {count} combinations of sizes, those in one bucket not counted; give "
                "those that occur as a list of dicts"
            )
        return [dict(zip(each, c, strict=True)) for c in itertools.product(*each.values())]
    if not isinstance(sizes, Iterable) or isinstance(sizes, str):
        v = (*variables, "batch")[0]
        raise SpecError(
            f"sizes must be a dict such as {{{v!r}: range(1, 65)}}, a list of dicts, or "
            f"a strategy, got {reprlib.repr(sizes)}"
        )
    found: dict[Hashable, dict[str, int]] = {}  # the same sizes may occur often
    for i, one in enumerate(sizes):
        if i == _MOST_DICTS:
            raise SpecError(f"sizes: more than {_MOST_DICTS} dicts are too many to look at")
        if not isinstance(one, Mapping):
            v = (*variables, "batch")[0]
            raise SpecError(
                f"sizes: expected dicts such as {{{v!r}: 8}}, got {reprlib.repr(one)}; several "
                f"sizes of one variable are {{{v!r}: [8, 16]}}"
            )
        check_names(one, variables)
        if several := [v for v, n in one.items() if not isinstance(n, int | np.integer)]:
            raise SpecError(
                f"sizes: each dict of a list has one size of {several[0]!r}, an int, got "
                f"{one[several[0]]!r}; a dict of all sizes stands by itself"
            )
        chosen = {v: _sizes_of(v, n)[0] for v, n in one.items()}
        found.setdefault(frozenset(chosen.items()), chosen)
    return list(found.values())


def check_names(sizes: Mapping[str, Any], variables: Sequence[str]) -> None:
    """Check that all names are dimension variables."""
    if unknown := [v for v in sizes if v not in variables]:
        known = _listed(variables)
        if variables:
            known += f"; write {{{variables[0]!r}: ...}}, or name axes in dynamic_axes"
        raise SpecError(
            f"sizes: there is no dimension {unknown[0]!r}; these arguments have {known}"
        )


def _listed(variables: Sequence[str]) -> str:
    return ", ".join(map(repr, variables)) or "no open axis; name those that vary in dynamic_axes"


def _count(each: Mapping[str, Sequence[int]]) -> int:
    return math.prod(map(len, each.values()))


def _ends(sizes: Sequence[int], bucket_of: Callable[[int], Hashable]) -> list[int]:
    """The smallest and the largest size in each bucket, in the order of the buckets found."""
    ends: dict[Hashable, tuple[int, int]] = {}
    for n in sizes:
        bucket = bucket_of(n)
        low, high = ends.get(bucket, (n, n))
        ends[bucket] = min(low, n), max(high, n)
    return [n for pair in ends.values() for n in dict.fromkeys(pair)]


def _is_strategy(sizes: object) -> bool:
    """Whether an object is a strategy; strategies of users may have ``boundaries`` only."""
    return hasattr(sizes, "bucket") or hasattr(sizes, "boundaries")


def _sizes_of(variable: str, given: Any) -> list[int]:
    if _is_strategy(given):
        given = strategies.buckets_of(given) or getattr(given, "boundaries", given)
    if hasattr(given, "tolist"):  # an array of NumPy or JAX
        given = given.tolist()
    values: list[Any] = []
    try:  # `given` may be any object, or an iterable without end
        one = isinstance(given, int | np.integer)
        values = [given] if one else list(itertools.islice(given, _MOST_SIZES + 1))
        found = [int(n) for n in values]
    except (TypeError, ValueError):
        found = []
    if len(found) > _MOST_SIZES:
        raise SpecError(
            f"sizes: more than {_MOST_SIZES} sizes of {variable!r} are too many to look at"
        )
    if not found or not all(is_int_from(n, 0) for n in values):
        raise SpecError(
            f"the sizes of {variable!r} must be ints of at least 0, one or more, or a "
            "range, or a strategy that has a largest bucket such as Pow2(max=64) and not too many "
            f"below it, got {reprlib.repr(given)}"
        )
    return found


class Unmasked(NamedTuple):
    """A call that cannot be masked.

    Attributes:
        why: Why it cannot be masked.
        request: The request for its exact shape.
        call: The call.
    """

    why: str
    request: CompileRequest
    call: Call


def requests_of(
    engine: Engine,
    call: Call,
    tokens: Tokens,
    sizes: dict[str, int],
    rows: Sequence[Rows] = (),
) -> list[CompileRequest] | Unmasked:
    """What to compile for a call of some sizes: its bucket, or one executable for each of ``rows``.

    It raises what the function raises if it does not take these sizes.
    """
    call = at_sizes(call, tokens, sizes)
    if engine.config.always_exact:
        return [engine.requests.exact(call.resolved(Resolution(tokens, sizes, None)))]
    call, decision = engine.chosen(call)
    if isinstance(decision, Masked) and engine.buckets.learning(decision.program) is not None:
        # Who asks for sizes means their buckets, not a larger one that was learnt and holds them.
        own = engine.buckets.of(decision.program, call, learns=False)
        decision = dataclasses.replace(decision, bucket=own)
    match decision:
        case Masked(program, bucket, None) if rows and not why_not_batched(
            engine, program, call, rows[0].mapped
        ):
            return [engine.requests.rows(call, bucket, each) for each in rows]
        case Masked(program, bucket):
            found = [engine.requests.masked(call, bucket)]
            if fewer := program.sizes_before(call.sizes, bucket):
                call, decision = engine.chosen(at_sizes(call, tokens, fewer))
                if isinstance(decision, Masked):
                    found.append(engine.requests.masked(call, decision.bucket))
            return found
        case Unpadded(Because.UNMASKED, why) if engine.config.fallback is Fallback.ERROR:
            raise FallbackError(why.reason, why.remedy)
        case Unpadded(because, why):
            request = engine.requests.exact(call)
            if because in (Because.UNMASKED, Because.EMPTY):
                return Unmasked(why.reason, request, call)
            return [request]
