"""What a bucketed function and a function that was loaded from a file both have.

They run many examples, inspect and clear their caches, and choose what is compiled and kept. Each
``with_...`` method returns a new function with an empty cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from bucketjit._api.options import bound, positive
from bucketjit._compile.budget import CompileGuard
from bucketjit._compile.cache import CacheInfo
from bucketjit._config import DEFAULT_MAXSIZE, Background, check_seconds, is_int_from
from bucketjit._environment import DISABLED
from bucketjit._events import Listener
from bucketjit._jax.config import NO_TRACE, THREAD_TRACE, jit_disabled
from bucketjit._jax.tracebacks import boundary
from bucketjit._runtime.call_path import CallPath, P, R
from bucketjit._stages.views import Views
from bucketjit.errors import SpecError

if TYPE_CHECKING:
    from bucketjit._runtime.rows.map import MapExplanation
    from bucketjit._stages.explain import Explanation


class Served(CallPath[P, R], Views):
    """The methods of `BucketedExec` and of `Loaded`."""

    _with: Callable[..., Self]  # a new function with some options changed

    def __copy__(self) -> Self:
        return self._with()

    @boundary
    def map(
        self,
        *args: Any,
        in_axes: Any = None,
        reduce: str | None = None,
        token_budget: int | None = None,
        out: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the function for many examples, in batches; each result is that of a call alone.

        The function is that of **one** example. Arguments that differ between examples are lists of
        them, in their places; all other arguments are given once. Examples of like sizes run
        together, in one executable for each program, bucket and number of rows, in which each row
        has its own sizes. These executables are in the cache of the bucketed function like all
        others.

        Examples that cannot be batched run one by one, and a `FallbackWarning` says why: programs
        with effects, and those that no rule can mask.

        Args:
            *args: The positional arguments. A mapped one is a list of examples (arrays or trees of
                arrays), any other sequence or iterator of them, or an array with the examples along
                axis 0. What an iterator gives is copied.
            in_axes: Which arguments are lists: a tuple with 0 (a list of examples) or None (shared)
                for each positional argument, as in ``jax.vmap``, or a dict by name. By default the
                arguments with open axes in ``dynamic_axes`` are lists; without ``dynamic_axes``,
                those that are lists, tuples or iterators. Another argument that is an array or a
                list of numbers, and as long as the lists, may be labels: it is an error not to say
                what it is.
            reduce: ``"sum"`` or ``"mean"`` for that of all results, in place of a list of them. It
                is summed while the batches run, so gradients need the memory of one.
            token_budget: The most padded tokens of a batch, where the tokens of an example are the
                positions along the open axes of its largest argument. By default 2048 to 8192, by
                the sizes of the call.
            out: The form of results: that of the bucketed function, or ``"jax"``, ``"numpy"``,
                ``"padded"``, or ``"stacked"`` for a `Ragged` of each array of the result.
            **kwargs: The keyword arguments, likewise.

        Returns:
            A list of the results in the order of the examples, one result in which each array is a
            `Ragged`, or one reduced result.

        Raises:
            ArgumentError: An example is not like the others, or does not fit its declaration; the
                message names it. Lists are not equally long, or a mapped argument is no list, or an
                argument is as long as the lists and nothing says whether it is shared.
            SpecError: An option is malformed, or no argument is mapped.
            BucketOverflowError: A size of an example is beyond the largest bucket, and its policy
                is to raise. Of lists nothing has run then; an iterator is read in parts.
            FallbackError: Examples cannot be batched, and ``fallback`` is to raise.
            Exception: What a call of one example would raise.

        Examples:
            >>> import jax.numpy as jnp, numpy as np
            >>> import bucketjit
            >>> def score(weights, x):
            ...     return jnp.tanh(x @ weights).mean()
            >>> scores = bucketjit.jit(score, dynamic_axes=(None, "n, _"), buckets="pow2")
            >>> examples = [np.full((n, 2), n, np.float32) for n in (3, 4, 7, 3)]
            >>> [round(float(x), 3) for x in scores.map(np.ones(2, np.float32), examples)]
            [1.0, 1.0, 1.0, 1.0]
            >>> scores.stats().rows, scores.stats().compiles
            (4, 2)
        """
        from bucketjit._processes.together import refuse_on_shards
        from bucketjit._runtime.rows.examples import examples_of
        from bucketjit._runtime.rows.map import map_examples, options_of

        engine = self._engine
        if engine.together is not None and engine.together.is_active:
            raise SpecError(
                f"{engine.name}.map: processes do not agree on the batches of a map; call the "
                "function itself, or map a bucketed function without with_agreement or "
                "with_processes"
            )
        refuse_on_shards(engine.config, "map")
        args, kwargs = self._in_places(args, kwargs)
        options = options_of(engine.config.out, reduce, token_budget, out)
        examples = examples_of(engine.signer, args, kwargs, in_axes)
        inside = THREAD_TRACE.value not in NO_TRACE or jit_disabled() or self._plain is not None
        return map_examples(engine, examples, options, self._inside if inside else None)

    @boundary
    def explain_map(
        self,
        *args: Any,
        in_axes: Any = None,
        reduce: str | None = None,
        token_budget: int | None = None,
        out: str | None = None,
        **kwargs: Any,
    ) -> MapExplanation:
        """Explain what `map` would do with these arguments, without compiling or running it.

        Args:
            *args: The positional arguments of the call of `map`. An iterator is used up.
            in_axes: See `map`.
            reduce: See `map`.
            token_budget: See `map`.
            out: See `map`.
            **kwargs: The keyword arguments.

        Returns:
            Which arguments are lists, the batches with their buckets and padding, and which
            examples would run one by one, and why. ``print`` it.

        Raises:
            ArgumentError, SpecError, BucketOverflowError: What `map` would raise.

        Examples:
            >>> import jax.numpy as jnp, numpy as np
            >>> import bucketjit
            >>> total = bucketjit.jit(jnp.sum, dynamic_axes="n", buckets=[8, 16])
            >>> print(total.explain_map([np.ones(n, np.float32) for n in (3, 7, 12, 5)]))
            4 examples; lists: a; shared: none
              n=8: 3 examples in 1 x 4 rows, 53% padding, to compile: 4 rows
              n=16: 1 example in 1 x 1 row, 25% padding, to compile: 1 rows
              padding: 44% of what is computed
        """
        from bucketjit._runtime.rows.examples import examples_of
        from bucketjit._runtime.rows.map import explain_map, options_of

        engine = self._engine
        args, kwargs = self._in_places(args, kwargs)
        options = options_of(engine.config.out, reduce, token_budget, out)
        return explain_map(engine, examples_of(engine.signer, args, kwargs, in_axes), options)

    @boundary
    def explain(self, *args: Any, rules: bool | None = None, **kwargs: Any) -> Explanation:
        """Explain what a call with these arguments would do, without compiling or running it.

        Args:
            *args: The positional arguments of the call; ``jax.ShapeDtypeStruct`` will do for
                arrays.
            rules: Whether the text lists the program, its guards, and each operation that is
                masked: by which rule, and where it is in your code. The attributes have these in
                any case. A parameter of the function of that name gets the keyword instead.
            **kwargs: The keyword arguments, likewise.

        Returns:
            What would run, in which bucket, and how much of it is padding; or why the call would
            run exact, and what to do about it. ``print`` it.

        Raises:
            ArgumentError, SpecError, StrategyError: What the call would raise.

        Examples:
            >>> import bucketjit, jax, jax.numpy as jnp
            >>> total = bucketjit.jit(lambda x: jnp.sum(x + 1), dynamic_axes="n", buckets="pow2")
            >>> told = total.explain(jax.ShapeDtypeStruct((5,), jnp.float32))
            >>> told.kind, dict(told.bucket), [e.primitive for e in told.masked]
            ('masked', {'n': 8}, ['reduce_sum'])
        """
        from bucketjit._processes.together import call_of_shard
        from bucketjit._stages.explain import asked, explain

        engine, unpadded = self._engine, None if self._plain is None else DISABLED
        rules, kwargs = asked(engine.signer, rules, kwargs)
        args, kwargs = self._in_places(args, kwargs)
        call = call_of_shard(engine, engine.signer.sign(args, kwargs, structs=True))
        return explain(engine, call, rules, self._equations, unpadded)

    def cache_size(self) -> int:
        """How many executables the cache holds."""
        return len(self._engine.cache)

    def cache_info(self) -> CacheInfo:
        """Hits, misses, bound and size of the cache, as in `functools.lru_cache`."""
        return self._engine.cache.info()

    def cache_clear(self) -> None:
        """Drop every executable and program, and reset the counters."""
        self._engine.clear()

    def pin(self, pinned: bool = True, **sizes: int) -> int:
        """Keep executables in the cache whatever else is compiled: they are not evicted.

        Args:
            pinned: False to allow their eviction again.
            **sizes: Padded sizes by dimension variable. All executables with these sizes are
                pinned; without any sizes, all executables.

        Returns:
            The number of executables that were pinned, or released.

        Raises:
            SpecError: ``pinned`` is no bool, a size is no int, or no executable has a dimension
                of that name.

        Examples:
            >>> import numpy as np
            >>> import bucketjit
            >>> double = bucketjit.jit(lambda x: 2 * x, buckets="pow2").with_maxsize(2)
            >>> for n in (3, 5):
            ...     _ = double(np.ones(n))
            >>> double.pin(batch=4)
            1
            >>> for n in (9, 17):
            ...     _ = double(np.ones(n))
            >>> [dict(bucket.sizes) for bucket in double.stats().buckets]
            [{'batch': 4}, {'batch': 32}]
        """
        if not isinstance(pinned, bool):
            raise SpecError(
                f"pin: pinned is True or False, got {pinned!r}; sizes go by name: pin(batch=8)"
            )
        for variable, size in sizes.items():
            if not is_int_from(size, 0):
                raise SpecError(f"pin: {variable} must be a padded size, an int, got {size!r}")
        cache = self._engine.cache
        entries = cache.items()
        variables = {variable for _, entry in entries for variable in entry.sizes}
        if entries and (unknown := sizes.keys() - variables):
            raise SpecError(
                f"pin: no executable has a dimension {min(unknown)!r}, "
                f"they have {', '.join(sorted(variables)) or 'none'}"
            )
        if not entries:
            self._engine.signer.refuse_unknown(dict.fromkeys(sizes, "a size to pin"))
        wanted = sizes.items()
        meant = [key for key, e in entries if all(e.sizes.get(v) == n for v, n in wanted)]
        return sum(cache.pin(key, pinned) for key in meant)

    def forbid_compiles(self) -> CompileGuard:
        """Compile nothing any more: a call that needs a compile raises `CompileBudgetError`.

        Executables are still loaded from files. ``jit`` itself may compile an executable once more,
        for arguments that are placed differently than before (committed to a device, say); that
        happens, with a warning.

        Returns:
            A guard that allows compiles again: as a context manager (``with
            executor.forbid_compiles(): ...``) at the end of the block, or by its ``release()``.

        Examples:
            >>> import numpy as np
            >>> import bucketjit
            >>> double = bucketjit.jit(lambda x: 2 * x, buckets="pow2")
            >>> _ = double(np.ones(3))
            >>> with double.forbid_compiles():
            ...     double(np.ones(5))
            Traceback (most recent call last):
                ...
            bucketjit.errors.CompileBudgetError: <lambda>: a call with batch=5 needs the bucket ...
        """
        return CompileGuard(self._engine.provider.allowance)

    def wait_for_compiles(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to compile in the background.

        Args:
            timeout: The largest number of seconds to wait; None for no limit.

        Returns:
            Whether nothing is left to compile.

        Raises:
            SpecError: ``timeout`` is no number, or negative.
        """
        check_seconds("wait_for_compiles: timeout", timeout)
        workers = self._engine.provider.workers
        return workers is None or workers.wait(timeout)

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
            >>> import bucketjit
            >>> told = []
            >>> double = bucketjit.jit(lambda x: x * 2, buckets="pow2").with_on_event(told.append)
            >>> _ = double(np.ones(3, np.float32))
            >>> [(event.kind, dict(event.sizes)) for event in told]
            [('signature', {'batch': 3}), ('compile', {'batch': 4})]
        """
        if not callable(callback):
            raise SpecError(f"on_event: expected a function of an event, got {callback!r}")
        return self._with(listeners=(*self._config.listeners, callback))

    def with_maxsize(
        self, maxsize: int | None = DEFAULT_MAXSIZE, *, max_bytes: int | None = None
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

        Returns:
            A new bucketed function.

        Raises:
            SpecError: A bound is malformed.

        Examples:
            >>> import numpy as np
            >>> import bucketjit
            >>> double = bucketjit.jit(lambda x: x * 2, buckets="pow2").with_maxsize(2)
            >>> for n in (1, 2, 4):
            ...     _ = double(np.ones(n, np.float32))
            >>> double.cache_size(), double.stats().evictions
            (2, 1)
        """
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
        chosen = Background(positive("workers", workers), positive("queue", queue))
        return self._with(background=chosen)
