"""The exceptions and warnings of bucketjit.

::

    Exception
    └── BucketJitError                    everything bucketjit raises on purpose
        ├── SpecError (ValueError)        a malformed ``dynamic_axes``, constraint or option
        ├── ArgumentError (TypeError)     the arguments of a call do not fit what was declared
        │   ├── SizeMismatchError         one dimension variable was given two sizes
        │   └── MutationError             the function changes an argument, which would be lost
        ├── StrategyError (ValueError)    a bucket could not be chosen
        │   ├── BucketOverflowError       a size is beyond the largest bucket
        │   └── StrategyContractError     a strategy broke ``bucket(n) >= n`` and its like
        ├── AgreementError (RuntimeError)  the processes of a job do not agree on a call
        ├── CompileBudgetError (RuntimeError)  a call needs a compile beyond the budget
        ├── ExportError (ValueError)      a function or a module cannot be exported, read or refined
        ├── MissingExtraError (ImportError)  an optional package is not installed
        ├── VersionError (ImportError)    this JAX lacks names that bucketjit needs
        ├── ShapeCheckError (TypeError)   these sizes would fail unpadded too (a reshape, say)
        └── MaskingError                  the program cannot be masked (or was masked wrongly)
            ├── FallbackError             masking was refused and ``fallback="error"`` is set
            └── SelectionError (IndexError, TypeError)  a size is computed where JAX allows none

    UserWarning
    ├── FallbackWarning                   a call ran at its exact shape, with the reason
    ├── CompileBudgetWarning              a compile beyond the budget
    ├── InlinedWarning                    a call inside ``jax.jit`` and the like is not bucketed
    ├── RecompileWarning                  a function compiles for each size, or beyond its buckets
    └── PersistenceWarning                a file of executables is damaged, or cannot be used

Each class also derives from the built-in exception that plain JAX or Python raises in the
same situation, so code that already handles ``TypeError`` or ``ValueError`` keeps working.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

__all__ = [
    "AgreementError",
    "ArgumentError",
    "ArtifactError",
    "BucketJitError",
    "BucketOverflowError",
    "CompileBudgetError",
    "CompileBudgetWarning",
    "ExportError",
    "FallbackError",
    "FallbackWarning",
    "InlinedWarning",
    "MaskingError",
    "MissingExtraError",
    "MutationError",
    "PersistenceWarning",
    "RecompileWarning",
    "SelectionError",
    "ShapeCheckError",
    "SizeMismatchError",
    "SpecError",
    "StrategyContractError",
    "StrategyError",
    "VersionError",
]


class BucketJitError(Exception):
    """Base of every exception that bucketjit raises on purpose."""


class SpecError(BucketJitError, ValueError):
    """A specification (``dynamic_axes``, a constraint, an option) is malformed."""


class ArgumentError(BucketJitError, TypeError):
    """The arguments of a call do not fit their declaration, such as ``dynamic_axes``."""


class SizeMismatchError(ArgumentError):
    """One dimension variable was bound to two different sizes in one call."""


class MutationError(ArgumentError):
    """The function changes an object among its arguments in place, and the change would be lost.

    A function is traced with copies of its arguments. What it changes in a module, an optimizer or
    another object of a pytree class changes the copy, unless the function returns it. In plain
    dicts and lists a change is left alone, as in ``jit``.

    Attributes:
        leaves: The paths of the leaves that were changed.

    Examples:
        >>> import dataclasses, jax, numpy as np, bucketjit
        >>> @jax.tree_util.register_dataclass
        ... @dataclasses.dataclass
        ... class Mean:
        ...     total: jax.Array
        >>> @bucketjit.jit
        ... def add(mean, x):
        ...     mean.total = mean.total + x.sum()
        >>> try:
        ...     add(Mean(np.float32(0)), np.ones(3, np.float32))
        ... except bucketjit.errors.MutationError as error:
        ...     print(error.leaves)
        ('mean.total',)
    """

    def __init__(self, message: str, leaves: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.leaves = leaves


class StrategyError(BucketJitError, ValueError):
    """A strategy could not choose a bucket."""


class BucketOverflowError(StrategyError):
    """A size is larger than the largest bucket.

    Attributes:
        size: The logical size.
        largest: The largest bucket.
        dim: Name of the dimension variable; None if it is not known.
    """

    def __init__(self, size: int, largest: int, dim: str | None = None) -> None:
        self.size = size
        self.largest = largest
        self.dim = dim
        what = f"dimension {dim!r}" if dim else "a dimension"
        super().__init__(
            f"{what} has size {size}, beyond the largest bucket {largest}; raise the strategy's "
            f"max (or add a bucket of at least {size} to the list), or choose overflow='extend' "
            "or 'exact'"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.size, self.largest, self.dim)


class StrategyContractError(StrategyError):
    """A strategy broke its contract (``bucket(n) >= n``, an int, idempotent)."""


class CompileBudgetError(BucketJitError, RuntimeError):
    """A call needs a compile, and the compile budget of the bucketed function is spent."""


class AgreementError(BucketJitError, RuntimeError):
    """The processes of a job do not agree on a call, so none of them runs it.

    It is raised on every process: where processes call different programs, where one of them
    cannot pad its call to a bucket, and where one has raised or does not come in time.

    Attributes:
        step: The number of the call, counted from 1.
        processes: What processes did, by index: all of them where their calls differ, else those
            that are late or have failed.
    """

    def __init__(self, message: str, step: int = 0, processes: Mapping[int, str] = {}) -> None:
        super().__init__(message)
        self.step, self.processes = step, dict(processes)


class ExportError(BucketJitError, ValueError):
    """A function cannot be exported as asked, or a module cannot be read or refined."""


class ArtifactError(BucketJitError, ValueError):
    """A ``.bkt`` file cannot be written, read or trusted, or does not hold what a call needs."""


class MissingExtraError(BucketJitError, ImportError):
    """A feature needs an optional package that is not installed; the message names it."""


class VersionError(BucketJitError, ImportError):
    """This version of JAX lacks names that bucketjit needs; the message lists them."""


class ShapeCheckError(BucketJitError, TypeError):
    """The sizes of a call break a shape rule that the unpadded function enforces, too."""


_PLACE = re.compile(r"\[[^\[\]]+:\d+(:\d+)? \(")  # [file.py:12:5 (function)]


class MaskingError(BucketJitError):
    """A program cannot be masked.

    Attributes:
        reason: One line: which primitive, which axis, why.
        remedy: What the user can do about it, or an empty string.
        is_defect: Whether a masking rule failed or made a wrong result, instead of refusing.
        in_bucket: Whether this is about one bucket, so that other buckets may be masked. True for
            every defect.
    """

    def __init__(
        self, reason: str, remedy: str = "", *, is_defect: bool = False, in_bucket: bool = False
    ) -> None:
        self.reason = reason
        self.remedy = remedy
        self.is_defect = is_defect
        self.in_bucket = in_bucket or is_defect
        super().__init__(f"{reason} ({remedy})" if remedy else reason)

    @property
    def names_a_line(self) -> bool:
        """Whether the reason names a line of code."""
        return _PLACE.search(self.reason) is not None

    def without_frames(self) -> Self:
        """A copy of the error without its traceback, to be stored.

        The frames of a traceback hold the arguments of the call, and each ``raise`` adds frames.
        So a stored error is not raised: a copy of it is.

        Returns:
            The copy.
        """
        # Without `__init__`, whose parameters differ from class to class.
        kept = type(self).__new__(type(self), *self.args)
        kept.__dict__.update(self.__dict__)
        return kept


class FallbackError(MaskingError):
    """Masking was refused, and ``fallback`` is ``"error"``."""


class SelectionError(MaskingError, IndexError, TypeError):
    """A function computes a size where neither bucketjit nor eager JAX can, as under ``jax.vmap``.

    Its cause is the error of JAX.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, bucketjit
        >>> sums = bucketjit.jit(lambda x: jax.vmap(lambda row: row[row > 0].sum())(x))
        >>> try:
        ...     sums(np.ones((3, 2), np.float32))
        ... except bucketjit.errors.SelectionError as error:
        ...     print(error.reason[:60])
        vmap over a selection whose size differs from row to row [<d
    """


class FallbackWarning(UserWarning):
    """A call ran at its exact shape; the message says why.

    It is shown once per reason. After 64 reasons of a bucketed function, it is shown once more for
    all further ones.
    """


class CompileBudgetWarning(UserWarning):
    """An executable was compiled beyond the compile budget."""


class InlinedWarning(UserWarning):
    """A bucketed function with a strategy is called inside ``jit``, ``vmap`` and the like.

    The function itself runs there, and nothing is padded. It is shown once per bucketed function.

    Examples:
        >>> import warnings, jax, jax.numpy as jnp, numpy as np, bucketjit
        >>> total = bucketjit.jit(jnp.sum)
        >>> with warnings.catch_warnings(record=True) as told:
        ...     warnings.simplefilter("always")
        ...     _ = jax.jit(total)(np.ones(3, np.float32))
        >>> print(str(told[0].message)[:68])
        sum is called inside jax.jit, scan or another function that JAX trac
        >>> total.stats().inlined_calls
        1
    """


class RecompileWarning(UserWarning):
    """A function compiles again and again; the message says what varied, and the cure.

    It is shown once per bucketed function: at the third size of a function without a strategy; once
    more executables than ``warn_after`` were compiled, or compiled again as the cache is too small;
    or once compiling has taken seconds, and most of the time since the first calls.

    Examples:
        >>> import warnings, jax.numpy as jnp, numpy as np, bucketjit
        >>> mean = bucketjit.BucketedExec(jnp.mean)
        >>> _ = mean.with_pow2()  # a new executor, which is thrown away
        >>> with warnings.catch_warnings(record=True) as told:
        ...     warnings.simplefilter("always")
        ...     for n in (3, 5, 6, 7):
        ...         _ = mean(np.ones(n, np.float32))
        >>> [warning.category.__name__ for warning in told]
        ['RecompileWarning']
        >>> print(str(told[0].message)[:74])
        mean compiles for each size: axis 0 of a varied, 3 sizes: 3, 5, 6. Without
    """


class PersistenceWarning(UserWarning):
    """A file of executables, or its directory, is damaged or cannot be used.

    It is shown once for each kind of problem. The executable is compiled instead.
    """
