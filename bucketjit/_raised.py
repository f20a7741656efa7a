"""Questions about exceptions that were raised: what caused them, and what to quote of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

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


class WithoutErrors:
    """A context that ends at an error of the user's function; one of the machine is raised."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: object, frames: object) -> bool:
        return isinstance(error, Exception) and not is_of_machine(error)


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


@contextmanager
def raised_anew(error: BaseException | None) -> Iterator[None]:
    """A context in which a function runs again that has raised ``error``.

    If it raises the same object, the object has only the traceback of this time.
    """
    if error is None:
        yield
        return
    frames = error.__traceback__
    error.__traceback__ = None
    again: BaseException | None = None
    try:
        yield
    except BaseException as other:
        again = other
        raise
    finally:
        if again is not error:
            error.__traceback__ = frames
        again = None


def text_of(error: BaseException) -> str:
    """The message of an error; empty if its class fails to make one."""
    try:
        return str(error)
    except Exception:
        return ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for use inside another one."""
    return (text_of(error).strip().splitlines() or [""])[0]


def in_one_line(error: BaseException) -> str:
    """The type of an error and the first line of its message, for use inside another one."""
    return f"{type(error).__name__}: {first_line(error)}"


# Modules that stand between a user's line and a bucketed function, as `equinox.filter_jit` does.
_NOT_OF_THE_USER = ("bucketjit.", "jax.", "equinox.", "flax.", "haiku.", "keras.")


def frames_inside() -> int:
    """The ``stacklevel`` with which a warning by the caller points to the user's code."""
    depth = 1  # frame 1 is the caller, which ``stacklevel=1`` points to
    while sys._getframe(depth).f_globals.get("__name__", "").startswith(_NOT_OF_THE_USER):
        depth += 1
    return depth
