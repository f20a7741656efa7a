"""How operations change a constant that fills the padding of operands; what a softmax is made of.

`bucketjit._masking.padding` says which constants are followed, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from bucketjit._ir import dataflow
from bucketjit._ir.expressions import is_symbolic
from bucketjit._jax.jaxprs import name_of, shape_of

_PARTS = 16  # floats are followed if they are multiples of 1/16


def limit(dtype: Any) -> float:
    return int(jnp.finfo(dtype).maxexp) if jnp.issubdtype(dtype, jnp.inexact) else np.inf


def is_simple(constant: np.ndarray) -> bool:
    """Whether a constant is no float, is 0, or is a small multiple of 1/16."""
    if not jnp.issubdtype(constant.dtype, jnp.inexact) or not constant.any():
        return True
    if not jnp.issubdtype(constant.dtype, jnp.floating):
        return False
    parts = float(constant) * _PARTS
    return parts.is_integer() and abs(parts) < 2.0 ** int(jnp.finfo(constant.dtype).nmant)


def _broadcast(eqn: JaxprEqn, constants: Sequence[np.ndarray]) -> np.ndarray | None:
    """The constant, unless a symbolic axis is added or an axis of size 1 becomes symbolic."""
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    places = eqn.params["broadcast_dimensions"]
    is_new = (is_symbolic(d) and i not in places for i, d in enumerate(after))
    is_spread = (str(d) != str(after[p]) for d, p in zip(before, places, strict=True))
    return None if before and (any(is_new) or any(is_spread)) else constants[0]


def _reduce(eqn: JaxprEqn, constants: Sequence[np.ndarray]) -> np.ndarray | None:
    """The constant of a reduction over static axes."""
    sizes = [shape_of(eqn.invars[0])[axis] for axis in eqn.params["axes"]]
    if any(map(is_symbolic, sizes)):
        return None
    if name_of(eqn) == "reduce_sum":
        return _zero(eqn, constants)
    return constants[0] if all(sizes) else None  # an empty maximum is -inf, not the constant


def _zero(eqn: JaxprEqn, constants: Sequence[np.ndarray]) -> np.ndarray | None:
    """0 if all bits of the operand's constant are 0 (those of -0.0 are not), else None."""
    is_zero = not constants[0].tobytes().strip(b"\0")
    return constants[0] if is_zero and eqn.params.get("y", 1) > 0 else None


def _real_zero(eqn: JaxprEqn, constants: Sequence[np.ndarray]) -> np.ndarray | None:
    """0 if the operand is real and its constant is 0, else None."""
    is_complex = jnp.issubdtype(constants[0].dtype, jnp.complexfloating)
    return None if is_complex else _zero(eqn, constants)  # in XLA, the arc tangent of 0j is -0j


def _two(eqn: JaxprEqn, constants: Sequence[np.ndarray]) -> np.ndarray | None:
    """The constant of an elementwise operation on operands of equal shape, or on scalars."""
    out = str(shape_of(eqn.outvars[0]))
    if any(shape and str(shape) != out for shape in map(shape_of, eqn.invars)):
        return None
    return of_two(name_of(eqn), *constants)


def of_two(name: str, a: np.ndarray, b: np.ndarray) -> Any:
    """The result of an operation on two constants; None if XLA might find another one."""
    with np.errstate(all="ignore"):
        found: np.ndarray = _OPERATIONS[name](a, b)
    if name in ("max", "min", "and", "or"):  # one of the operands, or bits of both
        # The maximum of 0.0 and -0.0 may be either one.
        return None if not (a.any() or b.any()) and a.tobytes() != b.tobytes() else found
    if not jnp.issubdtype(found.dtype, jnp.inexact):
        return found  # integers wrap around in NumPy as in XLA
    if jnp.issubdtype(found.dtype, jnp.complexfloating):
        return found if not (a.any() or b.any()) else None
    if name == "mul" and not (a.any() and b.any()):
        return found if np.isfinite(found) else None
    if not (is_simple(a) and is_simple(b)):
        return None
    exact = _OPERATIONS[name](a.astype(np.float64), b.astype(np.float64))
    return found if float(found) == exact else None


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **{"mul": np.multiply, "add": np.add, "add_any": np.add, "sub": np.subtract},
    **{"max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or},
}

CHANGES: Mapping[str, Callable[[JaxprEqn, Sequence[np.ndarray]], np.ndarray | None]]
CHANGES = dataflow.table(
    {
        "copy stop_gradient convert_element_type transpose squeeze": lambda eqn, ins: ins[0],
        "broadcast_in_dim": _broadcast,
        "reduce_sum reduce_max reduce_min reduce_and reduce_or": _reduce,
        # These map 0 to exactly 0. Nothing is known of their results at other constants.
        "abs square integer_pow": _zero,
        "sign sqrt cbrt floor ceil round expm1 log1p erf": _real_zero,
        "sin tan asin atan sinh tanh asinh atanh": _real_zero,
        " ".join(_OPERATIONS): _two,
    }
)


# --- softmaxes ---

# Values of a softmax, by which `bucketjit._masking.padding` knows its exponentials.


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
