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
        ├── CompileBudgetError (RuntimeError)  a call needs a compile beyond the budget
        ├── ExportError (ValueError)      a function or a module cannot be exported, read or refined
        ├── MissingExtraError (ImportError)  an optional package is not installed
        ├── VersionError (ImportError)    this JAX lacks names that bucketjit needs
        ├── ShapeCheckError (TypeError)   these sizes would fail unpadded too (a reshape, say)
        └── MaskingError                  the program cannot be masked (or was masked wrongly)
            └── FallbackError             masking was refused and ``Fallback.ERROR`` is set

    UserWarning
    ├── FallbackWarning                   a call ran at its exact shape, with the reason
    ├── CompileBudgetWarning              a compile beyond the budget
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
    """The arguments of a call do not fit their declaration, such as ``dynamic_axes``."""


class SizeMismatchError(ArgumentError):
    """One dimension variable was bound to two different sizes in one call."""


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
            f"max (or add a boundary of at least {size}), choose Overflow.EXTEND, EXACT or SPLIT, "
            "or split the input"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.size, self.largest, self.dim)


class SplitError(BucketOverflowError):
    """A size is larger than the largest bucket, and the call cannot be split along it.

    Attributes:
        reason: One line: which equation mixes the chunks, and why.
        remedy: What the user can do about it, or an empty string.
    """

    def __init__(
        self, size: int, largest: int, dim: str | None, reason: str, remedy: str = ""
    ) -> None:
        super().__init__(size, largest, dim)
        self.reason = reason
        self.remedy = remedy
        advice = f"{remedy}; or " if remedy else ""
        # Replaces the message of the base class.
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
    """A call needs a compile, and the compile budget of the executor is spent."""


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
    """Masking was refused, and the policy is ``Fallback.ERROR``."""


class FallbackWarning(UserWarning):
    """A call ran at its exact shape; the message says why.

    It is shown once per reason. After 64 reasons of an executor, it is shown once more for all
    further ones.
    """


class CompileBudgetWarning(UserWarning):
    """An executable was compiled beyond the compile budget."""


class PersistenceWarning(UserWarning):
    """A file of executables, or its directory, is damaged or cannot be used.

    It is shown once for each kind of problem. The executable is compiled instead.
    """


class VersionWarning(UserWarning):
    """This version of JAX lacks names that bucketjit uses; the message says what is left out."""


#: Status codes of XLA for errors that the device or the moment causes, not the program.
_STATUSES_OF_MACHINE = (
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "ABORTED",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
)


def is_of_machine(error: BaseException) -> bool:
    """Whether the machine or the moment caused an error, not the user's function.

    Such errors are missing memory, recursion too deep for the stack, errors of files and
    connections, interrupts, and a plain ``RuntimeError``, which may be anything. They are raised to
    the caller unchanged, and the call is not refused in future: it may succeed a moment later.

    A subclass of ``RuntimeError`` is about the function: ``NotImplementedError``, einops' errors,
    and JAX's unless its status is one of the device. An error with an explicit cause is judged by
    its cause, too.

    Args:
        error: The error.

    Returns:
        True if the machine or the moment caused it.
    """
    seen: set[int] = set()  # chains of causes may be circular
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
    """The error that was being handled when ``error`` was raised; None if there was none."""
    return _cause_and_context(error)[1]


# Errors that JAX sets as the cause of another one to show a traceback. The real cause and context
# of that one are moved to them.
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
    """The ``stacklevel`` with which a warning by the caller points to the user's code.

    Returns:
        The number of frames of bucketjit and JAX from the caller outwards, plus 1.
    """
    depth = 1  # frame 1 is the caller, which ``stacklevel=1`` points to
    while sys._getframe(depth).f_globals.get("__name__", "").startswith(("bucketjit.", "jax.")):
        depth += 1
    return depth
