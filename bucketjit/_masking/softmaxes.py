"""The values of a softmax, recognised by the equations that make one.

    b = select (iota < n) a -inf      the scores, which the rule of the maximum has filled
    m = reduce_max b                  "maximum"
    d = sub b m                       "shifted": -inf in the padding
    e = exp d                         "zeros": 0 in the padding
    s = reduce_sum e                  "sum"
    p = div e s                       "zeros": 0 / s in the padding

`bucketjit._masking.padding` says what this spares. A plan recognises the same before any rule runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from bucketjit._ir.ranges import is_at_most
from bucketjit._jax.jaxprs import dtype_of, name_of, shape_of
from bucketjit._masking.padding_facts import OF_SOFTMAX, Fact, open_axes


class Softmax(NamedTuple):
    """A value of a softmax along some axes.

    Attributes:
        what: ``"maximum"``, ``"shifted"``, ``"zeros"`` or ``"sum"``.
        axes: The axes that the softmax runs along.
        of: The key of the value that was reduced; of zeros, of the value before conversions.
        dtype: The dtype of that value.
        places: The axis of the reduced value for each axis of the result; None for one of size 1.
    """

    what: str
    axes: frozenset[int]
    of: Hashable = None
    dtype: Any = None
    places: tuple[int | None, ...] = ()

    def is_beside(self, operand: Operand, rank: int) -> bool:
        """Whether each element meets those it was reduced from, in an operation with a value."""
        pairs = zip(self.places, operand.order or range(rank), strict=False)
        meets = (place == axis or (place is None and axis in self.axes) for place, axis in pairs)
        return self.of == operand.key and len(self.places) == rank and all(meets)


class Operand(NamedTuple):
    """An operand of an equation.

    Attributes:
        key: Tells it apart from other values, but for transposed ones; None if it is not known.
        softmax: What it is of a softmax.
        number: The number that it is; None for an array.
        order: The axes of the value with this key, in the order of its own; empty for that value.
    """

    key: Hashable = None
    softmax: Softmax | None = None
    number: Any = None
    order: tuple[int, ...] = ()


def has_scores(eqn: JaxprEqn) -> bool:
    """Whether an equation is a maximum of floats, of which there is at least one."""
    if name_of(eqn) != "reduce_max" or not jnp.issubdtype(dtype_of(eqn.invars[0]), jnp.floating):
        return False
    shape = shape_of(eqn.invars[0])
    return all(is_at_most(1, shape[axis]) for axis in eqn.params["axes"])


def with_softmax(fact: Fact, softmax: Softmax | None, eqn: JaxprEqn) -> Fact:
    """The fact about a result, which may be the zeros of a softmax."""
    if softmax is None or softmax.what != "zeros":
        return fact
    opened = softmax.axes.intersection(open_axes(shape_of(eqn.outvars[0])))
    return fact.with_zeros(opened, OF_SOFTMAX)


def softmax_of_result(eqn: JaxprEqn, ins: Sequence[Operand], key: Hashable) -> Softmax | None:
    """What the result of an equation, which gets this key, is of a softmax."""
    if not ins or len(eqn.outvars) != 1:
        return None
    name, rank, dtype = name_of(eqn), len(shape_of(eqn.outvars[0])), dtype_of(eqn.outvars[0])
    if name == "reduce_max":
        is_known = ins[0].key is not None and has_scores(eqn)
        if not is_known:
            return None
        order = ins[0].order or tuple(range(len(shape_of(eqn.invars[0]))))
        reduced = frozenset(order[axis] for axis in eqn.params["axes"])
        places = tuple(axis for axis in order if axis not in reduced)
        return Softmax("maximum", reduced, ins[0].key, places=places)
    if name in ("max", "select_n"):
        return _chosen(name, ins if name == "max" else ins[1:])
    if name == "sub":
        maximum = ins[1].softmax
        if maximum is None or maximum.what != "maximum":
            return None
        if not maximum.is_beside(ins[0], rank):
            return None
        order = ins[0].order or tuple(range(rank))
        return Softmax("shifted", frozenset(i for i in range(rank) if order[i] in maximum.axes))
    softmax = ins[0].softmax
    if softmax is None:
        return None
    match name, softmax.what:
        case "exp", "shifted":
            return softmax._replace(what="zeros", of=key, dtype=dtype)
        case "reduce_sum", "zeros":
            is_whole = softmax.axes == set(eqn.params["axes"])
            return _reduced(eqn, softmax._replace(what="sum")) if is_whole else None
        case "div", "zeros":
            total = ins[1].softmax
            if total is None or (total.what, total.axes) != ("sum", softmax.axes):
                return None
            is_beside = total.is_beside(Operand(softmax.of), rank)
            return softmax._replace(of=key, dtype=dtype) if is_beside else None
        case "convert_element_type", "zeros":  # halves are summed as floats
            widest = jnp.promote_types(dtype_of(eqn.invars[0]), dtype)
            return softmax if widest == dtype else None
        case "convert_element_type", "sum":
            # In another dtype than that of the exponentials, a sum may round to 0.
            return softmax if dtype == softmax.dtype else None
        case "broadcast_in_dim", "maximum" | "sum":
            return _broadcast(eqn, softmax)
        case "transpose", "maximum" | "sum":
            order = eqn.params["permutation"]
            return softmax._replace(places=tuple(softmax.places[i] for i in order))
        case "copy" | "stop_gradient", "maximum" | "sum":
            return softmax
    return None


def _reduced(eqn: JaxprEqn, softmax: Softmax) -> Softmax:
    axes, rank = frozenset(eqn.params["axes"]), len(shape_of(eqn.invars[0]))
    return softmax._replace(axes=axes, places=tuple(i for i in range(rank) if i not in axes))


def _chosen(name: str, ins: Sequence[Operand]) -> Softmax | None:
    """A maximum or a sum among numbers that change nothing of what it is.

    `jax.nn.softmax` takes the maximum of -inf and its maximum, and ``logsumexp`` takes 0 for one
    that is infinite. A sum must not become 0, as it is a divisor.
    """
    softmaxes = [x.softmax for x in ins if x.softmax is not None]
    numbers = [x.number for x in ins if x.softmax is None]
    if len(softmaxes) != 1 or None in numbers or softmaxes[0].what not in ("maximum", "sum"):
        return None
    (softmax,) = softmaxes
    if name == "max":
        is_same = all(np.asarray(x) == -np.inf for x in numbers)
    else:
        is_sum = softmax.what == "sum"
        is_same = all(map(np.isfinite, map(np.float64, numbers))) and not (
            is_sum and any(not np.any(np.asarray(x).astype(softmax.dtype)) for x in numbers)
        )
    return softmax if is_same else None


def _broadcast(eqn: JaxprEqn, softmax: Softmax) -> Softmax | None:
    """A maximum or a sum that is broadcast; None if an axis that counts something is repeated."""
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    places: list[int | None] = [None] * len(after)
    for i, place in enumerate(eqn.params["broadcast_dimensions"]):
        if str(before[i]) == str(after[place]):
            places[place] = softmax.places[i]
        elif softmax.places[i] is not None:
            return None
    return softmax._replace(places=tuple(places))
