"""What to compile for calls of some sizes: `requests_for` asks the engine what such calls do."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bucketjit._compile.argument_types import at_sizes
from bucketjit._compile.requests import CompileRequest
from bucketjit._compile.rows import Rows
from bucketjit._config import Fallback
from bucketjit._ragged.batchable import why_not_batched
from bucketjit._raised import in_one_line
from bucketjit._runtime.decisions import Because, Chunked, Exact, Masked, Refused
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
    """The compile requests for calls of some sizes.

    Args:
        engine: Serves the calls.
        signed: An example of the calls.
        tokens: Its token for each axis of each leaf.
        own: Its logical sizes.
        wanted: Logical sizes of the calls. A variable that is left out has its size in ``own``.
        until: The time (``time.monotonic``) to stop at, or None. The first sizes are always looked
            at.
        rows: The batches of `map` to compile in place of single examples; empty for those.

    Returns:
        The requests. An error of the function at some sizes is in ``failed``.
    """
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
                requests: Iterable[CompileRequest | Unmasked] = [
                    engine.requests.exact(at, all_sizes)
                ]
            else:
                requests = _requests_of(engine, at, call, (at, call), rows)
            for one in requests:
                if isinstance(one, CompileRequest):
                    found.setdefault(one.key, one)
                else:
                    sizes = chosen if one.call is call else one.call.sizes
                    exact[FrozenDict(sizes or one.request.sizes)] = one
        except Exception as error:  # often of the function, which does not take these sizes
            failed.append((FrozenDict(chosen), in_one_line(error)))
    return Asked(list(found.values()), exact, failed, list(waiting))


def _requests_of(
    engine: Engine,
    signed: SignedCall,
    call: ResolvedCall,
    whole: tuple[SignedCall, ResolvedCall],
    rows: Sequence[Rows] = (),
) -> Iterator[CompileRequest | Unmasked]:
    """The compile requests for a call: one for its bucket, or one for each size of its chunks.

    Args:
        engine: Serves the call.
        signed: The call.
        call: The same call, resolved.
        whole: The call that it is a chunk of, or the call itself; signed and resolved.
        rows: See `requests_for`.
    """
    # If such a chunk has to run exact, the engine runs the whole call instead; see `_PartRefused`.
    own = whole if call.whole is not None else (signed, call)
    match engine.decide(signed, call):
        case Masked(program, bucket, None) if rows and not why_not_batched(
            engine, program, signed, rows[0].mapped
        ):
            for each in rows:
                yield engine.requests.rows(signed, call, bucket, each)
        case Masked(bucket=bucket):
            yield engine.requests.masked(signed, call, bucket)
        case Exact(Because.UNMASKED, why) if engine.config.fallback is Fallback.ERROR:
            raise FallbackError(why.reason, why.remedy)
        case Exact(Because.UNMASKED | Because.EMPTY, why):
            request = engine.requests.exact(own[0], own[1].sizes)
            yield Unmasked(why.reason, request, own[1], own[0].shapes)
        case Exact():
            yield engine.requests.exact(own[0], own[1].sizes)
        case Chunked(splitting):
            for size in dict.fromkeys(splitting.sizes):
                part = splitting.part(call, size)
                at = at_sizes(signed, call.tokens, part.sizes)
                yield from _requests_of(engine, at, part, whole)
        case Refused(error):
            raise error
