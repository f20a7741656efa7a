"""Errors as ``jax.jit`` shows them: the frames of the user, without those of bucketjit and JAX.

    before   train.py   bucketjit/_api   bucketjit/_runtime   jax/_src   train.py, where it raises
    after    train.py   train.py, where it raises

``jax_traceback_filtering`` decides how, as for JAX's own functions. An error is shortened where it
leaves a function that users call: `shortened` in its ``except`` block, or `boundary` around it.

And what JAX says of the functions that bucketjit gives it to trace, in errors, in reports of leaks,
and in what ``jax_explain_cache_misses`` logs: the name and line of the user's.

    before   the function flat at bucketjit/_tracing/symbolic.py:178, its argument values[0]
    after    the function step at train.py:12, its argument batch['ids']
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, TypeVar, cast

import jax
from jax import api_util
from jax.extend.source_info_util import register_exclusion

from bucketjit._jax import names
from bucketjit.errors import BucketJitError, MaskingError

_util = names.module("traceback_util")

_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep

_LIBRARY = sysconfig.get_path("stdlib") + os.sep

# Packages whose frames JAX leaves out of the tracebacks that it shortens itself, such as those of
# ``jax.grad`` of a bucketed function. `bucketjit._jax` is not among them: it looks for frames of
# its own in errors that JAX has shortened (`bucketjit._jax.patches.shapes`, `trouble_of_versions`).
_HIDDEN = (*("_api", "_arrays", "_compile", "_ir", "_masking", "_runtime", "_stages", "_tracing"),)

F = TypeVar("F", bound=Callable[..., Any])


@functools.cache
def hide_own_frames() -> None:
    """Have JAX leave frames of bucketjit out of its tracebacks, too.

    Libraries on JAX do so with the private ``traceback_util.register_exclusion`` (since 0.2.1).
    There is no public way.
    """
    for package in _HIDDEN:
        _util.register_exclusion(_FOLDER + package)


def boundary(function: F) -> F:
    """A function whose errors are `shortened`."""

    @functools.wraps(function)
    def shortening(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            with contextlib.suppress(Exception):  # as near the limit of recursion
                shortened(error)
            raise

    return cast(F, shortening)


def shortened(error: Exception) -> None:
    """Take the frames of bucketjit and JAX out of an error that is being handled.

    Where that fails, as near the limit of recursion, the caller raises the error as it is.

    The frames go from the errors that caused it, too; of refusals only the last one is shown. Raise
    the error with a bare ``raise`` afterwards, which adds no frame. JAX's note on how to see all
    frames, or in the mode ``remove_frames`` the whole traceback, is added as JAX does it, unless
    JAX has added it already, or the error is one of bucketjit: its message says all.

    JAX's ``traceback_util.api_boundary`` does this for the frames of JAX (since 0.2.1). No public
    function does.
    """
    mode = _util._filtering_mode()
    if mode == "off":
        return
    if mode == "tracebackhide":
        for shown in _chain(error):
            for frame, _ in traceback.walk_tb(shown.__traceback__):
                if _is_inner(frame.f_code.co_filename):
                    frame.f_locals["__tracebackhide__"] = True
        return
    if isinstance(error, MaskingError) and error.__cause__ is not None:
        error.__cause__ = _cause_beside(error)
    steps = [(shown, shown.__traceback__) for shown in _chain(error)]
    if not isinstance(error, BucketJitError) and not _is_noted(error):
        with contextlib.suppress(type(error)):  # the error itself, with the note or the cause
            _raised_in_jax(error)
    for shown, all_steps in steps:
        shown.with_traceback(_without_inner(all_steps))
        # An object that was raised in several traces has JAX's note of each.
        if len(notes := getattr(shown, "__notes__", ())) > 1:
            shown.__notes__ = list(dict.fromkeys(notes))


@_util.api_boundary  # type: ignore[untyped-decorator]
def _raised_in_jax(error: Exception) -> NoReturn:
    raise error


def _is_noted(error: Exception) -> bool:
    """Whether JAX has shortened the error, and says so in a note or in its cause."""
    notes = getattr(error, "__notes__", ())
    if any("JAX_TRACEBACK_FILTERING=off" in str(note) for note in notes):
        return True
    return _kind(error.__cause__) == "UnfilteredStackTrace"


def _kind(error: BaseException | None) -> str:
    """The name of an error's class, as the classes that JAX uses for tracebacks are not public."""
    return type(error).__name__


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that are shown with it; not the whole traceback that JAX sets as cause."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        shown = left.pop()
        if shown is None or id(shown) in seen or _kind(shown) == "UnfilteredStackTrace":
            continue
        seen.add(id(shown))
        yield shown
        left += [shown.__cause__, None if shown.__suppress_context__ else shown.__context__]
        if isinstance(shown, BaseExceptionGroup):
            left += shown.exceptions


def _cause_beside(error: MaskingError) -> BaseException | None:
    """The cause of a refusal that is not bucketjit's own: those say what the refusal says."""
    cause = error.__cause__
    while cause is not None:
        is_of_jax = _kind(cause) == "JaxStackTraceBeforeTransformation"
        if not (is_of_jax or isinstance(cause, MaskingError)):
            return cause
        cause = cause.__cause__
    return None


def _without_inner(step: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    is_called_inside = False
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        # Of the standard library the frames go that bucketjit calls, such as those of threads.
        is_of_python = file.startswith((_LIBRARY, "<frozen ")) and "site-packages" not in file
        is_called_inside = _is_inner(file) or (is_called_inside and is_of_python)
        if not is_called_inside:
            kept.append(step)
        step = step.tb_next
    shown = None
    for step in reversed(kept):
        shown = TracebackType(shown, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return shown


@functools.lru_cache(maxsize=4096)
def _is_inner(file: str) -> bool:
    return file.startswith(_FOLDER) or not _util.include_filename(file)


# --- what JAX says of functions -------------------------------------------------------------------

_partial_eval = names.module("interpreters.partial_eval")


@functools.cache
def hide_own_lines() -> None:
    """Have JAX take the line of a user for the place of an operation or a call, not bucketjit's."""
    register_exclusion(os.path.dirname(os.path.dirname(__file__)) + os.sep)


def as_user_code(
    wrapper: F,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    traced: Sequence[bool] | None = None,
) -> F:
    """Have JAX's messages about a wrapper name the user's function and its arguments.

    JAX reads this off the private attribute ``__fun_debug_info__`` (since 0.6). ``__wrapped__``,
    which is public, gives names only to functions with the same arguments.
    """
    with contextlib.suppress(Exception):  # names are a courtesy
        info = api_util.debug_info("jit", fn, tuple(args), dict(kwargs))
        if (source := _source_of(fn)) is not fn:
            of_source = api_util.debug_info("jit", source, (), {}).func_src_info
            info = info._replace(func_src_info=of_source)
        if traced is not None:
            pairs = zip(info.arg_names or (), traced, strict=True)
            info = info._replace(arg_names=tuple(name for name, is_traced in pairs if is_traced))
        wrapper.__fun_debug_info__ = info  # type: ignore[attr-defined]
    return wrapper


def derived(wrapper: F, fn: Callable[..., Any], name: str) -> F:
    """Have JAX's messages about a derivative name the line of its function."""
    wrapper.__name__ = name
    wrapper.bucketjit_derived_from = fn  # type: ignore[attr-defined]
    return wrapper


def _source_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    fn = inspect.unwrap(fn)
    while (source := getattr(fn, "bucketjit_derived_from", None)) is not None:
        fn = inspect.unwrap(source)
    return fn


def like_without(
    wrapper: F, fn: Callable[..., Any], positional: Collection[int], keyword: Collection[str]
) -> F:
    """Name a wrapper that binds some arguments of a function after the function."""
    functools.update_wrapper(wrapper, fn, updated=())
    wrapper.__signature__ = None  # type: ignore[attr-defined]
    with contextlib.suppress(TypeError, ValueError):  # a built-in function may have no signature
        signature = inspect.signature(fn)
        left = [
            p
            for i, (name, p) in enumerate(signature.parameters.items())
            if name not in keyword
            and (i not in positional or p.kind in (p.VAR_POSITIONAL, p.KEYWORD_ONLY, p.VAR_KEYWORD))
        ]
        wrapper.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
    return wrapper


@contextlib.contextmanager
def traced_anew() -> Iterator[None]:
    """A context in which JAX does not suspect a function that it traces to be defined repeatedly.

    bucketjit gives JAX a new function for each trace. Of a second one from one line,
    ``jax_explain_cache_misses`` would say that the user's function is perhaps being defined again
    and again. JAX keeps these lines in a private set (since 0.5).
    """
    if not getattr(jax.config, "jax_explain_cache_misses", False):
        yield
        return
    seen = _partial_eval.callsites_with_tracing_cache_miss
    before = set(seen)
    seen.clear()
    try:
        yield
    finally:
        seen.update(before)
