"""Values of a softmax, by which `bucketjit._masking.padding` knows its exponentials."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from bucketjit._jax.jaxprs import shape_of


class Softmax(NamedTuple):
    """A value of a softmax along some axes.

    Attributes:
        value: The value, which keeps its `id` from being used again.
        shape: Its logical shape, as text.
        axes: The axes that the softmax runs along.
        what: ``"scores"`` (-inf in the padding), ``"shifted"`` (without their maximum), ``"zeros"``
            (0 in the padding), or ``"reduced"``, the maximum or the sum of such a value.
        of: The value that was reduced, that was filled with -inf, or that was converted to another
            dtype; an exponential or a quotient that was not is its own.
        places: The axis of the reduced value for each axis of the result; None for one of size 1.
    """

    value: Any
    shape: str
    axes: frozenset[int]
    what: str
    of: Any = None
    places: tuple[int | None, ...] = ()


OF_A_SOFTMAX = {
    *("reduce_max", "reduce_sum", "stop_gradient", "copy", "max", "broadcast_in_dim"),
    *("select_n", "sub", "exp", "div", "convert_element_type"),
}


def is_lowest(value: Any) -> bool:
    return _is_number(value) and float(np.asarray(value)) == -np.inf


def is_finite(value: Any) -> bool:
    return _is_number(value) and bool(np.isfinite(np.float64(value)))


def _is_number(value: Any) -> bool:
    return not isinstance(value, jax.Array) and np.ndim(value) == 0


def reduced(eqn: JaxprEqn, of: Any) -> Softmax:
    axes = frozenset(eqn.params["axes"])
    return Softmax(None, "", axes, "reduced", of, tuple(i for i in range(of.ndim) if i not in axes))


def spread(eqn: JaxprEqn, reduced: Softmax) -> Softmax | None:
    """A maximum or a sum that is broadcast; None if an axis that counts something is repeated."""
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    places: list[int | None] = [None] * len(after)
    for i, place in enumerate(eqn.params["broadcast_dimensions"]):
        if str(before[i]) == str(after[place]):
            places[place] = reduced.places[i]
        elif reduced.places[i] is not None:
            return None
    return reduced._replace(places=tuple(places))


def is_beside(reduced: Softmax, value: object, rank: int) -> bool:
    """Whether each element meets those it was reduced from, in an operation with ``value``."""
    meets = (p == i or (p is None and i in reduced.axes) for i, p in enumerate(reduced.places))
    return reduced.of is value and len(reduced.places) == rank and all(meets)
