"""The parts of an engine that know where its programs come from.

`bucketjit._runtime.engine` gets them from a traced function, `bucketjit._artifact.saved_engine`
from a file, and `bucketjit._stages.compiled` from what was compiled ahead of calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from bucketjit._compile.cache import ExecutableCache
from bucketjit._compile.executable import Executable
from bucketjit._compile.requests import Requests
from bucketjit._config import Config
from bucketjit._runtime.buckets import Buckets, ChoosesBuckets
from bucketjit._tracing.call import Call
from bucketjit._tracing.signer import Signer


class Preparer(Protocol):
    """Compiles for later calls before a new call runs; see `bucketjit._stages.listed_buckets`.

    It is called on the slow path only.
    """

    def prepare(self, engine: Any, call: Call, key: object) -> None:
        """Compile what later calls of the program need."""


class Together(Protocol):
    """Runs calls in the bucket that all processes agree on; see `bucketjit._processes`."""

    @property
    def is_active(self) -> bool:
        """Whether calls are agreed on: not if there is one process."""

    def serve(self, engine: Any, given: tuple[tuple[Any, ...], Mapping[str, Any]]) -> Any:
        """Run a call."""


MakeRequests = Callable[[Config, str, ExecutableCache[Any, Executable]], Requests]


class Parts(NamedTuple):
    """What makes the parts of an engine that know where its programs come from.

    Attributes:
        signer: Makes what finds the signature of a call.
        requests: Makes what makes compile requests.
        buckets: Makes what chooses buckets.
        lock: Makes the lock that is held while programs are traced.
    """

    signer: Callable[[Config], Signer] = Signer
    requests: MakeRequests = Requests
    buckets: Callable[[Config, AbstractContextManager[Any]], ChoosesBuckets] = Buckets
    lock: Callable[[], AbstractContextManager[Any]] = threading.RLock


TRACED = Parts()
"""The parts of an engine that traces its function."""
