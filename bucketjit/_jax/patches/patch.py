"""The record of a replacement of one function of JAX, with the reasons for it."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bucketjit._jax.primitives import modules_of_jax


@dataclass(frozen=True)
class Patch:
    """A replacement of a function of JAX while a function of the user is traced.

    Attributes:
        owner: The module, class or table (a dict) that holds the original.
        name: The name, or key, of the original there.
        replacement: The value that takes its place.
        why: Why the original is not enough.
        since: The original's place in JAX, and since which version it is there.
        delete_when: The change of JAX after which this patch can be deleted.
        everywhere: Whether the original is replaced in all modules that hold it; see `in_modules`.
    """

    owner: Any
    name: Any
    replacement: Any
    why: str
    since: str
    delete_when: str
    everywhere: bool = False


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


def in_modules(patches: Sequence[Patch]) -> list[Patch]:
    """The patches, each one with `Patch.everywhere` for every imported module.

    User code may have imported a function of JAX (``from jax.lax import scan``), so it must be
    replaced in every module that holds it under its name, private ones included.
    """
    wide = [(p.name, vars(p.owner)[p.name], p) for p in patches if p.everywhere]
    found = [patch for patch in patches if not patch.everywhere]
    for module in modules_of_jax().values() if wide else ():  # there are a thousand modules
        names = getattr(module, "__dict__", {})
        for name, original, patch in wide:
            if names.get(name) is original:
                found.append(dataclasses.replace(patch, owner=module))
    return found
