"""Who is told, while a function is traced, of what its code asks of a symbolic size."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

from jax.errors import InconclusiveDimensionOperation

from bucketjit._jax.user_code import caller_is_user

# The reports of the thread that traces: ``report``, ``report_key``, ``report_text`` and
# ``report_raised``, as `size_hooks.watch_equalities` describes them. None of them where no function
# is traced.
watching = threading.local()


def fail(error: Exception) -> NoReturn:
    """Raise an error from a hook, and report it if the hook runs for user code."""
    report_raised(error)
    raise error


def report_raised(error: Exception) -> None:
    """Report an error that a hook is about to raise, if the hook runs for user code."""
    report = getattr(watching, "report_raised", None)
    if report is not None and caller_is_user():
        report(error)


def is_positive(size: Any) -> bool:
    """Whether a size is at least 1 whatever its variables are."""
    try:
        return bool(size >= 1)
    except InconclusiveDimensionOperation:
        return False
