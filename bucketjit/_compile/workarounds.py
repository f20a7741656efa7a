"""Options and hooks so that XLA's CPU backend computes a program rightly.

`workarounds` decides before a compile, `has_wrong_reductions` after it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from bucketjit._compile.nan_reductions import may_lose_nan, named
from bucketjit._compile.recomputed_values import recomputed_values
from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._masking.array_ops import kept_in_memory
from bucketjit._masking.interpreter import Hook

# Text of XLA's optimised HLO: the kind of a library fusion, and what a line of a fusion looks like.
_LIBRARY = "__ynn_fusion"
_NAME = re.compile(r"^%([\w.\-]+) ", re.MULTILINE)
_CALLED = re.compile(rf"calls=%([\w.\-]+)[^\n]*{_LIBRARY}")
_INSTRUCTION = re.compile(
    r"^ +(?:ROOT )?%(?P<name>\S+) = (?P<dtype>\w+)\[[\d,]*\]\S* "
    r"(?P<opcode>[\w\-]+)\((?P<operands>[^)]*)\)"
)
_OPERAND = re.compile(r"%([\w.\-]+)")

_ELEMENTWISE = named(
    "add subtract multiply divide negate abs sign power remainder exponential log log-plus-one",
    "exponential-minus-one logistic tanh sqrt rsqrt cbrt sine cosine tan erf atan2 is-finite floor",
    "ceil round-nearest-even round-nearest-afz compare select and or xor not convert copy",
)
_CARRIED = _ELEMENTWISE | {"bitcast", "reshape", "transpose"}
# Opcodes and dtypes that the library is known to compute rightly together with a reduction.
_TRUSTED = _CARRIED | named("parameter constant iota broadcast reduce dot")
_DTYPES = named("pred s32 u32 s64 u64 f16 bf16 f32 f64")

# Results whose elements may all differ. An array of equal numbers is a broadcast in XLA's text.
_FULL = named("parameter constant dot reduce")


def has_wrong_reductions(text: str) -> bool:
    """Whether an executable has a library reduction that may be wrong.

    It is then compiled again, with `Workarounds.avoids_reductions` set.
    """
    called = set(_CALLED.findall(text))
    if not called:
        return False
    computations = re.split(r"^}.*$", text, flags=re.MULTILINE)
    names = map(_NAME.search, computations)
    return any(
        name is not None and name[1] in called and " reduce(" in body and _is_wrong(body)
        for body, name in zip(computations, names, strict=True)
    )


def _is_wrong(computation: str) -> bool:
    """Whether a library fusion with a reduction has an instruction that may make it wrong."""
    full: set[str] = set()  # what has numbers of its own along all axes, as far as it is known
    for line in computation.splitlines():
        if not line.startswith("  "):
            continue
        match = _INSTRUCTION.match(line)
        if match is None:  # a line that this module cannot read is not trusted
            return True
        opcode, operands = match["opcode"], _OPERAND.findall(match["operands"])
        if opcode not in _TRUSTED or match["dtype"] not in _DTYPES:
            return True
        if opcode == "dot" and not full.issuperset(operands):
            return True
        if opcode in _FULL or (opcode in _CARRIED and not full.isdisjoint(operands)):
            full.add(match["name"])
    return False


def computing_once(once: Mapping[Any, Hashable]) -> Callable[[], Hook]:
    """Make a hook of `interpret` that writes some values to memory."""

    def begun() -> Hook:
        kept: dict[Hashable, Any] = {}

        def hook(eqn: JaxprEqn, outs: list[Any], sizes: BucketSizes) -> list[Any]:
            # Any run-time size does: `kept_in_memory` needs a number that XLA does not know.
            size = next(iter(sizes.values.values()), None)
            results = []
            for var, value in zip(eqn.outvars, outs, strict=True):
                key = once.get(var)
                if key is not None and size is not None and isinstance(value, jax.Array):
                    if key not in kept:
                        kept[key] = kept_in_memory(value, size)
                    value = kept[key]
                results.append(value)
            return results

        return hook

    return begun


_WITHOUT_REDUCTIONS = (
    "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
)


def library_options(without_reductions: bool) -> Mapping[str, Any]:
    """The options of XLA that select what its CPU backend leaves to its library.

    By default the library (YNN) computes reductions, matrix products and convolutions, each in one
    kernel. The option is experimental: if a compile fails with an error in which `refused_option`
    finds it, the compile is repeated without it.
    """
    if not without_reductions:
        return {}
    return {"xla_cpu_experimental_ynn_fusion_type": _WITHOUT_REDUCTIONS}


OPTIONS = frozenset(library_options(True))
"""Names of the compiler options that `Workarounds` may set."""


class Workarounds:
    """The options and hooks that a program needs; `workarounds` makes them."""

    def __init__(
        self, avoids_reductions: bool, recomputed: Callable[[], Mapping[Any, Hashable]] = dict
    ) -> None:
        self.avoids_reductions = avoids_reductions
        self._recomputed = functools.cache(recomputed)

    def after(self) -> Callable[[], Hook] | None:
        """Makes hooks, for the argument ``after`` of `interpret`; None if none are needed."""
        recomputed = self._recomputed()
        return computing_once(recomputed) if recomputed else None

    def options(self) -> Mapping[str, Any]:
        return library_options(self.avoids_reductions)


def workarounds(jaxpr: Jaxpr) -> Workarounds:
    """The options and hooks that a program needs, as far as its equations show it."""
    return Workarounds(may_lose_nan(jaxpr), lambda: recomputed_values(jaxpr))


def hooks(*factories: Callable[[], Hook] | None) -> Callable[[], Hook] | None:
    several = [factory for factory in factories if factory is not None]

    def begun() -> Hook:
        each = [factory() for factory in several]

        def hook(eqn: JaxprEqn, outs: list[Any], sizes: BucketSizes) -> list[Any]:
            for one_hook in each:
                outs = one_hook(eqn, outs, sizes)
            return outs

        return hook

    return begun if several else None
