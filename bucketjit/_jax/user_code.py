"""The line of user code that a trace, an equation or an error comes from."""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, cast

from jax.extend.core import JaxprEqn

from bucketjit._jax import names

_core = names.module("core")
_source_info_util = names.module("source_info_util")

# The folder of bucketjit: frames below it are not code of users.
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def source_line(eqn: JaxprEqn, within: Sequence[Any] = ()) -> str:
    """``file:line (function)`` of the user's code that made the equation, or ``""``.

    That is the innermost line outside of JAX and of this package, whose functions stand in for some
    of JAX's while it traces (``source_info_util.user_frames``, since 0.2.21). The equations of a
    program that JAX jits by itself (``jnp.roll``) have none.

    Args:
        eqn: The equation.
        within: The equations around it, outermost first. The innermost that has a line is told.
    """
    lines = map(_line_of_equation, (eqn, *reversed(within)))
    return next(filter(None, lines), "")


def _line_of_equation(eqn: JaxprEqn) -> str:
    try:
        frames = _source_info_util.user_frames(eqn.source_info.traceback)
        of_user = (f for f in frames if not f.file_name.startswith(_PACKAGE))
        return _source_info_util._summarize_frame(next(of_user))
    except Exception:  # a summary is a courtesy: never let it hide the real message
        return ""


_LONGEST_CODE = 60  # characters of an expression that is told


def raising_line(error: BaseException) -> str:
    """``file:line (function)`` of the user's code that an error came of, or ``""``.

    That is the innermost line outside of JAX, of NumPy and of this package.
    """
    step = raised_by_user(error)
    return "" if step is None else _place(step.tb_frame, step.tb_lineno)


def raising_code(error: BaseException) -> str:
    """What the same line does there, such as ``range(x.shape[0])``; ``""`` if it is not known."""
    step = raised_by_user(error)
    if step is None:
        return ""
    code = step.tb_frame.f_code
    places = itertools.islice(code.co_positions(), step.tb_lasti // 2, None)
    line, last, start, end = next(places, (None,) * 4)
    if line is None or line != last or start is None or end is None:
        return ""
    text = linecache.getline(code.co_filename, line, step.tb_frame.f_globals)
    told = text.encode()[start:end].decode(errors="ignore")
    return told if len(told) <= _LONGEST_CODE else ""


def raised_by_user(error: BaseException) -> TracebackType | None:
    """Where an error passed through user code last, innermost; None if it never did."""
    found, step = None, error.__traceback__
    while step is not None:
        if _place(step.tb_frame, step.tb_lineno):
            found = step
        step = step.tb_next
    return found


def defining_line(function: Callable[..., Any]) -> str:
    """``file:line (function)`` of where a function is defined, or ``""``."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):
        function = getattr(type(function), "__call__", function)  # noqa: B004
    code = getattr(function, "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno} ({code.co_qualname})"


def calling_line() -> str:
    """``file:line (function)`` of the innermost user code that a hook runs for, or ``""``."""
    frame: FrameType | None = calling_frame()
    line = ""
    while frame is not None and not line:
        line = _place(frame, frame.f_lineno)
        frame = frame.f_back
    return line


def _place(frame: FrameType, number: int) -> str:
    """A line of the user's code in words; ``""`` for code of others."""
    code = frame.f_code
    if not (_is_of_user(frame) and _source_info_util.is_user_filename(code.co_filename)):
        return ""
    return f"{code.co_filename}:{number} ({code.co_qualname})"


# Modules of JAX that decide *what* to compute by comparing sizes (``jnp.array_equal``,
# ``jnp.linalg.det``), as user code does. In the others a wrong "not equal" only misses a
# short cut, or raises where exact would broadcast.
_DECIDING = ("numpy", "scipy", "nn", "image", "random", "ops", "ode", "third_party")

_DEFINITELY_EQUAL = _core.definitely_equal.__code__


# The modules whose functions run between user code and the question who that is.
_HOOKS = frozenset(
    f"bucketjit._jax.{name}" for name in ("user_code", "size_reports", "size_hooks", "number_hooks")
)


def calling_frame() -> FrameType:
    """The frame of the code that a hook runs for: the first outside of the modules of hooks."""
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__") in _HOOKS:
        frame = frame.f_back
    return cast(FrameType, frame)


def caller_decides() -> bool:
    """Whether the code that a hook runs for decides by what it asks what to compute."""
    frame = calling_frame()
    name = frame.f_globals.get("__name__", "")
    if frame.f_code is _DEFINITELY_EQUAL:  # JAX means "or unknown" by it, but for one place
        caller: Any = frame.f_back  # `jax.image.resize` leaves out what has its size
        return caller.f_globals.get("__name__", "").startswith("jax._src.image.")
    if name.startswith("jax._src."):
        return name.split(".")[2] in _DECIDING
    return not (name == "jax" or name.startswith("jaxlib."))


def caller_caches() -> bool:
    """Whether a hook runs for a library that looks sizes up in a cache, which decides nothing.

    JAX is one: ``jit`` hashes static arguments if all others are concrete, as in
    ``jax.random.normal(constant_key, x.shape)``.
    """
    return calling_frame().f_globals.get("__name__", "").startswith(("einops.", "jax."))


def caller_is_user() -> bool:
    """Whether a hook runs for code outside JAX, or for NumPy that was called from there.

    JAX calls NumPy too.
    """
    frame: Any = calling_frame()
    while frame.f_globals.get("__name__", "").startswith("numpy.") and frame.f_back:
        frame = frame.f_back
    return _is_of_user(frame)


def _is_of_user(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return not name.startswith(("jax.", "jaxlib.", "numpy.", "bucketjit.")) and name != "jax"
