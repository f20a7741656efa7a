"""What JAX says of the functions that bucketjit gives it to trace: the name and line of the user's.

    before   the function flat at bucketjit/_tracing/symbolic.py:178, its argument values[0]
    after    the function step at train.py:12, its argument batch['ids']

JAX puts the function's name and line, and the names of its arguments, into errors of tracers, into
reports of leaks, and into what ``jax_explain_cache_misses`` logs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax import api_util
from jax.extend.source_info_util import register_exclusion

from bucketjit._jax import names

_partial_eval = names.module("interpreters.partial_eval")

F = TypeVar("F", bound=Callable[..., Any])


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
