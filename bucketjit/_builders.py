"""The ``with_...`` methods: each returns a new executor with an empty cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from bucketjit import strategies
from bucketjit._config import Config, Overflow
from bucketjit._errors import SpecError, StrategyContractError
from bucketjit._rule import Rule
from bucketjit.strategies.base import Strategy


class Builders:
    """What `BucketedExec` is configured with, one method each."""

    _config: Config

    def _with(self, **changes: Any) -> Self:
        raise AssertionError("implemented by BucketedExec")

    def with_strategy(
        self,
        strategy: Strategy,
        dim: str | None = None,
        *,
        overflow: Overflow | str | None = None,
    ) -> Self:
        """Round sizes up with a strategy of your own.

        Args:
            strategy: Any object with ``bucket(n: int) -> int``.
            dim: The dimension variable it is for; all that have none of their own by default.
            overflow: What happens to sizes beyond its largest bucket, see `with_overflow`; as it
                is by default.

        Returns:
            A new executor.

        Raises:
            StrategyContractError: It has no ``bucket`` method, or is a class.
        """
        if overflow is not None:
            return self.with_overflow(overflow, dim).with_strategy(strategy, dim)
        if isinstance(strategy, type) or not callable(getattr(strategy, "bucket", None)):
            raise StrategyContractError(
                f"a strategy is an object with a method bucket(n) -> int, got {strategy!r}"
            )
        if dim is None:
            return self._with(default=strategy)
        if not isinstance(dim, str):
            raise SpecError(f"dim must be the name of a dimension variable, got {dim!r}")
        return self._with(per_dim=MappingProxyType({**self._config.per_dim, dim: strategy}))

    def with_pow2(
        self,
        dim: str | None = None,
        *,
        min: int = 1,
        max: int | None = None,
        multiple_of: int = 1,
        overflow: Overflow | str | None = None,
    ) -> Self:
        """Round sizes up to powers of two.

        Args:
            dim: The dimension variable; all that have no strategy of their own by default.
            min: The smallest bucket. A floor pays: it saves compiles at almost no padding.
            max: The largest bucket.
            multiple_of: Buckets are rounded up to a multiple of this.
            overflow: What happens to sizes beyond ``max``, see `with_overflow`;
                `BucketOverflowError` unless it was said before.

        Returns:
            A new executor.
        """
        return self.with_strategy(
            strategies.Pow2(min=min, max=max, multiple_of=multiple_of), dim, overflow=overflow
        )

    def with_linear(
        self,
        step: int,
        dim: str | None = None,
        *,
        min: int = 1,
        max: int | None = None,
        multiple_of: int = 1,
        overflow: Overflow | str | None = None,
    ) -> Self:
        """Round sizes up to multiples of ``step``; otherwise like `with_pow2`."""
        return self.with_strategy(
            strategies.Linear(step, min=min, max=max, multiple_of=multiple_of),
            dim,
            overflow=overflow,
        )

    def with_exponential(
        self,
        base: float,
        dim: str | None = None,
        *,
        min: int = 1,
        max: int | None = None,
        multiple_of: int = 1,
        overflow: Overflow | str | None = None,
    ) -> Self:
        """Round sizes up to powers of ``base``; otherwise like `with_pow2`."""
        return self.with_strategy(
            strategies.Exponential(base, min=min, max=max, multiple_of=multiple_of),
            dim,
            overflow=overflow,
        )

    def with_buckets(
        self,
        buckets: Sequence[int],
        dim: str | None = None,
        *,
        overflow: Overflow | str | None = None,
    ) -> Self:
        """Use these sizes as buckets, and no others; otherwise like `with_pow2`."""
        return self.with_strategy(strategies.Boundaries(buckets), dim, overflow=overflow)

    def with_exact(self, dim: str | None = None) -> Self:
        """Give every size its own executable; otherwise like `with_pow2`."""
        return self.with_strategy(strategies.Exact(), dim)

    def with_overflow(self, policy: Overflow | str, dim: str | None = None) -> Self:
        """Say what happens to sizes beyond the largest bucket.

        Args:
            policy: A member of `Overflow`, or its name: ``"error"`` (as without this),
                ``"extend"``, ``"exact"`` or ``"split"``.
            dim: The dimension variable; all that have no policy of their own by default.

        Returns:
            A new executor.

        Raises:
            SpecError: There is no such policy, or ``dim`` is no name.

        Examples:
            >>> import numpy as np
            >>> from bucketjit import BucketedExec
            >>> rows = BucketedExec(lambda x: x.sum(axis=1)).with_buckets([4, 8])
            >>> rows.with_overflow("split")(np.ones((19, 2), np.float32)).shape  # 8, 8 and 3
            (19,)
            >>> extended = rows.with_overflow("extend")
            >>> extended(np.ones((19, 2), np.float32)).shape
            (19,)
            >>> [dict(bucket.sizes) for bucket in extended.stats().buckets]
            [{'batch': 32}]
        """
        try:
            policy = Overflow(policy)
        except ValueError:
            names = ", ".join(repr(member.value) for member in Overflow)
            raise SpecError(
                f"the overflow policy must be a member of bucketjit.Overflow or one of {names}, "
                f"got {policy!r}"
            ) from None
        if dim is None:
            return self._with(overflow=policy)
        if not isinstance(dim, str):
            raise SpecError(f"dim must be the name of a dimension variable, got {dim!r}")
        policies = {**self._config.overflow_per_dim, dim: policy}
        return self._with(overflow_per_dim=MappingProxyType(policies))

    def with_dynamic_axes(self, spec: Any) -> Self:
        """Declare the open axes; see ``dynamic_axes`` of the class."""
        return self._with(dynamic_axes=spec)

    def with_rules(self, rules: Mapping[Any, Rule]) -> Self:
        """Add masking rules, or replace some.

        Args:
            rules: Primitive to ``rule(ctx, *operands)``, see `RuleContext`.

        Returns:
            A new executor.

        Examples:
            >>> from jax import lax
            >>> import numpy as np
            >>> from bucketjit import BucketedExec
            >>> def product(ctx, operand):
            ...     return ctx.bind(ctx.fill(operand, axes=ctx.params["axes"], value=1))
            >>> total = BucketedExec(lambda x: x.prod()).with_pow2()
            >>> total = total.with_rules({lax.reduce_prod_p: product})
            >>> float(total(np.full(3, 2.0, np.float32)))
            8.0
        """
        if not isinstance(rules, Mapping) or not all(map(callable, rules.values())):
            raise SpecError(f"rules must map primitives to functions, got {rules!r}")
        return self._with(rules=MappingProxyType({**self._config.rules, **rules}))

    def with_maxsize(self, maxsize: int | None) -> Self:
        """Bound the number of executables kept; the least recently used goes first.

        Args:
            maxsize: How many; None for no bound. An executable takes 73-145 memory maps of the
                system's 65,530, so some 450 of them end the process.

        Returns:
            A new executor.
        """
        wrong = isinstance(maxsize, bool) or not isinstance(maxsize, int | None)
        if wrong or (maxsize is not None and maxsize < 1):
            raise SpecError(f"maxsize must be a positive int or None, got {maxsize!r}")
        return self._with(maxsize=maxsize)
