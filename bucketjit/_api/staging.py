"""The methods of a bucketed function that trace, lower and compile ahead of time."""

from __future__ import annotations

from typing import Any

import jax

from bucketjit._jax.tracebacks import boundary
from bucketjit._runtime.engine import Engine
from bucketjit._stages.lowered import Lowered, Traced, lower, trace
from bucketjit._stages.stage import Subject, subject_of


class Staging:
    """The methods of `BucketedExec` for stages ahead of time, as in ``jax.stages``."""

    _engine: Engine
    _inside: Any  # a method of `BucketedExec`

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
            >>> from bucketjit import BucketedExec
            >>> def spread(x):
            ...     return x.max() - x.min() if x.shape[0] > 4 else x.sum()
            >>> traced = BucketedExec(spread, dynamic_axes="n").with_pow2().trace(
            ...     jax.ShapeDtypeStruct((6,), jnp.float32)
            ... )
            >>> traced.guards, traced.in_avals
            (('n >= 5',), ((ShapedArray(float32[n]),), {}))
        """
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
            >>> from bucketjit import BucketedExec
            >>> norm = BucketedExec(jnp.linalg.norm, dynamic_axes="n").with_pow2()
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
        with jax.disable_jit(False):
            return lower(self._subject(args, kwargs))

    def _subject(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Subject:
        return subject_of(self._engine, self._inside, args, kwargs)
