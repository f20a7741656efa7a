"""The ``with_...`` methods about what is compiled and kept, and about events.

Each returns a new bucketed function with an empty cache. Those about sizes and masks are in
`bucketjit._api.bucket_builders`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Self

from bucketjit._api.options import bound
from bucketjit._config import (
    DEFAULT_MAXSIZE,
    Background,
    Config,
    is_positive_int,
)
from bucketjit._events import Listener
from bucketjit.errors import SpecError


class ResourceBuilders:
    """The methods about the cache, compiles and events."""

    _config: Config

    _with: Callable[..., Self]  # a new bucketed function with some options changed

    def with_on_event(self, callback: Listener) -> Self:
        """Call a function with each event, such as compiles, evictions and fallbacks.

        Events are logged too.

        Args:
            callback: Called as ``callback(event)`` with an `Event`, in the thread in which it
                happens. An `Exception` that it raises is logged, and the call goes on. Several
                callbacks are called in the order in which they were added. The event of a compile,
                or of a file that was loaded, comes when the executable is in the cache, so the
                callback may call the bucketed function, or warm it up. It must not wait for
                background compiles: it may itself run in the thread that does them.

        Returns:
            A new bucketed function.

        Raises:
            SpecError: ``callback`` cannot be called.

        Examples:
            >>> import numpy as np
            >>> from bucketjit import BucketedExec
            >>> told = []
            >>> double = BucketedExec(lambda x: x * 2).with_pow2().with_on_event(told.append)
            >>> _ = double(np.ones(3, np.float32))
            >>> [(event.kind, dict(event.sizes)) for event in told]
            [('signature', {'batch': 3}), ('compile', {'batch': 4})]
        """
        if not callable(callback):
            raise SpecError(f"on_event: expected a function of an event, got {callback!r}")
        return self._with(listeners=(*self._config.listeners, callback))

    def with_maxsize(
        self,
        maxsize: int | None = DEFAULT_MAXSIZE,
        *,
        max_bytes: int | None = None,
        eviction: Literal["lru"] = "lru",
    ) -> Self:
        """Bound the executables that are kept, by number and by bytes.

        As in `functools.lru_cache`, the least recently used one is evicted first, and an evicted
        one is compiled again by the next call that needs it. Executables that `BucketedExec.pin`
        named stay.

        When the last executable of a program is evicted, the program and the arrays that the
        function closed over are dropped too, unless it was differentiated or cannot be masked. A
        later call of its signature traces again.

        Args:
            maxsize: The largest number of executables; None for no bound. An executable takes
                73-145 memory maps of the system's 65,530, so some 450 of them end the process.
            max_bytes: The largest number of bytes of all executables, by XLA's memory analysis and
                the arrays that they close over; None for no bound. A single executable that takes
                more is kept alone.
            eviction: ``"lru"``, the one way there is.

        Returns:
            A new bucketed function.

        Raises:
            SpecError: An option is malformed.

        Examples:
            >>> import numpy as np
            >>> from bucketjit import BucketedExec
            >>> double = BucketedExec(lambda x: x * 2).with_pow2().with_maxsize(2)
            >>> for n in (1, 2, 4):
            ...     _ = double(np.ones(n, np.float32))
            >>> double.cache_size(), double.stats().evictions
            (2, 1)
        """
        if eviction != "lru":
            raise SpecError(
                f"eviction must be 'lru', got {eviction!r}; pin(...) keeps what must stay, and "
                "with_background_compile() serves calls by a larger bucket while theirs compiles"
            )
        return self._with(
            maxsize=bound("maxsize", maxsize), max_bytes=bound("max_bytes", max_bytes)
        )

    def with_background_compile(self, workers: int = 1, *, queue: int = 64) -> Self:
        """Compile in the background if a larger bucket is compiled that can serve meanwhile.

        A call whose bucket is not compiled is served at once by the smallest compiled bucket that
        holds it, with the same result. Its own bucket compiles in another thread, and serves calls
        once it is ready: compiled, and on CPU run once on zeros, as by `warmup` with ``first_run``.
        If no compiled bucket is large enough, the call waits for its own. A compile that fails in
        the background is logged; the next call that needs it compiles in the foreground and gets
        the error. In a fork of a process that has run JAX, XLA cannot compile. Executables still
        serve calls there, except those that need threads of XLA, which a fork lacks: these hang, as
        under ``jax.jit``.

        On CPU, XLA compiles with all cores. Calls beside a compile share these with it, and take
        several times as long until it is done.

        Args:
            workers: Number of threads that compile. XLA uses several cores for one compile.
            queue: How many compiles may wait; calls beyond that request theirs again later.

        Returns:
            A new bucketed function.

        Raises:
            SpecError: A number is not a positive int.
        """
        for name, number in (("workers", workers), ("queue", queue)):
            if not is_positive_int(number):
                raise SpecError(f"{name} must be a positive int, got {number!r}")
        return self._with(background=Background(int(workers), int(queue)))
