"""Constants while a program is built: small integers, which are folded, and zeros in padding.

    i = broadcast_in_dim[shape=(1,)] 3     i = [3]             a NumPy array
    y = gather x i                         y = slice[3:] x     the rule sees a constant start

JAX traces ``x[..., 3:]`` of an array with a symbolic size as a gather at ``broadcast_in_dim 3``,
and ``x[0]`` as a dynamic slice at ``select_n (lt 0 0) 0 b``. With a constant start the masking rule
emits a plain slice. Without it, the rule emits a dynamic slice with clamped starts, which XLA would
have to fold in the compile of every bucket. Such slices were a third of all operations of a
transformer whose queries, keys and values are slices of one product.

`bucketjit._masking.padding` says what zeros in padding are followed for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from bucketjit._ir import dataflow
from bucketjit._ir.dataflow import kept_axes
from bucketjit._jax.jaxprs import Atom, dtype_of, name_of, shape_of
from bucketjit._masking.padding_facts import open_axes

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
        constant = constants[chosen]
        return [operands[chosen] if constant is None else constant]
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


# --- zeros in padding ---------------------------------------------------------------------------

_MOST_EXPONENT = 2048  # from 2**2048 on, no float holds a power of 2


class PaddingNumber(NamedTuple):
    """What an operand holds in its padding; a number is its own padding.

    Attributes:
        number: The number. All bits are 0 for an array.
        exponent: A product of some of the factors of the operand is less than 2 to the power of it.
    """

    number: np.ndarray
    exponent: int


def constant_of(number: object, dtype: Any) -> PaddingNumber:
    """The constant that a number is."""
    array = np.asarray(number, dtype)
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    return PaddingNumber(array, max(0, int(np.frexp(float(np.abs(array)))[1])) if is_float else 0)


def is_zero(number: Any, dtype: Any) -> bool:
    """Whether all bits of a number are 0 in a dtype; those of -0.0 are not."""
    if isinstance(number, jax.Array) or np.ndim(number):
        return False
    return not np.asarray(number).astype(dtype).tobytes().strip(b"\0")


def exponent_of_zeros(eqn: JaxprEqn, ins: Sequence[PaddingNumber | None]) -> int | None:
    """The exponent (see `PaddingNumber`) of a result whose padding is 0; None if it may not be."""
    name, constants = name_of(eqn), [c for c in ins if c is not None]
    dtype = dtype_of(eqn.outvars[0])
    if len(constants) < len(ins) or not _IS_ZERO[name](eqn, *(c.number for c in constants)):
        return None
    exponents = [c.exponent for c in constants]
    if name in ("square", "integer_pow"):
        exponents *= min(eqn.params.get("y", 2), _MOST_EXPONENT)
    is_product = name in ("mul", "square", "integer_pow")
    exponent = sum(exponents) if is_product else max(exponents)
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    return None if is_float and exponent >= int(jnp.finfo(dtype).maxexp) else exponent


def has_zero(dtype: Any) -> bool:
    """Whether arrays of a dtype hold numbers, one of which is 0."""
    is_number = not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    return is_number and dtype != jax.dtypes.float0 and dtype.name != "float8_e8m0fnu"


def _is_bare(number: np.ndarray) -> bool:
    return not number.tobytes().strip(b"\0")


def _is_zero_of_one(eqn: JaxprEqn, number: np.ndarray) -> bool:
    """The open axes of the result are those of the operand, or a number is repeated."""
    before, kept = shape_of(eqn.invars[0]), kept_axes(eqn)
    sources = {kept.get(axis) for axis in open_axes(shape_of(eqn.outvars[0]))}
    if not _is_bare(number) or eqn.params.get("y", 1) <= 0:
        return False
    if before and sources != set(open_axes(before)):
        return False
    # The maximum of none is -inf.
    return name_of(eqn) == "reduce_sum" or all(before[a] for a in eqn.params.get("axes", ()))


def _is_zero_of_reals(eqn: JaxprEqn, number: np.ndarray) -> bool:
    # In XLA, the arc tangent of 0j is -0j.
    is_complex = jnp.issubdtype(number.dtype, jnp.complexfloating)
    return not is_complex and _is_zero_of_one(eqn, number)


def _is_zero_of_two(eqn: JaxprEqn, a: np.ndarray, b: np.ndarray) -> bool:
    """Whether an operation on operands of equal shape, or on numbers, is 0 in XLA as in NumPy."""
    out, name = str(shape_of(eqn.outvars[0])), name_of(eqn)
    if any(shape and str(shape) != out for shape in map(shape_of, eqn.invars)):
        return False
    if (a.any() or b.any()) and jnp.issubdtype(a.dtype, jnp.complexfloating):
        return False
    with np.errstate(all="ignore"):
        is_zero = _is_bare(_OPERATIONS[name](a, b))
    # The maximum of 0.0 and -0.0 may be either one.
    is_either = name in ("max", "min") and not (a.any() or b.any())
    return is_zero and (not is_either or a.tobytes() == b.tobytes())


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **{"mul": np.multiply, "add": np.add, "add_any": np.add, "sub": np.subtract},
    **{"max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or},
}

# Whether the padding of a result is 0, by the numbers in the padding of its operands.
_IS_ZERO: Mapping[str, Callable[..., bool]] = dataflow.table(
    {
        "copy stop_gradient convert_element_type abs square integer_pow": _is_zero_of_one,
        "transpose squeeze broadcast_in_dim reshape": _is_zero_of_one,
        "reduce_sum reduce_max reduce_min reduce_and reduce_or": _is_zero_of_one,
        "sign sqrt cbrt floor ceil round expm1 log1p erf": _is_zero_of_reals,
        "sin tan asin atan sinh tanh asinh atanh": _is_zero_of_reals,
        " ".join(_OPERATIONS): _is_zero_of_two,
    }
)
KEEP_ZEROS = frozenset(_IS_ZERO)
