"""The door of the package: what a program needs to be computed rightly by XLA's CPU backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr

from bucketjit._masking.interpreter import Hook
from bucketjit._xla_defects.broadcast_operands import has_constant_sides
from bucketjit._xla_defects.compiled_reductions import has_wrong_reductions
from bucketjit._xla_defects.compute_once import computing_once
from bucketjit._xla_defects.nan_reductions import may_lose_nan
from bucketjit._xla_defects.options import library_options
from bucketjit._xla_defects.recomputed_values import recomputed_values

OPTIONS = frozenset(library_options(True, True))
"""Names of the compiler options that `Workarounds` may set."""


class Workarounds:
    """What a program needs; see `workarounds`.

    Attributes:
        avoids_reductions: Whether XLA's library must not compute its reductions.
        after: Makes hooks of `interpret`; None if the program needs none.
    """

    def __init__(self, once: Mapping[Any, Hashable], avoids_reductions: bool) -> None:
        self.avoids_reductions = avoids_reductions
        self.after: Callable[[], Hook] | None = computing_once(once) if once else None

    def options(self, side_by_side: bool) -> Mapping[str, Any]:
        """Options of XLA.

        Args:
            side_by_side: Whether several executables run at the same time.
        """
        return library_options(side_by_side, self.avoids_reductions)


def workarounds(jaxpr: Jaxpr, consts: Sequence[Any]) -> Workarounds:
    """What a program needs, as far as the program shows it.

    Args:
        jaxpr: An open jaxpr.
        consts: Its constants.
    """
    avoids = may_lose_nan(jaxpr) or has_constant_sides(jaxpr, consts)
    return Workarounds(recomputed_values(jaxpr), avoids)


def exact_options(is_reference: bool) -> Mapping[str, Any]:
    """Options of XLA for the unpadded run, which is what ``jax.jit`` computes.

    Args:
        is_reference: Whether masked runs are compared with it. Then it must be right.
    """
    return library_options(False, is_reference)


def must_rebuild(compiled: jax.stages.Compiled) -> bool:
    """Whether an executable has reductions that XLA's library computes wrongly.

    It is then compiled again, with `Workarounds.avoids_reductions`.

    Args:
        compiled: What ``lower().compile()`` returns.
    """
    return has_wrong_reductions(compiled.as_text() or "")


def hooks(*factories: Callable[[], Hook] | None) -> Callable[[], Hook] | None:
    """Several hooks of `interpret` as one, in this order; None if there are none."""
    several = [factory for factory in factories if factory is not None]
    if len(several) < 2:
        return several[0] if several else None

    def begun() -> Hook:
        begun_ones = [factory() for factory in several]
        return lambda eqn, outs, sizes: functools.reduce(
            lambda given, hook: hook(eqn, given, sizes), begun_ones, outs
        )

    return begun
