"""The door of the package: options and hooks so that XLA's CPU backend computes a program rightly.

`workarounds` decides before a compile, `must_rebuild` after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr

from bucketjit._compile.broadcast_operands import has_constant_sides
from bucketjit._compile.compiled_reductions import has_wrong_reductions
from bucketjit._compile.compute_once import computing_once
from bucketjit._compile.nan_reductions import may_lose_nan
from bucketjit._compile.options import library_options
from bucketjit._compile.recomputed_values import recomputed_values
from bucketjit._masking.interpreter import Hook

OPTIONS = frozenset(library_options(True))
"""Names of the compiler options that `Workarounds` may set."""


class Workarounds:
    """The options and hooks that a program needs; `workarounds` makes them.

    Attributes:
        avoids_reductions: Whether XLA's library must not compute the program's reductions.
    """

    def __init__(
        self, avoids_reductions: bool, recomputed: Callable[[], Mapping[Any, Hashable]] = dict
    ) -> None:
        self.avoids_reductions = avoids_reductions
        self._recomputed = functools.cache(recomputed)

    def after(self) -> Callable[[], Hook] | None:
        """Makes hooks, for the argument ``after`` of `interpret`; None if none are needed."""
        found = self._recomputed()
        return computing_once(found) if found else None

    def options(self) -> Mapping[str, Any]:
        """The options of XLA for the program, by name."""
        return library_options(self.avoids_reductions)


def workarounds(jaxpr: Jaxpr, consts: Sequence[Any]) -> Workarounds:
    """The options and hooks that a program needs, as far as its equations show it."""
    avoids_reductions = may_lose_nan(jaxpr) or has_constant_sides(jaxpr, consts)
    return Workarounds(avoids_reductions, lambda: recomputed_values(jaxpr))


def exact_options(is_reference: bool) -> Mapping[str, Any]:
    """The options of XLA for the exact run, which computes what ``jax.jit`` computes."""
    return library_options(is_reference)


def must_rebuild(compiled: jax.stages.Compiled) -> bool:
    """Whether an executable has reductions that XLA's library may compute wrongly.

    It must then be compiled again, with `Workarounds.avoids_reductions` set.
    """
    return has_wrong_reductions(compiled.as_text() or "")


def hooks(*factories: Callable[[], Hook] | None) -> Callable[[], Hook] | None:
    """Chain hooks of `interpret`."""
    several = [factory for factory in factories if factory is not None]
    if len(several) < 2:
        return several[0] if several else None

    def begun() -> Hook:
        begun_ones = [factory() for factory in several]
        return lambda eqn, outs, sizes: functools.reduce(
            lambda given, hook: hook(eqn, given, sizes), begun_ones, outs
        )

    return begun
