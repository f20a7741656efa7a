"""The methods of a bucketed function that stop before a run: stages, modules and files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from bucketjit._api.compiling import Compiling
from bucketjit._config import Check, is_int_from
from bucketjit._jax.config import only_differentiated
from bucketjit._jax.tracebacks import boundary
from bucketjit._runtime.call_path import P, R
from bucketjit._runtime.decisions import NO_STRATEGY, Masked
from bucketjit.errors import ArtifactError, ExportError, MaskingError

if TYPE_CHECKING:
    import jax.export

    from bucketjit._runtime.derivatives import Derivatives
    from bucketjit._stages.lowered import Lowered, Traced
    from bucketjit._stages.stage import Subject
    from bucketjit._tracing.call import Call


class Staging(Compiling[P, R]):
    """The methods of `BucketedExec` for stages ahead of time, as in ``jax.stages``."""

    _derivatives: Derivatives

    @boundary
    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Trace the function for a call with these arguments, without compiling or running it.

        Args:
            *args: The positional arguments of the call; ``jax.ShapeDtypeStruct`` will do for
                arrays.
            **kwargs: The keyword arguments, likewise. Static arguments are given too.

        Returns:
            The program, with symbolic sizes, and its guards; ``lower`` goes on from there.

        Raises:
            ArgumentError, SpecError, StrategyError: What the call would raise.
            FallbackError: The call cannot be masked, and ``fallback`` is to raise.
            Exception: Whatever the function raises while it is traced.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import bucketjit
            >>> def spread(x):
            ...     return x.max() - x.min() if x.shape[0] > 4 else x.sum()
            >>> traced = bucketjit.jit(spread, dynamic_axes="n", buckets="pow2").trace(
            ...     jax.ShapeDtypeStruct((6,), jnp.float32)
            ... )
            >>> traced.guards, traced.in_avals
            (('n >= 5',), ((ShapedArray(float32[n]),), {}))
        """
        from bucketjit._stages.lowered import trace

        with jax.disable_jit(False):  # as in JAX, the stages do not depend on it
            return trace(self._subject(args, kwargs))

    @boundary
    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Lower the function for the bucket of a call with these arguments, as ``jax.jit`` does.

        ``compile`` of the result gives an executable that serves all sizes of the bucket. Argument
        0 of the module is the int32 vector of the sizes, in the order of ``Lowered.variables``.

        A call that cannot be masked, or has no open axes, is lowered at its exact shape, which
        ``Lowered.exact`` says; without a strategy every call is.

        Args:
            *args: The positional arguments of the call; ``jax.ShapeDtypeStruct`` will do for
                arrays. Arrays that will be committed to a device should be committed here too.
            **kwargs: The keyword arguments, likewise. Static arguments are given too; calls of what
                is compiled leave them out.

        Returns:
            The module, not compiled yet.

        Raises:
            ArgumentError, SpecError, StrategyError: What the call would raise.
            FallbackError: The call cannot be masked, and ``fallback`` is to raise.
            Exception: Whatever the function raises while it is traced.

        Examples:
            >>> import jax, jax.numpy as jnp, numpy as np
            >>> import bucketjit
            >>> norm = bucketjit.jit(jnp.linalg.norm, dynamic_axes="n", buckets="pow2")
            >>> lowered = norm.lower(jax.ShapeDtypeStruct((5,), jnp.float32))
            >>> dict(lowered.bucket), lowered.in_avals
            ({'n': 8}, ((ShapedArray(float32[n]),), {}))
            >>> compiled = lowered.compile()
            >>> [round(float(compiled(np.ones(n, np.float32))), 3) for n in (1, 4, 8)]
            [1.0, 2.0, 2.828]
            >>> _ = norm(np.ones(7, np.float32))
            >>> norm.stats().compiles
            1
        """
        from bucketjit._stages.lowered import lower

        with jax.disable_jit(False):
            return lower(self._subject(args, kwargs))

    def _subject(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Subject:
        from bucketjit._processes.together import call_of_shard
        from bucketjit._stages.stage import subject_of

        call = self._engine.signer.sign(args, kwargs, structs=True)
        return subject_of(self._engine, self._inside, call_of_shard(self._engine, call))

    @boundary
    def export_dynamic(
        self, *args: Any, platforms: Sequence[str] | None = None, vjp_order: int = 0, **kwargs: Any
    ) -> jax.export.Exported:
        """Export the function as one module for all sizes, as ``jax.export`` does.

        The module is not masked and has no buckets: whoever runs it fixes its sizes first, by
        ``Exported.call``, by `refine`, or by XLA's shape refinement, and compiles it for those. It
        is made from the program that bucketjit has traced. So it exists for functions that
        ``jax.export`` alone refuses: with ``if x.shape[0] > 4``, ``int(x.shape[0])`` or an
        associative scan. The guards of the program become shape assertions of the module, and
        arguments are nested as in this call, without the static ones.

        A function that is traced at concrete sizes is compared with traces at sizes up to 4096, or
        four times those of this call, whichever is more. The module refuses sizes beyond.

        ``Exported.serialize()`` needs the extra ``bucketjit[export]``. Custom pytree classes have
        to be registered for it by ``jax.export.register_pytree_node_serialization``.

        Args:
            *args: Arguments like those of the calls; ``jax.ShapeDtypeStruct`` will do for arrays.
            platforms: Platforms such as ``["cpu", "cuda", "tpu"]``; by default the one of this
                process. Of several the module takes the number as its first argument.
            vjp_order: How many orders of reverse-mode derivatives to export with it, so that a
                failure shows here. ``Exported.serialize(vjp_order=...)`` writes them.
            **kwargs: Keyword arguments, likewise.

        Returns:
            The exported function.

        Raises:
            ExportError: The function cannot be traced, calls back into Python, takes an argument
                that is itself a size, or needs constants that Python computes from sizes; or
                ``jax.export`` refuses it.
            ArgumentError, SpecError: What the call would raise.

        Examples:
            >>> import jax, jax.numpy as jnp, numpy as np
            >>> import bucketjit
            >>> rows = bucketjit.jit(lambda x: jnp.cumsum(x)[: int(x.shape[0]) // 2])
            >>> exported = rows.export_dynamic(jax.ShapeDtypeStruct((8,), jnp.float32))
            >>> exported.in_avals
            (ShapedArray(float32[batch]),)
            >>> exported.call(np.ones(6, np.float32))
            Array([1., 2., 3.], dtype=float32)
        """
        from bucketjit._stages.modules.dynamic import check_platforms, export_dynamic

        if not is_int_from(vjp_order, 0):
            raise ExportError(f"vjp_order: expected an int of at least 0, got {vjp_order!r}")
        check_platforms(platforms)
        with jax.disable_jit(False):  # as in JAX, modules do not depend on it
            return export_dynamic(self._resolved(args, kwargs), platforms, vjp_order)

    @boundary
    def export_bounded(self, *args: Any, **kwargs: Any) -> bytes:
        r"""Export the masked program of a call's bucket, with the bucket as bounds of its sizes.

        The result is a StableHLO portable artifact. Its function ``main`` takes the leaves of the
        arguments with types such as ``tensor<?x4xf32, #stablehlo.bounds<8, ?>>``, and returns
        results of such types. Inside, it is the masked program of the bucket, in which every size
        is fixed. Where several arguments have the size of a variable, the first of them decides.
        An argument that is itself a size is an int32 scalar. The attribute ``bucketjit.shape`` of
        each argument and result names its sizes.

        It is for compilers and PJRT plugins that implement dynamic buffers, such as those for TPU.
        XLA's CPU compiler does not take a module whose arguments have bounds ("PadToStatic is not
        implemented"). For CPU, call the bucketed function, or `refine` what `export_dynamic`
        returns.

        Args:
            *args: Arguments like those of the calls; ``jax.ShapeDtypeStruct`` will do for arrays.
            **kwargs: Keyword arguments, likewise.

        Returns:
            The portable artifact, for readers of StableHLO from the last four weeks on.

        Raises:
            ExportError: The call is not masked, or its module cannot serve all sizes of the bucket
                from their values alone: its program has guards that ``constraints`` do not promise,
                or constants that Python computes from sizes; or it calls back into Python.
            ArgumentError, SpecError, StrategyError: What the call would raise.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import bucketjit
            >>> norm = bucketjit.jit(jax.nn.softmax, dynamic_axes="n", buckets="pow2")
            >>> artifact = norm.export_bounded(jax.ShapeDtypeStruct((5,), jnp.float32))
            >>> artifact[:4]
            b'ML\xefR'
        """
        from bucketjit._jax.stablehlo import write_module
        from bucketjit._stages.modules.bounded import bounded_module

        engine = self._engine
        if engine.config.check is not Check.OFF:  # masked programs of checked calls take more
            return self._with(check=Check.OFF).export_bounded(*args, **kwargs)
        if engine.config.always_exact:
            raise ExportError(f"cannot export with bounds: {NO_STRATEGY}")
        with jax.disable_jit(False):
            call = self._resolved(args, kwargs)
            if call.program is None:
                engine.signer.parameters.check_call(args, kwargs)
            decision = engine.decisions.decide(call)
            if not isinstance(decision, Masked):
                raise ExportError(f"cannot export with bounds: {decision.why}")
            try:
                lowered = engine.requests.kernel(call, decision.bucket).as_lowered().lowered
            except MaskingError as error:
                raise ExportError(f"cannot export with bounds: {error}") from error
            of_bucket = call, decision.bucket, call.signature.constraints
            return write_module(bounded_module(lowered, *of_bucket))

    def _resolved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call that is not run: it opens no axes."""
        from bucketjit._processes.together import refuse_on_shards

        engine = self._engine
        refuse_on_shards(engine.config, "export")
        call = engine.signer.sign(args, kwargs, structs=True)
        return engine.looked_at(call)

    @boundary
    def save(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        sizes: Any = None,
        platforms: Sequence[str] | None = None,
        derivatives: int = 0,
        dynamic: bool = False,
        executables: bool = False,
        key: str | bytes | None = None,
        **kwargs: Any,
    ) -> None:
        """Save the function in a file, from which `bucketjit.load` serves it without its source.

        The file has a portable StableHLO module for each bucket, masks included, and the arrays
        that the function closes over, once. A process that loads it needs bucketjit and JAX;
        ``python -m bucketjit unpack`` makes of it what other programs can run. Equal functions make
        equal files.

        Args:
            path: The file, by custom ``.bkt``. It is replaced at once when all is written.
            *args: Arguments like those of the calls; ``jax.ShapeDtypeStruct`` will do for arrays.
                Static arguments become a part of what is saved.
            sizes: Sizes of the calls whose buckets are saved, in any form that `warmup` takes. By
                default those of the executables in the cache; if there are none, those of ``args``.
            platforms: The platforms to save for, such as ``["cpu", "cuda", "tpu"]``; by default
                that of this process.
            derivatives: How many times the loaded function can be differentiated in reverse mode,
                by ``jax.grad`` and ``jax.vjp``.
            dynamic: Whether to save a module of all sizes besides. It serves calls beyond the
                buckets, and compiles once for each of their sizes.
            executables: Whether to save compiled executables besides, for machines like this one
                and the same versions; see ``trust_executables`` of `bucketjit.load`. Not for files
                that are to be equal.
            key: A secret to sign the file with; `bucketjit.load` with the same key then refuses
                files that somebody else has made.
            **kwargs: Keyword arguments like those of the calls.

        Raises:
            ArtifactError: The function cannot be saved: it is not masked, calls back into Python,
                or has trees of classes that JAX cannot serialize. Or JAX traces the call of `save`.
            SpecError: ``path``, ``sizes`` or another option is malformed.
            ArgumentError: Calls do not take such arguments.
            MissingExtraError: flatbuffers is not installed; the extra ``export`` installs it.
            OSError: The file cannot be written. An older one is then as it was.

        Warns:
            FallbackWarning: The file will not serve some sizes below its largest buckets.

        Examples:
            >>> import os, tempfile
            >>> import jax, jax.numpy as jnp, numpy as np
            >>> import bucketjit
            >>> mean = bucketjit.jit(jnp.mean, dynamic_axes="n", buckets="pow2")
            >>> like = jax.ShapeDtypeStruct((1,), jnp.float32)
            >>> path = os.path.join(tempfile.mkdtemp(), "mean.bkt")
            >>> mean.save(path, like, sizes={"n": range(1, 9)})
            >>> loaded = bucketjit.load(path)
            >>> float(loaded(np.array([1, 2, 6], np.float32)))
            3.0
        """
        from bucketjit._artifact.archive import checked_path
        from bucketjit._artifact.writer import SaveOptions, save
        from bucketjit._processes.together import refuse_on_shards

        refuse_on_shards(self._engine.config, "save")
        asked = SaveOptions(sizes, platforms, derivatives, dynamic, executables, key)
        if not only_differentiated():
            raise ArtifactError(
                "save: it is called inside jax.jit, jax.vmap or another function that JAX traces, "
                "which does so once for many calls; call it outside"
            )
        save(self._engine, self._derivatives, checked_path(path, "save"), args, kwargs, asked)
