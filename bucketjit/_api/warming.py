"""The methods of a bucketed function that compile before calls need it."""

from __future__ import annotations

import os
import time
from typing import Any

from bucketjit._autodiff.derivatives import Derivatives
from bucketjit._events import Event
from bucketjit._jax.tracebacks import boundary
from bucketjit._precompile.manifest import Manifest, changes_of, manifest_of
from bucketjit._precompile.report import WarmupReport, none_begun, none_warmed, report_of
from bucketjit._precompile.warmup import check_options, warm_up
from bucketjit._ragged.warm import rows_to_compile
from bucketjit._runtime.engine import Engine
from bucketjit._signature.structs import sign_like
from bucketjit.errors import ArgumentError, SpecError


class Warming:
    """The methods of `BucketedExec` for warm-up and manifests."""

    _engine: Engine
    _derivatives: Derivatives
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
                Arrays that will be committed to a device should be committed here too. Or a
                `Manifest` of what another process had compiled, and nothing else; the report says
                what of it failed, and what has changed since it was made.
            sizes: Sizes of the calls: a dict of a variable to sizes or to a strategy that has a
                largest bucket (`strategies.buckets_of`; a strategy of your own lists its buckets as
                ``boundaries``), of which all combinations are warmed up; a list of dicts of a
                variable to a size; or, of a single variable, its strategy. By default the sizes of
                ``args``. Of more than 4,096 combinations, only the smallest and the largest size in
                each bucket are looked at.
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
            return report_of([], self._engine, None)
        how: dict[str, Any] = {"workers": workers, "progress": progress, "first_run": first_run}
        if any(isinstance(x, Manifest) for x in (*args, *kwargs.values())):
            if len(args) != 1 or sizes is not None or rows is not None or kwargs:
                raise SpecError(
                    "warmup: a manifest stands alone; it has its own arguments and sizes"
                )
            return self._warmup_as_in(args[0], time_budget, **how)
        engine = self._engine
        epoch = engine.provider.epoch
        try:
            signed = sign_like(engine.signer, args, kwargs)
        except ArgumentError as error:
            if len(args) == 1 and isinstance(args[0], str | os.PathLike):
                path = os.fspath(args[0])
                raise ArgumentError(
                    f"{error}; of a manifest in a file, warmup(Manifest.load({path!r}))"
                ) from None
            raise
        if rows is not None:
            given = signed, args, kwargs, rows, in_axes
            how["rows"] = rows_to_compile(engine.signer, *given)
        warmed = warm_up(engine, signed, sizes, time_budget=time_budget, epoch=epoch, **how)
        return report_of([warmed], engine, epoch)

    def _warmup_as_in(
        self, manifest: Manifest, time_budget: float | None, **how: Any
    ) -> WarmupReport:
        """Warm up what a manifest names. A signature that fails does not keep others from it."""
        engine, began = self._engine, time.monotonic()
        epoch = engine.provider.epoch
        stale = manifest.changes()
        if manifest.function != engine.name:
            stale.insert(0, f"it was made for {manifest.function}, this is {engine.name}")
        warmed = []
        for entry in manifest.entries():
            if engine.provider.epoch is not epoch:
                warmed.append(none_begun(entry.sizes))
                continue
            # All signatures share the time budget.
            left = None if time_budget is None else time_budget - (time.monotonic() - began)
            try:
                if entry.problem is not None:
                    raise SpecError(entry.problem)
                called, of = engine, entry.derivative
                if of is not None:
                    differentiated = sign_like(engine.signer, of.args, of.kwargs)
                    called = self._derivatives.engine_at(differentiated, of.path)
                signed = sign_like(called.signer, entry.args, entry.kwargs)
                sizes = list(entry.sizes) or None
                warmed.append(warm_up(called, signed, sizes, time_budget=left, epoch=epoch, **how))
                stale += changes_of(called, signed, entry.fingerprint)
            except Exception as error:
                warmed.append(none_warmed(entry.sizes, error))
        report = report_of(warmed, engine, epoch, stale, manifest.left_out)
        for why in report.stale:
            engine.emit(Event("stale", engine.name, detail=f"the manifest: {why}"))
        return report

    def manifest(self) -> Manifest:
        """What the cache holds, derivatives included, so that another process can warm up the same.

        Returns:
            The manifest. ``save`` writes it to a file, ``Manifest.load`` reads it, and `warmup`
            takes it.
        """
        return manifest_of(self._engine, self._derivatives.known())
