"""The exceptions and warnings of bucketjit.

::

    Exception
    └── BucketJitError                    everything bucketjit raises on purpose
        ├── SpecError (ValueError)        a malformed ``dynamic_axes``, constraint or option
        ├── ArgumentError (TypeError)     the arguments of a call do not fit what was declared
        │   └── SizeMismatchError         one dimension variable was given two sizes
        ├── StrategyError (ValueError)    a bucket could not be chosen
        │   ├── BucketOverflowError       a size is beyond the largest bucket
        │   │   └── SplitError            and the call cannot be split into chunks
        │   └── StrategyContractError     a strategy broke ``bucket(n) >= n`` and its like
        ├── CompileBudgetError (RuntimeError)  a compile that is not allowed any more
        ├── MissingExtraError (ImportError)  an optional package is not installed
        ├── VersionError (ImportError)    this JAX lacks names that bucketjit cannot do without
        ├── ShapeCheckError (TypeError)   these sizes would fail unpadded too (a reshape, say)
        └── MaskingError                  the program cannot be masked (or was masked wrongly)
            └── FallbackError             masking was refused and ``Fallback.ERROR`` is set

    UserWarning
    ├── FallbackWarning                   a call ran at its exact shape, with the reason
    ├── CompileBudgetWarning              a compile beyond what was allowed
    ├── PersistenceWarning                a file of executables is damaged, or cannot be used
    └── VersionWarning                    this JAX lacks names, and features are left out

Each class also derives from the built-in exception that plain JAX or Python raises in the
same situation, so code that already handles ``TypeError`` or ``ValueError`` keeps working.
"""

from __future__ import annotations

import re
import sys
from typing import Any, Self


class BucketJitError(Exception):
    """Base of every exception that bucketjit raises on purpose."""


class SpecError(BucketJitError, ValueError):
    """A specification (``dynamic_axes``, a constraint, an option) is malformed."""


class ArgumentError(BucketJitError, TypeError):
    """The arguments of a call do not fit what was declared for them."""


class SizeMismatchError(ArgumentError):
    """One dimension variable was bound to two different sizes in one call."""


class StrategyError(BucketJitError, ValueError):
    """A strategy could not choose a bucket."""


class BucketOverflowError(StrategyError):
    """A size is larger than the largest bucket.

    Attributes:
        size: The logical size that was asked for.
        largest: The largest bucket there is.
        dim: Name of the dimension variable, where it is known.
    """

    def __init__(self, size: int, largest: int, dim: str | None = None) -> None:
        self.size = size
        self.largest = largest
        self.dim = dim
        what = f"dimension {dim!r}" if dim else "a dimension"
        super().__init__(
            f"{what} has size {size}, beyond the largest bucket {largest}; raise the strategy's "
            f"max (or add a boundary of at least {size}), choose Overflow.EXTEND, EXACT or SPLIT, "
            "or split the input"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.size, self.largest, self.dim)


class SplitError(BucketOverflowError):
    """A size is larger than the largest bucket, and the call cannot be split along it.

    Attributes:
        reason: One line: which equation does not keep the chunks apart, and why.
        remedy: What the user can do about it, or an empty string.
    """

    def __init__(
        self, size: int, largest: int, dim: str | None, reason: str, remedy: str = ""
    ) -> None:
        super().__init__(size, largest, dim)
        self.reason = reason
        self.remedy = remedy
        advice = f"{remedy}; or " if remedy else ""
        self.args = (
            f"dimension {dim!r} has size {size}, beyond the largest bucket {largest}, and the call "
            f"cannot be split along it: {reason} ({advice}choose Overflow.EXTEND or "
            "Overflow.EXACT, or raise the largest bucket)",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.size, self.largest, self.dim, self.reason, self.remedy)


class StrategyContractError(StrategyError):
    """A strategy broke its contract (``bucket(n) >= n``, an int, idempotent)."""


class CompileBudgetError(BucketJitError, RuntimeError):
    """A call needs an executable to be compiled, which is not allowed any more."""


class MissingExtraError(BucketJitError, ImportError):
    """Something needs an optional package that is not installed; the message says which."""


class VersionError(BucketJitError, ImportError):
    """This version of JAX lacks names that bucketjit cannot do without; the message says which."""


class ShapeCheckError(BucketJitError, TypeError):
    """The call's sizes break a shape rule that the unpadded function would enforce too."""


_PLACE = re.compile(r"\[[^\[\]]+:\d+(:\d+)? \(")  # [file.py:12:5 (function)]


class MaskingError(BucketJitError):
    """A program cannot be masked.

    Attributes:
        reason: One line: which primitive, which axis, why.
        remedy: What the user can do about it, or an empty string.
        is_defect: Whether a rule failed, where others refuse.
        in_bucket: Whether that is so in one bucket, and another one may do.
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
        """Whether the reason says which line of code it is about."""
        return _PLACE.search(self.reason) is not None

    def without_frames(self) -> Self:
        """The same, to be kept: an error that was raised holds the arguments of its call.

        Each raise adds to what it holds, so what is kept is not raised itself.
        """
        kept = type(self).__new__(type(self), *self.args)
        kept.__dict__.update(self.__dict__)
        return kept


class FallbackError(MaskingError):
    """Masking was refused, and the policy is ``Fallback.ERROR``."""


class FallbackWarning(UserWarning):
    """A call ran at its exact shape; the message says why.

    Shown once per reason; of all reasons beyond the first 64 of an executor, once.
    """


class CompileBudgetWarning(UserWarning):
    """An executable was compiled beyond the compile budget."""


class PersistenceWarning(UserWarning):
    """A file of executables, or its directory, is damaged or cannot be used.

    Shown once for each kind of problem; the executable is compiled in its place.
    """


class VersionWarning(UserWarning):
    """This version of JAX lacks names that bucketjit uses; the message says what is left out."""


#: Status codes of XLA that tell of the device or the moment, and not of the program.
_STATUSES_OF_MACHINE = (
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "ABORTED",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
)


def is_of_machine(error: BaseException) -> bool:
    """Whether an error tells of the machine and the moment, and nothing of the function.

    Such errors are want of memory, recursion that is too deep for the stack at hand, files and
    connections, interrupts, and a plain ``RuntimeError``, of which nothing is known. They are
    raised to the caller unchanged, and nothing is learnt from them: the same call may succeed a
    moment later.

    A ``RuntimeError`` of a class of its own says what it is about, and is of the function:
    ``NotImplementedError``, einops' errors, JAX's unless its status is one of the device. An error
    with an explicit cause is what its cause is.
    """
    seen: set[int] = set()
    told: BaseException | None = error
    while told is not None and id(told) not in seen:
        seen.add(id(told))
        if isinstance(told, MemoryError | OSError | RecursionError):
            return True
        if not isinstance(told, Exception):
            return True
        if type(told).__name__ == "JaxRuntimeError":  # this module does not import JAX
            return str(told).startswith(_STATUSES_OF_MACHINE)
        cause, _ = _cause_and_context(told)
        if cause is None and type(told) is RuntimeError:
            return True
        told = cause
    return False


def handled_before(error: BaseException) -> BaseException | None:
    """The error that was being handled when another one was raised."""
    return _cause_and_context(error)[1]


# What JAX sets as the cause of an error to show a traceback. The real cause and context move there.
_TRACEBACKS = ("JaxStackTraceBeforeTransformation", "UnfilteredStackTrace")


def _cause_and_context(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    while error.__cause__ is not None and type(error.__cause__).__name__ in _TRACEBACKS:
        error = error.__cause__
    return error.__cause__, error.__context__


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for use inside another one."""
    return (str(error).strip().splitlines() or [""])[0]


def in_one_line(error: BaseException) -> str:
    """The type of an error and the first line of its message, for use inside another one."""
    return f"{type(error).__name__}: {first_line(error)}"


def frames_inside() -> int:
    """The ``stacklevel`` at which a warning of the caller's points to the code of the user."""
    depth = 1
    while sys._getframe(depth).f_globals.get("__name__", "").startswith(("bucketjit.", "jax.")):
        depth += 1
    return depth
