"""The ``with_...`` methods about what is kept and compiled; each returns a new executor.

Its cache is empty.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

from bucketjit._compile.cache_store import POLICIES
from bucketjit._config import (
    DEFAULT_MAXSIZE,
    AheadOfCalls,
    Background,
    CompileBudget,
    Config,
    Persistent,
    is_int_from,
    is_positive_int,
)
from bucketjit._errors import SpecError
from bucketjit._events import Listener
from bucketjit._persistence.files import Distrusted, check_directory


class ResourceBuilders:
    """What is kept, compiled, stored and told, one method each."""

    _config: Config

    def _with(self, **changes: object) -> Self:
        """Another executor, with some options changed."""
        raise NotImplementedError

    def with_on_event(self, callback: Listener) -> Self:
        """Have events told to a function, besides the log: compiles, evictions, fallbacks.

        Args:
            callback: Called as ``callback(event)`` with an `Event`, in the thread in which it
                happens. An `Exception` that it raises is logged, and the call goes on. Several
                are called in the order in which they were added. Of a compile, or a file that
                was loaded, they are told when the executable is there for all who ask: they may
                call the executor, or warm it up. They may not wait for what compiles in the
                background, where they may be called themselves.

        Returns:
            A new executor.

        Raises:
            SpecError: It cannot be called.

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

    def with_maxsize(self, maxsize: int | None) -> Self:
        """Bound the number of executables kept; the least recently used goes first.

        As in `functools.lru_cache`: what had to go is compiled again by the next call of it.
        `with_cache` has a hysteresis against that.

        Args:
            maxsize: How many; None for no bound. An executable takes 73-145 memory maps of the
                system's 65,530, so some 450 of them end the process.

        Returns:
            A new executor.
        """
        return self._with(maxsize=_bound("maxsize", maxsize))

    def with_cache(
        self,
        maxsize: int | None = DEFAULT_MAXSIZE,
        *,
        max_bytes: int | None = None,
        policy: str = "lru",
        hysteresis: int = 8,
    ) -> Self:
        """Bound the executables that are kept, by number and by bytes.

        With the last executable of a program goes what was traced, and the arrays that the function
        closed over, unless it was differentiated or cannot be masked; a later call of its signature
        traces again.

        Args:
            maxsize: How many; None for no bound, but see `with_maxsize`.
            max_bytes: How many bytes they may take together, by XLA's own memory analysis and
                the arrays that they close over; None for no bound. A single one that takes more
                is kept alone.
            policy: Which goes first: ``"lru"``, the least recently used, or ``"lfu"``, the least
                frequently used. Those that are pinned stay, see `BucketedExec.pin`.
            hysteresis: An executable that had to go is compiled again only when it was asked for
                this often, as long as a larger bucket can serve its calls, and twice as often
                each time that it has to go again (up to 128 times as often): buckets that
                alternate soon stop driving each other out. 0 compiles it at once.

        Returns:
            A new executor.

        Raises:
            SpecError: An option is malformed.
        """
        maxsize, max_bytes = _bound("maxsize", maxsize), _bound("max_bytes", max_bytes)
        if policy not in POLICIES:
            raise SpecError(f"policy must be one of {POLICIES}, got {policy!r}")
        if not is_int_from(hysteresis, 0):
            raise SpecError(f"hysteresis must be 0 or a positive int, got {hysteresis!r}")
        return self._with(
            maxsize=maxsize, max_bytes=max_bytes, policy=policy, hysteresis=int(hysteresis)
        )

    def with_background_compile(
        self, workers: int = 1, *, queue: int = 64, process: bool = True
    ) -> Self:
        """Compile in the background where a larger bucket is compiled that can serve meanwhile.

        A call whose bucket is not compiled is served at once by the smallest compiled one that
        holds it, with the same result. Its own compiles in a thread of its own and takes over when
        it is ready: compiled, and on CPU run once on zeros, as by `warmup` with ``first_run``.
        Where no compiled bucket is large enough, the call waits for its own. A compile that fails
        in the background is logged; the next call that needs it compiles in the foreground and
        gets the error. In a fork of a process that has run JAX, where XLA can compile nothing,
        what is compiled goes on serving, but for what needs threads of XLA, which a fork lacks:
        that hangs, as under ``jax.jit``.

        XLA compiles for CPU with all cores, beside which calls take several times as long. So on
        Linux, in processes that have no other device, another process compiles. It takes only the
        time that nobody else wants, and is halted two thirds of the time while this process is at
        work, so that its buckets take over later. It takes about 200 MB; there is one for four
        cores, at most four, which serve all executors, start with the first compile, and end with
        this process or after two minutes without work. They are children of this process, which
        whoever waits for any child (``os.wait``) meets too, and what they use counts against a
        limit on the cores of its group (a container's). They import what this process has, from
        where it has it: the absolute paths of ``sys.path``. Programs with callbacks or for several
        devices compile in this process, and so does what another has not compiled in half a
        minute and ten times the longest compile of this one, as where others use all cores; then,
        or where it does not start, it is not asked for a while. An event of the kind
        ``"process"`` says so. While something
        compiles, threads of Python take turns of 0.5 ms, not of 5 (``sys.setswitchinterval``):
        tracing keeps calls waiting, too.

        Args:
            workers: Threads that compile. XLA uses several cores for one compile already.
            queue: How many compiles may wait; calls beyond that ask again later.
            process: False to compile in this process.

        Returns:
            A new executor.

        Raises:
            SpecError: A number is not a positive int, or ``process`` is no bool.
        """
        for name, number in (("workers", workers), ("queue", queue)):
            if not is_positive_int(number):
                raise SpecError(f"{name} must be a positive int, got {number!r}")
        if not isinstance(process, bool):
            raise SpecError(f"process must be True or False, got {process!r}")
        return self._with(background=Background(int(workers), int(queue), process))

    def with_ahead_compile(self, workers: int | None = None) -> Self:
        """Compile all that the strategies list with the first call that a program serves.

        Where strategies have a largest bucket (`strategies.buckets_of`: those of `with_buckets`,
        ``with_pow2(max=64)``, `strategies.Optimal`, `strategies.Joint`), all of theirs are
        compiled, several at the same time, in every combination; variables of other strategies
        have the bucket of that first call. The call takes as long as the plan, but for files that
        are there (`with_persistence`); those after it find their buckets. That is `warmup` with the
        first call for an example, and as there each executable is run once. Other signatures,
        derivatives, and programs for other sizes have their own first call.

        What is not compiled then is compiled when a call needs it, and why is logged: buckets for
        which the function raises; all where the cache has no room for them; what is beyond a
        compile budget, the bucket of the call coming first; and all of functions that are traced
        at each size. Calls of other threads do not wait for the plan, only for their own bucket.

        Args:
            workers: Threads that compile; by default as many as there are cores, up to four.

        Returns:
            A new executor.

        Raises:
            SpecError: ``workers`` is not a positive int.

        Examples:
            >>> import jax.numpy as jnp, numpy as np
            >>> from bucketjit import BucketedExec
            >>> total = BucketedExec(jnp.sum, dynamic_axes="n").with_buckets([8, 64])
            >>> eager = total.with_ahead_compile()
            >>> _ = eager(np.ones(5, np.float32))
            >>> sorted(bucket.sizes["n"] for bucket in eager.stats().buckets)
            [8, 64]
        """
        if workers is not None and not is_positive_int(workers):
            raise SpecError(f"workers must be a positive int or None, got {workers!r}")
        return self._with(ahead=AheadOfCalls(workers))

    def with_compile_budget(
        self,
        compiles: int | None = None,
        *,
        seconds: float | None = None,
        action: str = "error",
    ) -> Self:
        """Limit how much is compiled; see `bucketjit.CompileBudget`.

        Returns:
            A new executor.
        """
        return self._with(budget=CompileBudget(compiles, seconds, action))

    def with_persistence(
        self, directory: str | os.PathLike[str] | None, *, max_bytes: int | None = None
    ) -> Self:
        """Keep executables in files, so that the next process loads what this one compiles.

        A process that finds the executable of a bucket there traces the function once, and loads:
        no masking, no lowering, no compile. While it traces, it loads what was of use last of the
        same function for arguments of the same types (32 executables at most, no more than the
        cache has room for, none where its bytes are bounded); calls that ask for those find them
        ready. What nobody asks for goes with the executor, what is of another program than the
        one that was traced at once.

        Without this method the directory ``bucketjit`` in JAX's own compilation cache
        (``jax_compilation_cache_dir``) is used, if JAX has one: for all buckets, or where
        ``jax_persistent_cache_min_compile_time_secs`` is set to another time than JAX has by
        default (1.0), for what took so long to compile.

        Files are found by what their executables depend on: the program, its constants, the types
        and placement of the arguments, versions, device and configuration. Damaged files are
        reported (`PersistenceWarning`) and made again. What cannot be identified soundly is not
        kept, with an event that says why: host callbacks, primitives of other libraries, rules of
        `with_rules`, arguments on several devices.

        An executable of more than 2 GiB, unpacked, is not kept, and a file that claims more than
        that, or more than its length can hold, is damaged. Files are read and unpacked in pieces
        of 1 MiB.

        **An executable is machine code: whoever can write into the directory can run code as
        you.** A directory that others can write into is refused, and one that is not there is made
        for you alone.

        Args:
            directory: Where; several processes may share it. None to keep none.
            max_bytes: Beyond that, files go that were of use longest ago, whenever one is written;
                None for no bound.

        Returns:
            A new executor.

        Raises:
            SpecError: The directory is a file, others can write into it, or ``max_bytes`` is no
                positive int.

        Examples:
            >>> import tempfile, numpy as np
            >>> from bucketjit import BucketedExec
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     double = BucketedExec(lambda x: 2 * x).with_pow2().with_persistence(directory)
            ...     _ = double(np.ones(3, np.float32))
            ...     again = double.with_persistence(directory)  # as another process would
            ...     _ = again(np.ones(4, np.float32))
            >>> double.stats().compiles, again.stats().compiles, again.stats().loads
            (1, 0, 1)
        """
        max_bytes = _bound("max_bytes", max_bytes)
        if directory is None:
            return self._with(persistence=Persistent())
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            raise SpecError(f"directory must be a path or None, got {directory!r}")
        path = Path(os.fspath(directory)).expanduser().absolute()
        try:
            check_directory(path)
        except FileNotFoundError:
            pass  # made when the first executable is written
        except (Distrusted, OSError, ValueError) as error:
            raise SpecError(f"with_persistence: {error}") from None
        return self._with(persistence=Persistent(str(path), max_bytes))


def _bound(name: str, bound: Any) -> int | None:
    if bound is None:
        return None
    if not is_positive_int(bound):
        raise SpecError(f"{name} must be a positive int or None, got {bound!r}")
    return int(bound)
