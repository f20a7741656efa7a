"""Whether a program multiplies by a matrix that XLA knows to be the same in all its columns.

XLA's CPU backend hands a product to its library YNN together with a fold that is next to it. Where
a side of the product is a broadcast (``x @ jnp.ones((256, 256))``), that yields numbers which were
never computed, of 4,096 elements or more (jaxlib 0.10.2 and 0.12, in ``jax.jit`` too). To a bucket
of 16 rows, where that is so, padding would take a call of 10. Such programs are compiled without
these folds of the library (`_jax.library_options`).

What is not known here, such as a matrix that is made in a loop, is found in the compiled program,
and compiled twice; see `bucketjit._xla_defects.compiled_reductions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bucketjit._ir.primitive_facts import ELEMENTWISE
from bucketjit._jax.jaxprs import bodies, is_literal
from bucketjit._jax.primitives import name_of

_ELEMENTWISE = frozenset(ELEMENTWISE)
_SAMPLE = 64  # elements of a constant that are compared before all of them

Axes = frozenset[int]  # along which a value may vary


def has_constant_sides(jaxpr: Any, consts: Sequence[Any] = ()) -> bool:
    """Whether a side of a product does not vary along an axis that the product has of it.

    Args:
        jaxpr: An open jaxpr without dead code.
        consts: Its constants, if they are known.
    """
    known = zip(jaxpr.constvars, consts, strict=True) if consts else ()
    return _has(jaxpr, {v: Axes() for v, value in known if _is_one_number(value)})


def _has(jaxpr: Any, varies: dict[Any, Axes]) -> bool:
    for eqn in jaxpr.eqns:
        given = [_axes_of(v, varies) for v in eqn.invars]
        if name_of(eqn) == "dot_general" and _is_constant_along_its_own(eqn, given):
            return True
        for body in bodies(eqn):
            whole = len(body.invars) == len(eqn.invars)
            inner = zip(body.invars, given, strict=True) if whole and not _repeats(eqn) else ()
            if _has(body, dict(inner)):
                return True
        if len(eqn.outvars) == 1 and (axes := _made(eqn, given)) is not None:
            varies[eqn.outvars[0]] = axes
    return False


def _axes_of(atom: Any, varies: Mapping[Any, Axes]) -> Axes:
    if is_literal(atom):
        return Axes()
    known = varies.get(atom)
    return Axes(range(len(getattr(atom.aval, "shape", ())))) if known is None else known


def _repeats(eqn: Any) -> bool:
    """Whether its body is run on what the last run has made."""
    return name_of(eqn) in ("scan", "while")


def _is_constant_along_its_own(eqn: Any, given: Sequence[Axes]) -> bool:
    contracted, batch = eqn.params["dimension_numbers"]
    for side, axes, gone, shared in zip(eqn.invars, given, contracted, batch, strict=True):
        own = set(range(len(side.aval.shape))) - {*gone, *shared}
        if any(axis not in axes and str(side.aval.shape[axis]) != "1" for axis in own):
            return True
    return False


def _made(eqn: Any, given: Sequence[Axes]) -> Axes | None:
    """The axes along which what an equation makes may vary; None for all of them."""
    name, params = name_of(eqn), eqn.params
    shape = eqn.outvars[0].aval.shape
    if name in _ELEMENTWISE or name in ("copy", "convert_element_type", "stop_gradient"):
        return Axes().union(*given)
    if name == "iota":
        return Axes((params["dimension"],))
    if name == "broadcast_in_dim":
        before = eqn.invars[0].aval.shape
        to = params["broadcast_dimensions"]
        return Axes(to[a] for a in given[0] if str(before[a]) == str(shape[to[a]]))
    if name == "transpose":
        return Axes(new for new, old in enumerate(params["permutation"]) if old in given[0])
    if name == "tile":
        before = eqn.invars[0].aval.shape
        return Axes(a for a in range(len(shape)) if str(before[a]) != "1")
    if name == "slice":
        return given[0]
    if name == "reshape" and not given[0]:
        return Axes()
    return None


def _is_one_number(value: Any) -> bool:
    """Whether an array holds the same number everywhere."""
    if isinstance(value, jax.Array):
        try:
            if any(device.platform != "cpu" for device in value.devices()):
                return False
        except RuntimeError:  # it was deleted; whoever runs the program is told
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
