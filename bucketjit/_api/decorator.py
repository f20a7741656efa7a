"""``@bucketjit.jit``: the decorator form of `BucketedExec`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack, overload

from bucketjit import strategies
from bucketjit._api.executor import BucketedExec
from bucketjit._config import DEFAULT_MAXSIZE, Check, CompileBudget, Fallback, Overflow
from bucketjit._signature.parameters import positions_of
from bucketjit.errors import SpecError
from bucketjit.strategies.base import Strategy

Buckets = str | Sequence[int] | Strategy

_NAMED: Mapping[str, Callable[[], Strategy]] = {
    "pow2": strategies.Pow2,
    "exact": strategies.Exact,
}


class Options(TypedDict, total=False):
    """The keyword arguments of `jit`, for type checkers."""

    buckets: Buckets | Mapping[str, Buckets]
    dynamic_axes: Any
    constraints: Sequence[str]
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Sequence[str] | None
    fallback: Fallback
    check: Check
    out: str
    copy_inputs: bool
    overflow: Overflow | str | Mapping[str, Overflow | str]
    compile_budget: CompileBudget | int | None
    compiler_options: Mapping[str, Any] | None
    maxsize: int | None


@overload
def jit(fn: Callable[..., Any], **options: Unpack[Options]) -> BucketedExec: ...


@overload
def jit(
    fn: None = None, **options: Unpack[Options]
) -> Callable[[Callable[..., Any]], BucketedExec]: ...


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    buckets: Buckets | Mapping[str, Buckets] = "pow2",
    dynamic_axes: object = None,
    constraints: Sequence[str] = (),
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    fallback: Fallback = Fallback.EXACT,
    check: Check = Check.OFF,
    out: str = "jax",
    copy_inputs: bool = False,
    overflow: Overflow | str | Mapping[str, Overflow | str] = Overflow.ERROR,
    compile_budget: CompileBudget | int | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    maxsize: int | None = DEFAULT_MAXSIZE,
) -> Any:
    """Compile a function once per bucket of sizes; `BucketedExec` as a decorator.

    Parameters that ``jax.jit`` has too have the same names. The function may be a method: then
    ``self`` is the first argument, a pytree, or static by ``static_argnums=0``.

    Args:
        fn: The function. Left out if the decorator has options: ``@jit(buckets=...)``.
        buckets: ``"pow2"``, ``"exact"``, a list of sizes, or a strategy; or one of these by the
            name of a dimension variable.
        dynamic_axes: Which axes are open, see `BucketedExec`.
        constraints: Conditions that the sizes of every call satisfy, see `BucketedExec`.
        static_argnums: Positions of arguments that are compile-time constants.
        static_argnames: Names of such arguments.
        donate_argnums: Positions of arguments whose buffers may be reused.
        donate_argnames: Names of such arguments; they are donated if passed by position.
        fallback: What to do with calls that cannot be masked.
        check: Checked execution, for tests.
        out: The form of results: ``"jax"``, ``"numpy"`` or ``"padded"``, see `BucketedExec`.
        copy_inputs: Whether NumPy arguments are copied, so that they may be overwritten as soon as
            the call returns, see `BucketedExec`.
        overflow: What to do with sizes beyond the largest bucket, see `BucketedExec.with_overflow`;
            or a dict of that by the name of a dimension variable.
        compile_budget: How much may be compiled, see `CompileBudget`.
        compiler_options: Options of XLA by name.
        maxsize: How many executables to keep; None for no bound.

    Returns:
        The executor, or a decorator that makes it.

    Raises:
        SpecError: An option is malformed.
        StrategyContractError: A strategy in ``buckets`` has no ``bucket`` method.
        TypeError: ``fn`` is not callable, or a bucket is no int.
        ValueError: A list of buckets is empty, or not positive and strictly increasing.

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

    def decorate(fn: Callable[..., Any]) -> BucketedExec:
        named = positions_of(fn, donate_argnames, "donate_argnames")
        by_number = (donate_argnums,) if isinstance(donate_argnums, int) else donate_argnums or ()
        executor = BucketedExec(
            fn,
            dynamic_axes=dynamic_axes,
            constraints=constraints,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=(*by_number, *named),
            fallback=fallback,
            check=check,
            out=out,
            copy_inputs=copy_inputs,
            compile_budget=compile_budget,
            compiler_options=compiler_options,
        ).with_maxsize(maxsize)
        by_dim = overflow if isinstance(overflow, Mapping) else {None: overflow}
        for dim, policy in by_dim.items():
            executor = executor.with_overflow(policy, dim)
        if not isinstance(buckets, Mapping):
            return executor.with_strategy(_strategy(buckets))
        for dim, which in buckets.items():
            executor = executor.with_strategy(_strategy(which), dim)
        return executor

    return decorate if fn is None else decorate(fn)


def _strategy(buckets: Buckets) -> Strategy:
    if isinstance(buckets, str):
        if buckets not in _NAMED:
            raise SpecError(
                f"buckets={buckets!r}: expected one of {sorted(_NAMED)}, a list of sizes, a "
                "strategy such as bucketjit.strategies.Linear(32), or a dict of these by dimension"
            )
        return _NAMED[buckets]()
    if isinstance(buckets, list | tuple):
        return strategies.Boundaries(buckets)
    return buckets  # type: ignore[return-value]  # checked by `with_strategy`
