"""Folding of small integer constants while a program is built, before XLA sees it.

    i = broadcast_in_dim[shape=(1,)] 3     i = [3]             a NumPy array
    y = gather x i                         y = slice[3:] x     the rule sees a constant start

JAX traces ``x[..., 3:]`` of an array with a symbolic size as a gather at ``broadcast_in_dim 3``,
and ``x[0]`` as a dynamic slice at ``select_n (lt 0 0) 0 b``. With a constant start the masking rule
emits a plain slice. Without it, the rule emits a dynamic slice with clamped starts, which XLA would
have to fold in the compile of every bucket. Such slices were a third of all operations of a
transformer whose queries, keys and values are slices of one product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from bucketjit._jax.jaxprs import Atom, dtype_of, name_of

_LARGEST = 16  # elements; an index has one for each axis


def folded(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
    """Evaluate an equation on integer constants; return None if it cannot be done.

    All operands and outputs must be small integer or boolean arrays. A ``select_n`` whose predicate
    is a constant returns the chosen operand, even if that one is traced.
    """
    name = name_of(eqn)
    evaluate = _OF_CONSTANTS.get(name)
    if evaluate is None and name != "select_n":
        return None
    if not all(map(_is_small, (*eqn.invars, *eqn.outvars))):
        return None
    constants = list(map(_constant, eqn.invars, operands))
    if evaluate is None:
        which = constants[0]
        if which is None or which.shape:
            return None
        # Clamped, so that a predicate out of range cannot raise here.
        chosen = 1 + min(max(int(which), 0), len(operands) - 2)
        known = constants[chosen]
        return [operands[chosen] if known is None else known]
    if any(c is None for c in constants):
        return None
    with np.errstate(over="ignore"):  # integers wrap around, as in XLA
        return [np.asarray(evaluate(eqn, *constants))]


def known_int(value: object) -> int | None:
    """The value of an integer scalar that is constant while the program is built, or None."""
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "iu":
        return int(value)
    return None


def _constant(var: Any, operand: Any) -> np.ndarray | None:
    """The operand as a NumPy array of the dtype in the program; None if it is not a constant."""
    if not isinstance(operand, int | np.bool_ | np.integer | np.ndarray):
        return None
    return np.asarray(operand, dtype_of(var))


def _is_small(var: Atom) -> bool:
    """Whether a value is a boolean or integer array of at most `_LARGEST` elements."""
    aval = var.aval
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return False
    return np.dtype(dtype).kind in "biu" and int(np.prod(shape)) <= _LARGEST


def _broadcast_in_dim(eqn: JaxprEqn, array: np.ndarray) -> np.ndarray:
    shape, places = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    aligned = [1] * len(shape)
    for size, place in zip(array.shape, places, strict=True):
        aligned[place] = size
    return np.broadcast_to(array.reshape(aligned), shape)


_OF_CONSTANTS: Mapping[str, Callable[..., np.ndarray]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": lambda eqn, *arrays: np.concatenate(arrays, axis=eqn.params["dimension"]),
    "convert_element_type": lambda eqn, array: array.astype(dtype_of(eqn.outvars[0])),
    "lt": lambda _, x, y: np.less(x, y),
    "add": lambda _, x, y: np.add(x, y),
    "sub": lambda _, x, y: np.subtract(x, y),
    "mul": lambda _, x, y: np.multiply(x, y),
}
