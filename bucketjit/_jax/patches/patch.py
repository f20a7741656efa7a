"""The record of a replacement of one function of JAX.

The docstring of each says why the original is not enough, since when it is in JAX, and until when
the replacement is needed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """A replacement of a function of JAX while a function of the user is traced.

    Attributes:
        owner: The module, class or table (a dict) that holds the original.
        name: The name, or key, of the original there.
        around: Makes what takes the original's place, given the original. Another patch may have
            replaced that before, so it is not known earlier.
        everywhere: Whether the original is replaced in every module that holds it under its name:
            user code may have imported it (``from jax.lax import scan``).
    """

    owner: Any
    name: Any
    around: Callable[[Any], Any]
    everywhere: bool = False


def patch(owner: Any, name: Any, everywhere: bool = False) -> Callable[[Callable[..., Any]], Patch]:
    """Make a patch of a function that takes the original before the arguments of the original."""
    return lambda function: Patch(owner, name, functools.partial(calling, function), everywhere)


def calling(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A function in the place of ``original``, which is the first argument of ``function``."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return replacement


def named_now(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of JAX that is looked up by its name in each call, as a patch may replace it.

    Any other function is returned as it is; of one in a `functools.partial`, another partial.
    """
    if isinstance(fn, functools.partial):
        return functools.partial(named_now(fn.func), *fn.args, **fn.keywords)
    module, name = getattr(fn, "__module__", None) or "", getattr(fn, "__name__", "")
    if not module.startswith(("jax.", "jax_")) or vars(sys.modules[module]).get(name) is not fn:
        return fn

    @functools.wraps(fn)
    def looked_up(*args: Any, **kwargs: Any) -> Any:
        return getattr(sys.modules[module], name)(*args, **kwargs)

    return looked_up
