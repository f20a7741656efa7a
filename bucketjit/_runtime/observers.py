"""What an engine tells of its calls: to who compiles ahead of them, and to who measures them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from bucketjit._compile.executable import Executable
from bucketjit._config import Out
from bucketjit._runtime.fast_path.dispatch import CallArguments
from bucketjit._runtime.fast_path.handler import Handler
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall


class Preparer(Protocol):
    """Compiles for later calls before a new call runs; see `bucketjit._precompile.listed_buckets`.

    It is called on the slow path only.
    """

    def prepare(self, engine: Any, signed: SignedCall, call: ResolvedCall, key: object) -> None:
        """Compile what later calls of the program need.

        Args:
            engine: The engine that serves the call.
            signed: The call.
            call: The same call, resolved.
            key: The key of the executable that the call itself needs.
        """


class Trial(Protocol):
    """Measures whether calls are faster in chunks or whole; see `bucketjit._precompile.trial`.

    It is called on the slow path only.
    """

    @property
    def is_waiting(self) -> bool:
        """Whether buckets that no call has asked for should not be compiled yet."""

    def see(self, engine: Any, signed: SignedCall, call: ResolvedCall, entry: Executable) -> None:
        """Note a run of one executable; see `hold` for the arguments."""

    def hold(
        self,
        engine: Any,
        signed: SignedCall,
        call: ResolvedCall,
        given: CallArguments,
        chunked: Handler,
        out: Out,
    ) -> None:
        """Measure both ways by a call that was served in chunks.

        Args:
            engine: Served the call.
            signed: The call.
            call: The same call, resolved.
            given: Its arguments as they came.
            chunked: Serves it in chunks.
            out: The form of its results.
        """


class Together(Protocol):
    """Runs calls in the bucket that all processes agree on; see `bucketjit._processes`."""

    @property
    def is_active(self) -> bool:
        """Whether calls are agreed on: not if there is one process."""

    def serve(self, engine: Any, given: tuple[tuple[Any, ...], Mapping[str, Any]]) -> Any:
        """Run a call.

        Args:
            engine: The engine.
            given: Its arguments.

        Returns:
            Its result.
        """


class NoTrial:
    """A trial that measures nothing."""

    is_waiting = False

    def see(self, *_: Any) -> None:
        """Do nothing."""

    def hold(self, *_: Any) -> None:
        """Do nothing."""
