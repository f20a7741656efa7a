"""The methods of a bucketed function that write modules for other programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from bucketjit._config import Check
from bucketjit._jax.stablehlo import write_module
from bucketjit._jax.tracebacks import boundary
from bucketjit._processes.together import refuse_apart
from bucketjit._runtime.decisions import NO_STRATEGY, Masked
from bucketjit._runtime.engine import Engine
from bucketjit._stages.bounded import bounded_module
from bucketjit._stages.dynamic import export_dynamic
from bucketjit._tracing.call import Call
from bucketjit.errors import ExportError, MaskingError

if TYPE_CHECKING:
    import jax.export


class Exporting:
    """The methods of `BucketedExec` that export modules."""

    _engine: Engine
    _with: Callable[..., Any]

    @boundary
    def export_dynamic(
        self,
        *args: Any,
        platforms: Sequence[str] | None = None,
        vjp_order: int = 0,
        **kwargs: Any,
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
            >>> from bucketjit import BucketedExec
            >>> rows = BucketedExec(lambda x: jnp.cumsum(x)[: int(x.shape[0]) // 2])
            >>> exported = rows.export_dynamic(jax.ShapeDtypeStruct((8,), jnp.float32))
            >>> exported.in_avals
            (ShapedArray(float32[batch]),)
            >>> exported.call(np.ones(6, np.float32))
            Array([1., 2., 3.], dtype=float32)
        """
        if isinstance(vjp_order, bool) or not isinstance(vjp_order, int) or vjp_order < 0:
            raise ExportError(f"vjp_order: expected an int of at least 0, got {vjp_order!r}")
        if platforms is not None and (
            isinstance(platforms, str)
            or not platforms
            or not all(isinstance(p, str) for p in platforms)
        ):
            raise ExportError(f"platforms: expected a list such as ['cpu'], got {platforms!r}")
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
            >>> from bucketjit import BucketedExec
            >>> norm = BucketedExec(jax.nn.softmax, dynamic_axes="n").with_pow2()
            >>> artifact = norm.export_bounded(jax.ShapeDtypeStruct((5,), jnp.float32))
            >>> artifact[:4]
            b'ML\xefR'
        """
        engine = self._engine
        if engine.config.check is not Check.OFF:  # masked programs of checked calls take more
            return self._with(check=Check.OFF).export_bounded(*args, **kwargs)
        if engine.config.always_exact:
            raise ExportError(f"cannot export with bounds: {NO_STRATEGY}")
        with jax.disable_jit(False):
            call = self._resolved(args, kwargs)
            if call.program is None:
                engine.signer.parameters.check_call(args, kwargs)
            return self._bounded(call)

    def _bounded(self, call: Call) -> bytes:
        engine, constraints = self._engine, call.signature.constraints
        decision = engine.decisions.decide(call)
        if not isinstance(decision, Masked):
            raise ExportError(f"cannot export with bounds: {decision.why}")
        try:
            lowered = engine.requests.lower_masked(call, decision.bucket).lowered
        except MaskingError as error:
            raise ExportError(f"cannot export with bounds: {error}") from error
        assert lowered is not None
        return write_module(bounded_module(lowered, call, decision.bucket, constraints))

    def _resolved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call that is not run: it opens no axes."""
        engine = self._engine
        refuse_apart(engine.config, "export")
        call = engine.signer.sign(args, kwargs, structs=True)
        return engine.looked_at(call)
