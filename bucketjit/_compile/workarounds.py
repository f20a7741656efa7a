"""The door of the package: options and hooks so that XLA's CPU backend computes a program rightly.

`workarounds` decides before a compile, `must_rebuild` after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from bucketjit._compile.compiled_reductions import has_wrong_reductions
from bucketjit._compile.nan_reductions import may_lose_nan
from bucketjit._compile.recomputed_values import recomputed_values
from bucketjit._ir import dataflow
from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.primitive_facts import ELEMENTWISE
from bucketjit._jax.jaxprs import Atom, shape_of
from bucketjit._masking.array_ops import kept_in_memory
from bucketjit._masking.interpreter import Hook

_SAMPLE = 64  # elements of a constant that are compared first, which mostly decides it

#: The axes along which a value may vary; the lattice value of this analysis.
Axes = frozenset[int]


def has_constant_sides(jaxpr: Jaxpr, consts: Sequence[Any] = ()) -> bool:
    """Whether some operand of a product does not vary along one of its free axes.

    A free axis is neither contracted nor a batch axis.
    """
    varying = _Varying()
    known = zip(jaxpr.constvars, consts, strict=True) if consts else ()
    numbers: dict[Atom, Axes] = {v: Axes() for v, x in known if _is_one_number(x)}
    dataflow.follow(varying, jaxpr, list(map(varying.unknown, jaxpr.invars)), numbers)
    return varying.found


class _Varying(dataflow.Analysis[Axes]):
    """The axes along which each value may vary.

    Branches and loops get the default, so no values are joined. Products in them that this misses
    are found in the executable.

    Attributes:
        found: Whether there is a product of the kind that XLA gets wrong.
    """

    def __init__(self) -> None:
        self.found = False
        own = dataflow.table({"dot_general": self._product, "cond scan while": self.default})
        self.table = {**_TABLE, **own}

    def unknown(self, atom: Atom) -> Axes:
        return Axes(range(len(shape_of(atom))))

    def literal(self, atom: Literal) -> Axes:
        return Axes()

    def _product(self, eqn: JaxprEqn, ins: Sequence[Axes]) -> Sequence[Axes]:
        contracted, batch = eqn.params["dimension_numbers"]
        for side, axes, gone, shared in zip(eqn.invars, ins, contracted, batch, strict=True):
            # Sizes are compared as text, since ``==`` of symbolic ones may raise.
            constant = {axis for axis, size in enumerate(shape_of(side)) if str(size) != "1"} - axes
            self.found |= bool(constant - {*gone, *shared})
        return self.default(eqn, ins)


def _broadcast(eqn: JaxprEqn, ins: Sequence[Axes]) -> Axes:
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    to = eqn.params["broadcast_dimensions"]
    return Axes(to[axis] for axis in ins[0] if str(before[axis]) == str(after[to[axis]]))


def _transpose(eqn: JaxprEqn, ins: Sequence[Axes]) -> Axes:
    return Axes(new for new, old in enumerate(eqn.params["permutation"]) if old in ins[0])


def _tile(eqn: JaxprEqn, ins: Sequence[Axes]) -> Axes:
    return Axes(axis for axis, size in enumerate(shape_of(eqn.invars[0])) if str(size) != "1")


def _reshape(eqn: JaxprEqn, ins: Sequence[Axes]) -> Axes:
    return Axes(range(len(shape_of(eqn.outvars[0])))) if ins[0] else Axes()


_AXES: Mapping[str, Callable[[JaxprEqn, Sequence[Axes]], Axes]] = dataflow.table(
    {
        " ".join(ELEMENTWISE): lambda eqn, ins: Axes().union(*ins),
        "iota": lambda eqn, ins: Axes((eqn.params["dimension"],)),
        "broadcast_in_dim": _broadcast,
        "transpose": _transpose,
        "tile": _tile,
        "slice": lambda eqn, ins: ins[0],
        "reshape": _reshape,
    }
)
_TABLE = {name: dataflow.single(axes_of) for name, axes_of in _AXES.items()}


def _is_one_number(value: object) -> bool:
    """Whether all elements of an array in host memory are equal; False for other values."""
    if isinstance(value, jax.Array):
        try:
            if any(device.platform != "cpu" for device in value.devices()):
                return False
        except RuntimeError:  # the array was deleted; running the program will raise
            return False
        if not value.is_fully_addressable or jax.dtypes.issubdtype(
            value.dtype, jax.dtypes.extended
        ):
            return False
    elif not isinstance(value, np.ndarray):
        return False
    if value.size < 2:
        return True
    flat = np.asarray(value).reshape(-1)
    return bool((flat[:_SAMPLE] == flat[0]).all() and (flat == flat[0]).all())


def computing_once(once: Mapping[Any, Hashable]) -> Callable[[], Hook]:
    """Make a hook of `interpret` that writes some values to memory."""

    def begun() -> Hook:
        kept: dict[Hashable, Any] = {}

        def hook(eqn: JaxprEqn, outs: list[Any], sizes: BucketSizes) -> list[Any]:
            # Any run-time size does: `kept_in_memory` needs a number that XLA does not know.
            size = next(iter(sizes.values.values()), None)
            found = list(outs)
            for i, (var, value) in enumerate(zip(eqn.outvars, outs, strict=True)):
                key = once.get(var)
                if key is None or size is None or not isinstance(value, jax.Array):
                    continue
                if key not in kept:
                    kept[key] = kept_in_memory(value, size)
                found[i] = kept[key]
            return found

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
