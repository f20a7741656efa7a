"""Whether a program multiplies by a matrix that XLA knows to be the same in all its columns.

    w = broadcast_in_dim 1.0     w does not vary along any axis
    v = mul w c                  nor does v along axis 1, if c is one column
    y = dot_general x v          the product has axis 1 of v as its own, so this pass answers True

XLA's CPU backend hands a product to its library YNN together with a reduction that is next to it.
Where a side of the product is a broadcast (``x @ jnp.ones((256, 256))``), a product of 4,096
elements or more has numbers that were never computed (jaxlib 0.10.2 and 0.12, in ``jax.jit`` too).
Padding would take a call of 10 rows to a bucket of 16, where that is so. So such programs are
compiled without these reductions of the library (`_jax.library_options`).

A matrix that this pass does not see through is found in the compiled program, which is then
compiled again; see `bucketjit._xla_defects.compiled_reductions`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from bucketjit._ir import dataflow
from bucketjit._ir.primitive_facts import ELEMENTWISE
from bucketjit._jax.jaxprs import Atom, shape_of

_SAMPLE = 64  # elements of a constant that are compared before all of them

#: The axes along which a value may vary; the lattice value of this analysis.
Axes = frozenset[int]


def has_constant_sides(jaxpr: Jaxpr, consts: Sequence[Any] = ()) -> bool:
    """Whether a side of a product does not vary along an axis that the product has of it.

    Args:
        jaxpr: An open jaxpr without dead code.
        consts: Its constants, if they are known.

    Returns:
        Whether XLA may compute such a product wrongly.
    """
    varying = _Varying()
    known = zip(jaxpr.constvars, consts, strict=True) if consts else ()
    numbers: dict[Atom, Axes] = {v: Axes() for v, x in known if _is_one_number(x)}
    dataflow.follow(varying, jaxpr, list(map(varying.unknown, jaxpr.invars)), numbers)
    return varying.found


class _Varying(dataflow.Analysis[Axes]):
    """Along which axes each value may vary.

    Branches and loops get the default, so nothing is joined: the compiled program tells of those.

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
