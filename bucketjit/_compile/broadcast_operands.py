"""Find products with a matrix whose columns XLA knows to be equal.

    w = broadcast_in_dim 1.0     w varies along no axis
    v = mul w c                  v does not vary along axis 1, if c is one column
    y = dot_general x v          axis 1 of v is a free axis of the product: the answer is True

XLA's CPU backend fuses a product with the reduction next to it, and hands both to its library YNN.
If an operand of the product is a broadcast (``x @ jnp.ones((256, 256))``), a product of 4,096
elements or more then has numbers that were never computed (jaxlib 0.10.2 and 0.12, in ``jax.jit``
too). Padding can take a call of 10 rows to a bucket of 16, which is large enough for that. So such
programs are compiled without the library's reductions
(`bucketjit._compile.options.library_options`).

A product that this pass misses is found in the executable, which is then compiled again; see
`bucketjit._compile.compiled_reductions`.
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
