"""The reports of the thread that traces: what `size_hooks` and `number_hooks` call.

The file stands between both to avoid a cycle of imports.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn

from jax.errors import InconclusiveDimensionOperation
from jax.export import symbolic_shape

from bucketjit._jax.user_code import caller_is_user

Size: Any = type(symbolic_shape("n")[0])  # the class of symbolic sizes

# Functions of the thread: ``report``, ``report_key``, ``report_text`` and ``report_raised``, the
# arguments of `size_hooks.watch_equalities`. Each is missing or None while no function is traced.
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


# Looked up before the hooks are installed: a comparison by a hook is not one of user code.
_plain_ge = Size.__ge__


def is_positive(size: Any) -> bool:
    """Whether a size is at least 1 for all values of its variables; False if JAX does not know.

    Sizes are compared by ``shape_poly._DimExpr.__ge__`` (since 0.4.14).
    """
    try:
        return bool(_plain_ge(size, 1) if isinstance(size, Size) else size >= 1)
    except InconclusiveDimensionOperation:
        return False
