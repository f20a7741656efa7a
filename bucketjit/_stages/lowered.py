"""`Traced`, the program of a call, and `Lowered`, the module of a bucket before it is compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from bucketjit._compile.bodies import exact_body
from bucketjit._compile.kernel import Kernel
from bucketjit._config import checked_options
from bucketjit._ir.jax_patches import forgetful_jax, selecting_jax
from bucketjit._jax.jaxprs import shaped
from bucketjit._jax.serialization import ForElsewhere
from bucketjit._jax.tracebacks import boundary, traced_anew
from bucketjit._stages.compiled import Compiled
from bucketjit._stages.stage import Stage, StageTypes, Subject, exact_types, symbolic_types
from bucketjit.errors import ExportError, MaskingError, SpecError


class Lowered(Stage):
    """The module of a bucket, before it is compiled; see ``jax.stages.Lowered``.

    `BucketedExec.lower` makes it. The module takes padded arguments of the static shapes of the
    bucket. Its argument 0 is the int32 vector of the logical sizes, in the order of `variables`,
    unless it is `exact`. A program with constants that Python computes from sizes has these next,
    and the leaves of the arguments follow. As in ``jax.jit``, arguments that the module does not
    read are left out, the sizes too: a sum over padding of zeros needs none.
    """

    def __init__(self, subject: Subject, types: StageTypes, kernel: Kernel) -> None:
        super().__init__(subject, types)
        self._kernel = kernel
        self._lowered: jax.stages.Lowered = kernel.lowered

    @boundary
    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Compiled:
        """Compile the module, or take its executable from the cache or a file.

        The executable goes into the cache of the bucketed function, whose later calls in this
        bucket then compile nothing. With options it is compiled apart, and no other call gets it.

        Args:
            compiler_options: Options of XLA by name, for this executable alone. Those of the
                bucketed function hold too.

        Returns:
            The executable, to be called.

        Raises:
            SpecError: An option is malformed, or XLA does not take it.
            CompileBudgetError: The budget does not allow the compile.
            MaskingError: XLA cannot compile the masked module. The bucketed function then runs such
                calls at their exact shape, and so does what is lowered next.
        """
        options = checked_options(compiler_options)
        subject, engine = self._subject, self._subject.engine
        provider, requests, call = engine.provider, engine.requests, subject.call
        bucket = None if self.exact else subject.bucket
        request = requests.of(call, bucket, None, self._kernel, options)
        # After a `cache_clear` nobody asks the cache for this program any more.
        is_apart = bool(options) or provider.epoch is not subject.epoch
        try:
            with jax.disable_jit(False):  # as in JAX, the stages do not depend on it
                entry = (provider.get_apart if is_apart else provider.prepare)(request).entry
                if type(entry.compiled) is ForElsewhere:
                    entry = provider.get_apart(dataclasses.replace(request, kept=None)).entry
        except MaskingError as error:
            engine.refuse(request, error)
            raise
        return Compiled(subject, self._types, entry, self._lowered, engine.config.copy_inputs)

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The module as text, to read.

        Args:
            dialect: ``"stablehlo"``, the default, or ``"hlo"``.
            debug_info: Whether to show lines of source code.

        Returns:
            The text.

        Raises:
            SpecError: There is no such dialect.

        Examples:
            >>> import jax.numpy as jnp, numpy as np
            >>> import bucketjit
            >>> mean = bucketjit.jit(jnp.mean, dynamic_axes="n", buckets="pow2")
            >>> lowered = mean.lower(np.ones(5, np.float32))
            >>> lowered.variables, dict(lowered.bucket)
            (('n',), {'n': 8})
            >>> "%arg0: tensor<1xi32>" in lowered.as_text()
            True
        """
        return self._lowered.as_text(_checked_dialect(dialect), debug_info=debug_info)

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """The module as an object of the compiler, for debugging.

        Args:
            dialect: ``"stablehlo"``, the default, or ``"hlo"``.

        Returns:
            An ``ir.Module`` of MLIR, or an ``XlaComputation``.

        Raises:
            SpecError: There is no such dialect.
        """
        return self._lowered.compiler_ir(_checked_dialect(dialect))

    def cost_analysis(self) -> Any:
        """An estimate of what a call costs, such as ``"flops"``, padding included, uncompiled.

        Returns:
            A dict, on most backends; None if the backend does not tell.
        """
        return self._lowered.cost_analysis()


def _checked_dialect(dialect: str | None) -> str | None:
    if dialect in (None, "stablehlo", "hlo"):
        return dialect
    raise SpecError(
        f"dialect must be 'stablehlo' or 'hlo', got {dialect!r}; export_bounded makes a module "
        "with bounds"
    )


def lower(subject: Subject) -> Lowered:
    requests, engine, call = subject.engine.requests, subject.engine, subject.call
    if not subject.exact:
        try:
            kernel = requests.kernel(call, subject.bucket).as_lowered()
            return Lowered(subject, symbolic_types(subject), kernel)
        except MaskingError as error:
            engine.refusals.note(requests.masked_key(subject.program, subject.bucket), error)
            engine.note_fallback(error, counted=True)
            subject = dataclasses.replace(subject, bucket=dict(call.sizes), exact=True)
    with subject.without_computed_sizes():
        exact = requests.kernel(call).as_lowered()
    if call.program is None:  # as after an exact run: the function itself works at these sizes
        with engine.lock:
            call.signature.remember_refusal(call, call.shapes)
    return Lowered(subject, exact_types(exact.lowered), exact)


class Traced(Stage):
    """The program of a call, and the sizes that it holds for; see ``jax.stages.Traced``.

    `BucketedExec.trace` makes it. The program has symbolic sizes, and is the one that calls use: it
    is traced once.

    Attributes:
        jaxpr: The closed jaxpr, ``float32[b,8]`` where axes are open. Arguments that are sizes
            themselves are left out.
    """

    def __init__(self, subject: Subject, types: StageTypes, jaxpr: Any) -> None:
        super().__init__(subject, types)
        self.jaxpr = jaxpr

    @property
    def fun_name(self) -> str:
        """Name of the function."""
        return self._subject.engine.name

    @property
    def guards(self) -> tuple[str, ...]:
        """Conditions that the sizes of every call of this program meet, such as ``"n >= 5"``.

        Calls of other sizes have another program. Empty if it holds for all sizes, or is `exact`.
        """
        return () if self.exact else tuple(map(str, self._subject.program.guards))

    @property
    def out_avals(self) -> Any:
        """Tree of the abstract results, with symbolic sizes where axes are open."""
        return jax.tree_util.tree_map(shaped, self.out_info)

    @boundary
    def lower(
        self,
        bucket: Mapping[str, int] | None = None,
        *,
        lowering_platforms: Sequence[str] | None = None,
        _private_parameters: object = None,
    ) -> Lowered:
        """Lower the program for a bucket.

        Args:
            bucket: Padded size of some variables in the place of those that the strategies choose.
            lowering_platforms: Not an option: use `BucketedExec.export_dynamic`.

        Returns:
            The module.

        Raises:
            ExportError: ``jax.export.export`` asks for a module, or platforms are given.
            SpecError: ``bucket`` names no variable, has a size below that of the call, or is one
                that the guards do not allow.
            FallbackError: The call cannot be masked, and ``fallback`` is to raise.
            Exception: Whatever ``jax.jit(fn)`` raises for these arguments.

        Examples:
            >>> import jax.numpy as jnp, numpy as np
            >>> import bucketjit
            >>> total = bucketjit.jit(jnp.sum, dynamic_axes="n", buckets="pow2")
            >>> traced = total.trace(np.ones(5, np.float32))
            >>> dict(traced.lower().bucket), dict(traced.lower({"n": 24}).bucket)
            ({'n': 8}, {'n': 24})
        """
        if lowering_platforms is not None or _private_parameters is not None:
            raise ExportError(
                f"{self.fun_name}: a bucketed function is lowered for this platform, and not by "
                "jax.export.export(fn)(*args); write fn.export_dynamic(*args, platforms=[...])"
            )
        subject = self._subject
        return lower(subject if bucket is None else subject.in_bucket(bucket))


def trace(subject: Subject) -> Traced:
    if not subject.exact:
        program = subject.program
        jaxpr = ClosedJaxpr(program.jaxpr, program.consts)
        return Traced(subject, symbolic_types(subject), jaxpr)
    body = exact_body(subject.call)
    # If tracing fails, JAX must not keep the trace alive.
    with forgetful_jax(), selecting_jax(), traced_anew(), subject.without_computed_sizes():
        traced = body.function.trace(*body.args, **body.kwargs)
    return Traced(subject, exact_types(traced), traced.jaxpr)
