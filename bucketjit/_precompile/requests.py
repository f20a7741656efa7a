"""What to compile for calls of some sizes: `requests_for` asks the engine what such calls do."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from bucketjit._compile.argument_types import at_sizes
from bucketjit._compile.requests import CompileRequest
from bucketjit._compile.rows import Rows
from bucketjit._config import Fallback
from bucketjit._ragged.batchable import why_not_batched
from bucketjit._raised import in_one_line
from bucketjit._runtime.decisions import Because, Exact, Masked, Refused
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.statistics import FrozenDict
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._sizes.dynamic_axes import Tokens
from bucketjit.errors import FallbackError


class Unmasked(NamedTuple):
    """A call that cannot be masked.

    Attributes:
        why: Why it cannot be masked.
        request: The request for its exact shape.
        call: The call.
        shapes: The shapes of its leaves.
    """

    why: str
    request: CompileRequest
    call: ResolvedCall
    shapes: Sequence[tuple[int, ...]]


class Asked(NamedTuple):
    """The compile requests for calls of some sizes.

    Attributes:
        requests: The requests for calls that are masked, and for those that the user wants exact.
        exact: The calls that cannot be masked, by their sizes.
        failed: Sizes for which no request could be made, and why.
        left: Sizes that were not looked at, because the time was up.
    """

    requests: list[CompileRequest]
    exact: dict[FrozenDict[str, int], Unmasked]
    failed: list[tuple[Mapping[str, int], str]]
    left: list[Mapping[str, int]]

    @property
    def every_request(self) -> list[CompileRequest]:
        """All requests, those for calls that cannot be masked included."""
        return [*self.requests, *(one.request for one in self.exact.values())]


def requests_for(
    engine: Engine,
    signed: SignedCall,
    tokens: Tokens,
    own: Mapping[str, int],
    wanted: Iterable[Mapping[str, int]],
    until: float | None = None,
    rows: Sequence[Rows] = (),
) -> Asked:
    """The compile requests for calls of some sizes."""
    found: dict[Hashable, CompileRequest] = {}
    exact: dict[FrozenDict[str, int], Unmasked] = {}
    failed: list[tuple[Mapping[str, int], str]] = []
    waiting = deque(wanted)
    is_first = True
    while waiting and (is_first or until is None or time.monotonic() < until):
        is_first = False
        chosen = waiting.popleft()
        all_sizes = {**own, **chosen}
        try:
            at = at_sizes(signed, tokens, all_sizes)
            call = None if engine.config.always_exact else engine.resolve(at)
            if call is None:
                asked: list[CompileRequest] | Unmasked = [engine.requests.exact(at, all_sizes)]
            else:
                asked = _requests_of(engine, at, call, rows)
            if isinstance(asked, Unmasked):
                exact[FrozenDict(chosen or asked.request.sizes)] = asked
            else:
                for one in asked:
                    found.setdefault(one.key, one)
        except Exception as error:  # often of the function, which does not take these sizes
            failed.append((FrozenDict(chosen), in_one_line(error)))
    return Asked(list(found.values()), exact, failed, list(waiting))


def _requests_of(
    engine: Engine, signed: SignedCall, call: ResolvedCall, rows: Sequence[Rows]
) -> list[CompileRequest] | Unmasked:
    """The compile requests for a call: one for its bucket, or one for each of ``rows``."""
    match engine.decide(signed, call):
        case Masked(program, bucket, None) if rows and not why_not_batched(
            engine, program, signed, rows[0].mapped
        ):
            return [engine.requests.rows(signed, call, bucket, each) for each in rows]
        case Masked(bucket=bucket):
            return [engine.requests.masked(signed, call, bucket)]
        case Exact(Because.UNMASKED, why) if engine.config.fallback is Fallback.ERROR:
            raise FallbackError(why.reason, why.remedy)
        case Exact(because, why):
            request = engine.requests.exact(signed, call.sizes)
            if because in (Because.UNMASKED, Because.EMPTY):
                return Unmasked(why.reason, request, call, signed.shapes)
            return [request]
        case Refused(error):
            raise error
