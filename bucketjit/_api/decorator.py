"""``@bucketjit.jit``: the decorator form of `BucketedExec`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Unpack, overload

from bucketjit._api.executor import BucketedExec
from bucketjit._api.options import Options
from bucketjit._runtime.call_path import P, R


@overload
def jit(fn: Callable[P, R], **options: Unpack[Options]) -> BucketedExec[P, R]: ...


@overload
def jit(
    fn: None = None, **options: Unpack[Options]
) -> Callable[[Callable[P, R]], BucketedExec[P, R]]: ...


def jit(fn: Callable[..., Any] | None = None, **options: Unpack[Options]) -> Any:
    """Compile a function once per bucket of sizes; `BucketedExec` as a decorator.

    The parameters are those of `BucketedExec`, which describes them; only the default of
    ``buckets`` differs. Those that ``jax.jit`` has too have the same names. The function may be a
    method: then ``self`` is the first argument, a pytree, or static by ``static_argnums=0``.

    Args:
        fn: The function. Left out if the decorator has options: ``@jit(buckets=...)``.
        dynamic_axes: Which axes are open.
        buckets: ``"auto"`` (the default), which learns them from the calls; ``"pow2"``,
            ``"exact"``, a list of sizes, or a strategy; or one of these by the name of a dimension
            variable.
        overflow: What to do with sizes beyond the largest bucket, or a dict of that by the name of
            a dimension variable.
        constraints: Conditions that the sizes of every call satisfy.
        static_argnums: Positions of arguments that are compile-time constants.
        static_argnames: Names of such arguments.
        donate_argnums: Positions of arguments whose buffers may be reused.
        donate_argnames: Names of such arguments; they are donated if passed by position.
        fallback: What to do with calls that cannot be masked.
        check: Checked execution, for tests.
        out: The form of results: ``"jax"``, ``"numpy"`` or ``"padded"``.
        copy_inputs: Whether NumPy arguments are copied, so that they may be overwritten as soon as
            the call returns.
        maxsize: How many executables to keep; None for no bound.
        compile_budget: How much may be compiled, see `CompileBudget`.
        compiler_options: Options of XLA by name.
        warn_after: How many executables calls compile before a warning tells which axis varied.
        in_shardings: Not an option, see `BucketedExec`.
        out_shardings: Not an option, see `BucketedExec`.

    Returns:
        The bucketed function, or a decorator that makes it.

    Raises:
        SpecError, StrategyContractError, TypeError, ValueError: What `BucketedExec` raises.

    Examples:
        >>> import bucketjit, jax.numpy as jnp, numpy as np
        >>> @bucketjit.jit(buckets=[4, 16], dynamic_axes="n")
        ... def spread(x):
        ...     '''Largest minus smallest.'''
        ...     return x.max() - x.min()
        >>> float(spread(np.arange(3.0))), float(spread(np.arange(9.0)))
        (2.0, 8.0)
        >>> spread.cache_size(), spread.__doc__
        (2, 'Largest minus smallest.')
    """
    options.setdefault("buckets", "auto")
    if fn is None:
        return functools.partial(BucketedExec, **options)
    return BucketedExec(fn, **options)
