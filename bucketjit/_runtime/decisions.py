"""What a call does: masked in a bucket, exact and why, in chunks and how, or refused and why.

Serving, `explain` and warm-up ask here, and match on the answer. Nothing is compiled or run to
find it, so building may still find a program that cannot be masked: `Refusals` then knows it.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from bucketjit._compile.requests import RequestFactory
from bucketjit._config import Config
from bucketjit._errors import BucketOverflowError, MaskingError, SplitError
from bucketjit._runtime.buckets import Buckets, exactly
from bucketjit._runtime.chunks.splitter import Splitter, Splitting
from bucketjit._runtime.refusals import Refusals
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._tracing.program import Program


@dataclass(frozen=True)
class Masked:
    """The call is padded to a bucket, and its program is masked there.

    Attributes:
        program: The program.
        bucket: The padded size of each variable, those of the program's own included.
        beyond: Why some variables keep their exact size, in words; None if none does.
    """

    program: Program
    bucket: Mapping[str, int]
    beyond: str | None = None

    @property
    def key(self) -> tuple[Program, Hashable]:
        """The key of its executable."""
        return RequestFactory.masked_key(self.program, self.bucket)


class Because(enum.Enum):
    """Why a call runs at its exact shape."""

    NO_OPEN_AXIS = "no axis is open"
    EMPTY = "an axis has size 0"
    BEYOND = "the user wants sizes beyond the largest bucket exact"
    UNMASKED = "the program cannot be masked"


@dataclass(frozen=True)
class Exact:
    """The call runs at its exact shape.

    Attributes:
        because: The kind of its reason. Only `Because.UNMASKED` is a fallback.
        why: The reason and the remedy, in words.
    """

    because: Because
    why: MaskingError


@dataclass(frozen=True)
class Chunked:
    """The call is split along an axis, and each chunk is decided for itself.

    Attributes:
        splitting: How.
    """

    splitting: Splitting


@dataclass(frozen=True)
class Refused:
    """The call raises an error.

    Attributes:
        error: The error.
    """

    error: BucketOverflowError | SplitError


Decision = Masked | Exact | Chunked | Refused

NO_STRATEGY = MaskingError(
    "there is no strategy: every size has an executable of its own", "add .with_pow2()"
)
_NO_OPEN_AXIS = MaskingError("no axis is open")
_EMPTY = MaskingError("an axis of size 0 has no bucket")


class Decisions:
    """Decides the calls of one configuration.

    Args:
        config: The configuration.
        buckets: Chooses buckets.
        splitter: Plans chunks.
        refusals: Programs that building found cannot be masked.
    """

    def __init__(
        self, config: Config, buckets: Buckets, splitter: Splitter, refusals: Refusals
    ) -> None:
        self._config = config
        self._buckets = buckets
        self._splitter = splitter
        self._refusals = refusals

    def decide(self, signed: SignedCall, call: ResolvedCall) -> Decision:
        """What a call does.

        Args:
            signed: The call.
            call: The same, resolved. (Where no variable has a strategy no call is, and all run
                exact; see `NO_STRATEGY`.)

        Returns:
            One of the kinds of `Decision`. A call that is part of another one is decided in the
            same way; see `ResolvedCall.whole` for what then may not be run.

        Raises:
            SizeMismatchError: An array cannot be reshaped as the function wants it, at these sizes.
        """
        program = call.program
        if program is None:
            if call.refusal is not None:
                return Exact(Because.UNMASKED, call.refusal)
            if any(0 in shape for shape in signed.shapes):
                return Exact(Because.EMPTY, _EMPTY)
            return Exact(Because.NO_OPEN_AXIS, _NO_OPEN_AXIS)
        program.check_reshapes(call.sizes)
        if (refusal := self._refusals.of_program(program)) is not None:
            return Exact(Because.UNMASKED, refusal)
        try:
            bucket = self._buckets.of(program, call)
        except BucketOverflowError as error:
            try:
                return Chunked(self._splitter.plan(call, error))
            except BucketOverflowError as refused:
                return Refused(refused)
        beyond = exactly(self._config, call.sizes)
        if beyond is not None and beyond.wholly:
            return Exact(Because.BEYOND, MaskingError(beyond.reason))
        masked = Masked(program, bucket, None if beyond is None else beyond.reason)
        if (refusal := self._refusals.of(masked.key)) is not None:
            return Exact(Because.UNMASKED, refusal)
        return masked
