"""The ``with_...`` methods: each returns a new executor with an empty cache."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from bucketjit import strategies
from bucketjit._config import Config, Persistent
from bucketjit._errors import SpecError, StrategyContractError
from bucketjit._persistence.files import Distrusted, check_directory
from bucketjit._rule import Rule
from bucketjit.strategies.base import Strategy


class Builders:
    """What `BucketedExec` is configured with, one method each."""

    _config: Config

    def _with(self, **changes: Any) -> Self:
        raise AssertionError("implemented by BucketedExec")

    def with_strategy(self, strategy: Strategy, dim: str | None = None) -> Self:
        """Round sizes up with a strategy of your own.

        Args:
            strategy: Any object with ``bucket(n: int) -> int``.
            dim: The dimension variable it is for; all that have none of their own by default.

        Returns:
            A new executor.

        Raises:
            StrategyContractError: It has no ``bucket`` method, or is a class.
        """
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
        self, dim: str | None = None, *, min: int = 1, max: int | None = None, multiple_of: int = 1
    ) -> Self:
        """Round sizes up to powers of two.

        Args:
            dim: The dimension variable; all that have no strategy of their own by default.
            min: The smallest bucket. A floor pays: it saves compiles at almost no padding.
            max: The largest bucket; beyond it `BucketOverflowError`.
            multiple_of: Buckets are rounded up to a multiple of this.

        Returns:
            A new executor.
        """
        return self.with_strategy(strategies.Pow2(min=min, max=max, multiple_of=multiple_of), dim)

    def with_linear(
        self,
        step: int,
        dim: str | None = None,
        *,
        min: int = 1,
        max: int | None = None,
        multiple_of: int = 1,
    ) -> Self:
        """Round sizes up to multiples of ``step``; otherwise like `with_pow2`."""
        return self.with_strategy(
            strategies.Linear(step, min=min, max=max, multiple_of=multiple_of), dim
        )

    def with_exponential(
        self,
        base: float,
        dim: str | None = None,
        *,
        min: int = 1,
        max: int | None = None,
        multiple_of: int = 1,
    ) -> Self:
        """Round sizes up to powers of ``base``; otherwise like `with_pow2`."""
        return self.with_strategy(
            strategies.Exponential(base, min=min, max=max, multiple_of=multiple_of), dim
        )

    def with_buckets(self, buckets: Sequence[int], dim: str | None = None) -> Self:
        """Use these sizes as buckets, and no others; otherwise like `with_pow2`."""
        return self.with_strategy(strategies.Boundaries(buckets), dim)

    def with_exact(self, dim: str | None = None) -> Self:
        """Give every size its own executable; otherwise like `with_pow2`."""
        return self.with_strategy(strategies.Exact(), dim)

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

    def with_persistence(
        self, directory: str | os.PathLike[str] | None, *, max_bytes: int | None = None
    ) -> Self:
        """Keep executables in files, so that the next process loads what this one compiles.

        A process that finds the executable of a bucket there traces the function once, and loads:
        no masking, no lowering, no compile. Without this method the directory ``bucketjit`` in
        JAX's own compilation cache (``jax_compilation_cache_dir``) is used, if JAX has one, for
        what JAX would keep itself.

        Files are found by what their executables depend on: the program, its constants, the types
        and placement of the arguments, versions, device and configuration. Damaged files are
        reported (`PersistenceWarning`) and made again. What cannot be identified soundly is not
        kept, with an event that says why: host callbacks, primitives of other libraries, rules of
        `with_rules`, arguments on several devices.

        **An executable is machine code: whoever can write into the directory can run code as
        you.** A directory that others can write into is refused, and one that is not there is made
        for you alone.

        Args:
            directory: Where; several processes may share it. None to keep none.
            max_bytes: Beyond that, files go that were of use longest ago; None for no bound.

        Returns:
            A new executor.

        Raises:
            SpecError: The directory is a file, or others can write into it.

        Examples:
            >>> import tempfile, numpy as np
            >>> from bucketjit import BucketedExec
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     double = BucketedExec(lambda x: 2 * x).with_pow2().with_persistence(directory)
            ...     _ = double(np.ones(3, np.float32))
            ...     again = double.with_persistence(directory)  # as another process would
            ...     _ = again(np.ones(4, np.float32))
            >>> double.stats().compiles, again.stats().compiles, again.stats().loads
            (1, 0, 1)
        """
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int | None):
            raise SpecError(f"max_bytes must be an int or None, got {max_bytes!r}")
        if max_bytes is not None and max_bytes < 0:
            raise SpecError(f"max_bytes must be 0 or more, got {max_bytes}")
        if directory is None:
            return self._with(persistence=Persistent())
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            raise SpecError(f"directory must be a path or None, got {directory!r}")
        path = Path(os.fspath(directory)).expanduser().absolute()
        try:
            check_directory(path)
        except FileNotFoundError:
            pass  # made when the first executable is written
        except Distrusted as error:
            raise SpecError(f"with_persistence: {error}") from None
        except OSError as error:
            raise SpecError(f"with_persistence: {error}") from None
        return self._with(persistence=Persistent(str(path), max_bytes))
