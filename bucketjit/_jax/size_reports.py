"""The reports of the thread that traces: what `size_hooks` and `number_hooks` call.

No name of JAX is private here; the file is between both to avoid a cycle of imports.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn

from jax.errors import InconclusiveDimensionOperation

from bucketjit._jax.user_code import caller_is_user

# Functions of the thread: ``report``, ``report_key``, ``report_text`` and ``report_raised``, the
# arguments of `size_hooks.watch_equalities`. Each is missing or None while no function is traced.
watching = threading.local()


def fail(error: Exception) -> NoReturn:
    """Raise an error from a hook, and report it if the hook runs for user code.

    Args:
        error: The error.

    Raises:
        Exception: ``error``.
    """
    report_raised(error)
    raise error


def report_raised(error: Exception) -> None:
    """Report an error that a hook is about to raise, if the hook runs for user code."""
    report = getattr(watching, "report_raised", None)
    if report is not None and caller_is_user():
        report(error)


def is_positive(size: Any) -> bool:
    """Whether a size is at least 1 for all values of its variables; False if JAX does not know."""
    try:
        return bool(size >= 1)
    except InconclusiveDimensionOperation:
        return False
