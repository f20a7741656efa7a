"""The line of user code that an equation, an error or a call of a hook comes from.

User code is code outside of JAX, NumPy and bucketjit.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import linecache
import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, cast

import jax
from jax.extend import source_info_util as jex_source_info
from jax.extend.core import Jaxpr, JaxprEqn

from bucketjit._jax import names

_traceback_util = names.module("traceback_util")


def source_line(eqn: JaxprEqn, within: Sequence[Any] = ()) -> str:
    """``file:line (function)`` of the user code that made the equation, or ``""``.

    That is the innermost frame outside of JAX and of bucketjit (`tracebacks.hide_own_lines`).
    Equations of a function that JAX itself jits (``jnp.roll``) have none.
    """
    lines = (jex_source_info.summarize(e.source_info) for e in (eqn, *reversed(within)))
    return next(filter(None, lines), "")


def in_brackets(line: str | None) -> str:
    """A line of user code at the end of a message, or ``""``."""
    return f" [{line}]" if line else ""


# The folders of JAX, whose functions under ``jit`` have their names in it.
_FOLDER_OF_JAX = os.path.dirname(jax.__file__) + os.sep


def is_code_of_jax(jaxpr: Jaxpr) -> bool:
    """Whether the function that a jaxpr was traced from is one of JAX itself.

    The public parameters of a call under ``jit`` have only its name, which a function of a user may
    have, too. The file of the function is in ``Jaxpr.debug_info`` (``func_filename``, since 0.5).
    """
    name = getattr(jaxpr.debug_info, "func_filename", None)
    return name is not None and name.startswith(_FOLDER_OF_JAX)


_LONGEST_CODE = 60  # characters of an expression that a message quotes


def raising_line(error: BaseException) -> str:
    """``file:line (function)`` of the innermost user code in an error's traceback, or ``""``."""
    step = raised_by_user(error)
    return "" if step is None else _place(step.tb_frame, step.tb_lineno)


def raising_code(error: BaseException) -> str:
    """The source of what raised an error in user code, such as ``range(x.shape[0])``.

    It is in the line that `raising_line` returns.
    """
    step = raised_by_user(error)
    if step is None:
        return ""
    code = _source(step.tb_frame, step.tb_lasti)
    return code if len(code) <= _LONGEST_CODE and "\n" not in code else ""


def _source(frame: FrameType, instruction: int) -> str:
    """The source of an instruction of a frame, an expression mostly; ``""`` if there is none."""
    code = frame.f_code
    positions = itertools.islice(code.co_positions(), instruction // 2, None)
    first, last, start, end = next(positions, (None,) * 4)
    if first is None or last is None or start is None:
        return ""
    lines = linecache.getlines(code.co_filename, frame.f_globals)[first - 1 : last]
    *whole, ending = [line.encode() for line in lines] or [b""]
    return b"".join([*whole, ending[:end]])[start:].decode(errors="ignore")


def raising_text(error: BaseException) -> str:
    """The line of source that `raising_line` names, such as ``for row in x:``."""
    step = raised_by_user(error)
    if step is None:
        return ""
    name = step.tb_frame.f_code.co_filename
    line = linecache.getline(name, step.tb_lineno, step.tb_frame.f_globals).strip()
    return line if len(line) <= _LONGEST_CODE else f"{line[: _LONGEST_CODE - 3]}..."


def raised_by_user(error: BaseException) -> TracebackType | None:
    """The innermost step of an error's traceback that is in user code; None if none is."""
    innermost, step = None, error.__traceback__
    while step is not None:
        if _place(step.tb_frame, step.tb_lineno):
            innermost = step
        step = step.tb_next
    return innermost


def defining_line(function: Callable[..., Any]) -> str:
    """``file:line (function)`` of the definition of a function, or ``""``.

    Partial applications and decorators are looked through. A callable object gives the line of its
    ``__call__``.
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):
        function = getattr(type(function), "__call__", function)  # noqa: B004
    code = getattr(function, "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno} ({code.co_qualname})"


def calling_line() -> str:
    """``file:line (function)`` of the innermost user code that called a hook, or ``""``."""
    frame: FrameType | None = calling_frame()
    line = ""
    while frame is not None and not line:
        line = _place(frame, frame.f_lineno)
        frame = frame.f_back
    return line


def _place(frame: FrameType, number: int) -> str:
    """``file:line (function)`` of a frame in user code; ``""`` for any other frame."""
    code = frame.f_code
    if not (_is_of_user(frame) and _traceback_util.include_filename(code.co_filename)):
        return ""
    return f"{code.co_filename}:{number} ({code.co_qualname})"


# Packages of JAX that decide *what* to compute by comparing sizes (``jnp.array_equal``,
# ``jnp.linalg.det``), as user code does. In all others a wrong "not equal" only misses a short cut,
# or raises where the unpadded run would broadcast.
_DECIDING = tuple(
    f"jax._src.{name}."
    for name in ("numpy", "scipy", "nn", "image", "random", "ops", "ode", "third_party")
)

# Modules whose functions are on the stack between the caller of a hook and `calling_frame`.
_HOOKS = frozenset(
    f"bucketjit._jax.{name}"
    for name in ("user_code", "size_hooks", "number_hooks", "patches.lifetimes")
)


def calling_frame() -> FrameType:
    """The frame of the code that called a hook: the first outside of the modules of hooks.

    Frames are skipped by the name of their module, not counted, so a new helper function in these
    modules does not change which frame is found.
    """
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__") in _HOOKS:
        frame = frame.f_back
    return cast(FrameType, frame)


def caller_decides() -> bool:
    """Whether the caller of a hook decides by its answer what to compute.

    User code does, and so do those packages of JAX that compare sizes as user code does. A call of
    the private ``core.definitely_equal`` counts only if ``jax.image`` makes it.
    """
    frame = calling_frame()
    name = frame.f_globals.get("__name__", "")
    # A False of `definitely_equal` means "or unknown" to its callers in JAX. Only
    # `jax.image.resize` takes it for "different": it skips axes that keep their size.
    if name == "jax._src.core" and frame.f_code.co_name == "definitely_equal":
        caller: Any = frame.f_back
        return caller.f_globals.get("__name__", "").startswith("jax._src.image.")
    if name.startswith("jax._src."):
        return f"{name}.".startswith(_DECIDING)
    return not (name == "jax" or name.startswith("jaxlib."))


def text_line() -> str | None:
    """The `calling_line` where user code makes a text; None if it does not decide by it.

    JAX takes the text of a callable object for its debug information, in
    ``api_util.fun_sourceinfo`` (since 0.4). One of Equinox shows its fields in it.
    """
    frame: FrameType | None = calling_frame() if caller_is_user() else None
    while frame is not None and frame.f_code.co_name != "fun_sourceinfo":
        frame = frame.f_back
    return None if frame is not None or not caller_is_user() else calling_line()


_Cached = type(functools.cache(len))


def caller_caches() -> bool:
    """Whether the caller of a hook hashes sizes for a cache, which decides nothing.

    It calls a function of ``functools.cache``, as einops and Equinox do: a size that is not there
    is computed anew. JAX does: ``jit`` hashes static arguments if all others are concrete, as in
    ``jax.random.normal(constant_key, x.shape)``.
    """
    frame = calling_frame()
    if frame.f_globals.get("__name__", "").startswith(("jax.", "bucketjit._tracing.parameters")):
        return True
    called = _called(frame, frame.f_lasti)
    while isinstance(called, functools.partial):
        called = called.func
    return isinstance(getattr(called, "__func__", called), _Cached)


def raising_function(error: BaseException) -> Any:
    """What the innermost user code in an error's traceback has called; None if it is not known."""
    step = raised_by_user(error)
    return None if step is None else _called(step.tb_frame, step.tb_lasti)


def _called(frame: FrameType, instruction: int) -> Any:
    """What an instruction of a frame calls, if the source has a name for it; else None."""
    try:
        call = ast.parse(f"({_source(frame, instruction)})", mode="eval").body
        name, *attributes = ast.unparse(cast(ast.Call, call).func).split(".")
        return functools.reduce(getattr, attributes, {**frame.f_globals, **frame.f_locals}[name])
    except (SyntaxError, AttributeError, KeyError):
        return None


def caller_is_user() -> bool:
    """Whether user code called a hook, itself or through NumPy (which JAX calls, too)."""
    # Mostly JAX has called the hook which asks.
    if sys._getframe(2).f_globals.get("__name__", "").startswith("jax."):
        return False
    frame: Any = calling_frame()
    while frame.f_globals.get("__name__", "").startswith("numpy.") and frame.f_back:
        frame = frame.f_back
    return _is_of_user(frame)


def _is_of_user(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return not name.startswith(("jax.", "jaxlib.", "numpy.", "bucketjit.")) and name != "jax"
