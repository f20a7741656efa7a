"""The ``with_...`` methods about sizes and masks; each returns a new bucketed function."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from bucketjit import strategies
from bucketjit._api.options import (
    DynamicAxes,
    OverflowName,
    Sizes,
    StrategyName,
    checked_dim,
    overflow_policy,
    strategy_of,
)
from bucketjit._api.served import Served
from bucketjit._config import Overflow
from bucketjit._runtime.call_path import P, R
from bucketjit.errors import SpecError
from bucketjit.strategies.base import Strategy, checked_sizes, checked_strategy

if TYPE_CHECKING:
    from bucketjit._masking.rule_context import Rule


class BucketBuilders(Served[P, R]):
    """The methods that choose buckets, open axes and masking rules."""

    def with_strategy(
        self,
        strategy: Strategy | StrategyName,
        dim: str | None = None,
        *,
        overflow: Overflow | OverflowName | None = None,
    ) -> Self:
        """Round sizes up with a strategy of your own.

        Args:
            strategy: Any object with ``bucket(n: int) -> int``, or a name that ``buckets=`` takes.
            dim: The dimension variable it is for; by default all without a strategy of their own.
            overflow: What happens to sizes beyond its largest bucket, see `with_overflow`; by
                default the policy stays.

        Returns:
            A new bucketed function.

        Raises:
            StrategyContractError: ``strategy`` has no ``bucket`` method, or is a class.
            SpecError: ``dim`` is no name, or there is no such overflow policy or strategy.
        """
        if overflow is not None:
            return self.with_overflow(overflow, dim).with_strategy(strategy, dim)
        is_name = isinstance(strategy, str) and not strategy.isdecimal()
        strategy = (strategy_of if is_name else checked_strategy)("strategy", strategy)
        if dim is None:
            return self._with(default=strategy)
        per_dim = {**self._config.per_dim, checked_dim(dim): strategy}
        return self._with(per_dim=MappingProxyType(per_dim))

    def with_pow2(
        self,
        dim: str | None = None,
        *,
        min: int = 1,
        max: int | None = None,
        multiple_of: int = 1,
        overflow: Overflow | OverflowName | None = None,
    ) -> Self:
        """Round sizes up to powers of two.

        Args:
            dim: The dimension variable; by default all without a strategy of their own.
            min: The smallest bucket. More than 1 saves compiles at almost no padding.
            max: The largest bucket; None for no limit.
            multiple_of: Buckets are rounded up to a multiple of this.
            overflow: What happens to sizes beyond ``max``, see `with_overflow`; by default the
                policy stays, which at first is to raise `BucketOverflowError`.

        Returns:
            A new bucketed function.

        Raises:
            TypeError, ValueError: A parameter is not as `strategies.Pow2` takes it.
            SpecError: ``dim`` is no name, or there is no such overflow policy.
        """
        strategy = strategies.Pow2(min=min, max=max, multiple_of=multiple_of)
        return self.with_strategy(strategy, dim, overflow=overflow)

    def with_linear(
        self,
        step: int,
        dim: str | None = None,
        *,
        min: int = 1,
        max: int | None = None,
        multiple_of: int = 1,
        overflow: Overflow | OverflowName | None = None,
    ) -> Self:
        """Round sizes up to multiples of ``step``; otherwise like `with_pow2`.

        Args:
            step: The distance between two buckets.
            dim: See `with_pow2`.
            min: The smallest bucket is the first multiple of ``step`` that is at least this.
            max: See `with_pow2`.
            multiple_of: See `with_pow2`.
            overflow: See `with_pow2`.

        Returns:
            A new bucketed function.

        Raises:
            TypeError, ValueError: A parameter is not as `strategies.Linear` takes it.
            SpecError: ``dim`` is no name, or there is no such overflow policy.
        """
        strategy = strategies.Linear(step, min=min, max=max, multiple_of=multiple_of)
        return self.with_strategy(strategy, dim, overflow=overflow)

    def with_exponential(
        self,
        base: float,
        dim: str | None = None,
        *,
        min: int = 1,
        max: int | None = None,
        multiple_of: int = 1,
        overflow: Overflow | OverflowName | None = None,
    ) -> Self:
        """Round sizes up to powers of ``base``; otherwise like `with_pow2`.

        Args:
            base: The ratio of two neighbouring buckets, at least 1.001.
            dim: See `with_pow2`.
            min: The smallest bucket, at which the powers start.
            max: See `with_pow2`.
            multiple_of: See `with_pow2`.
            overflow: See `with_pow2`.

        Returns:
            A new bucketed function.

        Raises:
            TypeError, ValueError: A parameter is not as `strategies.Exponential` takes it.
            SpecError: ``dim`` is no name, or there is no such overflow policy.
        """
        strategy = strategies.Exponential(base, min=min, max=max, multiple_of=multiple_of)
        return self.with_strategy(strategy, dim, overflow=overflow)

    def with_buckets(
        self,
        buckets: Sizes,
        dim: str | None = None,
        *,
        overflow: Overflow | OverflowName | None = None,
    ) -> Self:
        """Use these sizes as buckets, and no others; otherwise like `with_pow2`.

        Args:
            buckets: The buckets: a list, an array or a range of ints above 0 in increasing order.
            dim: See `with_pow2`.
            overflow: See `with_pow2`.

        Returns:
            A new bucketed function.

        Raises:
            SpecError: ``buckets`` is not as `strategies.Boundaries` takes it, ``dim`` is no name,
                or there is no such overflow policy.
        """
        strategy = strategies.Boundaries(checked_sizes("buckets", buckets))
        return self.with_strategy(strategy, dim, overflow=overflow)

    def with_exact(self, dim: str | None = None) -> Self:
        """Give every size its own executable.

        Args:
            dim: See `with_pow2`.

        Returns:
            A new bucketed function.

        Raises:
            SpecError: ``dim`` is no name.
        """
        return self.with_strategy(strategies.Exact(), dim)

    def with_overflow(self, policy: Overflow | OverflowName, dim: str | None = None) -> Self:
        """Choose what happens to sizes beyond the largest bucket.

        Args:
            policy: A member of `Overflow`, or its name: ``"error"`` (the default), ``"extend"``
                or ``"exact"``.
            dim: The dimension variable; by default all without a policy of their own.

        Returns:
            A new bucketed function.

        Raises:
            SpecError: There is no such policy, or ``dim`` is no name.

        Examples:
            >>> import numpy as np
            >>> import bucketjit
            >>> rows = bucketjit.jit(lambda x: x.sum(axis=1), buckets=[4, 8])
            >>> extended = rows.with_overflow("extend")
            >>> extended(np.ones((19, 2), np.float32)).shape
            (19,)
            >>> [dict(bucket.sizes) for bucket in extended.stats().buckets]
            [{'batch': 32}]
        """
        chosen = overflow_policy("the overflow policy", policy)
        if dim is None:
            return self._with(overflow=chosen)
        policies = {**self._config.overflow_per_dim, checked_dim(dim): chosen}
        return self._with(overflow_per_dim=MappingProxyType(policies))

    def with_dynamic_axes(self, spec: DynamicAxes) -> Self:
        """Declare the open axes; see ``dynamic_axes`` of the class."""
        return self._with(dynamic_axes=spec)

    def with_rules(self, rules: Mapping[Any, Rule]) -> Self:
        """Add masking rules, or replace some.

        Args:
            rules: Primitive to ``rule(ctx, *operands)``, see `RuleContext`.

        Returns:
            A new bucketed function.

        Raises:
            SpecError: ``rules`` is no mapping to functions.

        Examples:
            >>> from jax import lax
            >>> import numpy as np
            >>> import bucketjit
            >>> def product(ctx, operand):
            ...     return ctx.bind(ctx.fill(operand, axes=ctx.params["axes"], value=1))
            >>> total = bucketjit.jit(lambda x: x.prod(), buckets="pow2")
            >>> total = total.with_rules({lax.reduce_prod_p: product})
            >>> float(total(np.full(3, 2.0, np.float32)))
            8.0
        """
        if not isinstance(rules, Mapping) or not all(map(callable, rules.values())):
            raise SpecError(f"rules must map primitives to functions, got {rules!r}")
        return self._with(rules=MappingProxyType({**self._config.rules, **rules}))
