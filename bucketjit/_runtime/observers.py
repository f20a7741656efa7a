"""What an engine tells of its calls: to who compiles ahead of them, and to who measures them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from bucketjit._tracing.resolved_call import ResolvedCall
from bucketjit._tracing.signer import SignedCall


class Preparer(Protocol):
    """Compiles for later calls before a new call runs; see `bucketjit._stages.listed_buckets`.

    It is called on the slow path only.
    """

    def prepare(self, engine: Any, signed: SignedCall, call: ResolvedCall, key: object) -> None:
        """Compile what later calls of the program need."""


class Together(Protocol):
    """Runs calls in the bucket that all processes agree on; see `bucketjit._processes`."""

    @property
    def is_active(self) -> bool:
        """Whether calls are agreed on: not if there is one process."""

    def serve(self, engine: Any, given: tuple[tuple[Any, ...], Mapping[str, Any]]) -> Any:
        """Run a call."""
