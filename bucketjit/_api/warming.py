"""The methods of a bucketed function that compile before calls need it."""

from __future__ import annotations

from typing import Any

from bucketjit._jax.tracebacks import boundary
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.rows.map import rows_to_compile
from bucketjit._stages.warmup import WarmupReport, check_options, report_of, warm_up
from bucketjit._tracing.structs import sign_like


class Warming:
    """The methods of `BucketedExec` for warm-up."""

    _engine: Engine
    _plain: Any

    @boundary
    def warmup(
        self,
        *args: Any,
        sizes: Any = None,
        workers: int | None = None,
        time_budget: float | None = None,
        progress: bool = True,
        first_run: bool = False,
        rows: Any = None,
        in_axes: Any = None,
        **kwargs: Any,
    ) -> WarmupReport:
        """Compile buckets before calls need them, several at the same time.

        Buckets that are compiled already are skipped, so a warm-up that was interrupted, or ran out
        of time, is continued by calling it again. The largest bucket is compiled first.

        Without ``dynamic_axes``, a call with another size along an axis that was taken as static
        opens that axis. New shapes are then served by buckets of the opened program, which have to
        be compiled too: so name the axes that vary. With `Check.EXACT`, the exact shapes that
        results are compared with are compiled by the calls.

        Args:
            *args: Arguments like those of the calls; ``jax.ShapeDtypeStruct`` will do for arrays.
                Arrays that will be committed to a device should be committed here too.
            sizes: Sizes of the calls: a dict of a variable to sizes or to a strategy that has a
                largest bucket (`strategies.buckets_of`; a strategy of your own lists its buckets as
                ``boundaries``), of which all combinations are warmed up; a list of dicts of a
                variable to a size; or, of a single variable, its strategy. By default the sizes of
                ``args``, and with `with_persistence` all buckets of their program that the
                directory has. Of more than 4,096 combinations, only the smallest and the largest
                size in each bucket are looked at.
            workers: Number of threads that compile; by default one per core, up to four.
            time_budget: Seconds after which no further compile begins.
            progress: Whether to show progress on standard error: a bar in a terminal, if rich is
                installed, and lines elsewhere.
            first_run: Whether to run each executable once, on zeros, as soon as it is compiled.
                On CPU, the first run of one with many matrix multiplications takes longer, by
                45 ms for a 6-layer encoder. Executables that have effects, callbacks or a
                ``while_loop``, take over 10 GFLOP or 1 GiB, or are for another device than the
                host, are not run.
            rows: For `map`: numbers of examples in a batch, each rounded up to a power of two. The
                executables of these batches are compiled for ``sizes``, in place of those of single
                examples, and `map` then takes no others for their buckets.
            in_axes: For ``rows``: which arguments are lists of examples, as in `map`. Here they are
                given for one example.
            **kwargs: Keyword arguments like those of the calls.

        Returns:
            What was compiled, what was in the cache, what failed and why, and what is left.

        Raises:
            SpecError: ``sizes`` is malformed, or names a dimension that these arguments lack;
                ``workers`` or ``time_budget`` is out of range, or a flag is no bool.
            ArgumentError: Calls do not take such arguments. Errors that the function itself raises
                for some sizes are in the report.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> from bucketjit import BucketedExec
            >>> total = BucketedExec(jnp.sum, dynamic_axes="n").with_pow2()
            >>> like = jax.ShapeDtypeStruct((1,), jnp.float32)
            >>> report = total.warmup(like, sizes={"n": range(1, 65)}, progress=False)
            >>> [bucket["n"] for bucket in report.compiled]
            [64, 32, 16, 8, 4, 2, 1]
            >>> total.warmup(like, sizes=[{"n": 3}, {"n": 5}], progress=False).present
            ({'n': 4}, {'n': 8})
            >>> total.warmup(like, sizes={"n": [3, 5]}, rows=[1, 16], progress=False).compiled
            ({'rows': 16, 'n': 8}, {'rows': 16, 'n': 4}, {'rows': 1, 'n': 8}, {'rows': 1, 'n': 4})
        """
        check_options(workers, time_budget, progress=progress, first_run=first_run)
        if self._plain is not None:  # calls would not use what is compiled
            return WarmupReport((), (), (), (), (), 0.0)
        engine = self._engine
        epoch = engine.provider.epoch
        call = sign_like(engine.signer, args, kwargs)
        batches = []
        if rows is not None:
            batches = rows_to_compile(engine.signer, call, args, kwargs, rows, in_axes)
        warmed = warm_up(
            *(engine, call, sizes, workers, time_budget, progress, first_run, epoch, batches)
        )
        return report_of(warmed, engine, epoch)
