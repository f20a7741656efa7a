"""`Traced`: the program of a call, and the sizes that it holds for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from bucketjit._compile.bodies import exact_body
from bucketjit._ir.jax_patches import forgetful_jax, selecting_jax
from bucketjit._jax.debug_info import traced_anew
from bucketjit._jax.jaxprs import closed_jaxpr, shaped
from bucketjit._jax.tracebacks import boundary
from bucketjit._stages.lowered import Lowered, lower
from bucketjit._stages.stage import Stage, StageTypes, exact_types, symbolic_types
from bucketjit._stages.subject import Subject


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
    def lower(self, bucket: Mapping[str, int] | None = None) -> Lowered:
        """Lower the program for a bucket.

        Args:
            bucket: Padded size of some variables in the place of those that the strategies choose.

        Returns:
            The module.

        Raises:
            SpecError: ``bucket`` names no variable, has a size below that of the call, or is one
                that the guards do not allow.
            FallbackError: The call cannot be masked, and ``fallback`` is to raise.
            Exception: Whatever ``jax.jit(fn)`` raises for these arguments.

        Examples:
            >>> import jax.numpy as jnp, numpy as np
            >>> from bucketjit import BucketedExec
            >>> total = BucketedExec(jnp.sum, dynamic_axes="n").with_pow2()
            >>> traced = total.trace(np.ones(5, np.float32))
            >>> dict(traced.lower().bucket), dict(traced.lower({"n": 24}).bucket)
            ({'n': 8}, {'n': 24})
        """
        subject = self._subject
        return lower(subject if bucket is None else subject.in_bucket(bucket))


def trace(subject: Subject) -> Traced:
    """The traced form of a call."""
    if not subject.exact:
        program = subject.program
        jaxpr = closed_jaxpr(program.jaxpr, program.consts)
        return Traced(subject, symbolic_types(subject), jaxpr)
    made = exact_body(subject.signed)
    # If tracing fails, JAX must not keep the trace alive.
    with forgetful_jax(), selecting_jax(), traced_anew(), subject.without_computed_sizes():
        traced = made.function.trace(*made.args, **made.kwargs)
    return Traced(subject, exact_types(traced), traced.jaxpr)
