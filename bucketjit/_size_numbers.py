"""What a program computes of sizes alone, where the unpadded run has numbers of Python.

``x.shape[0] * 0.29`` is a float of Python there, of 53 bits, and an array of 24 bits in a program
that holds for all sizes. Where it ends up in sums and products of arrays, that is one rounding. But
``29.0 > 28.999999999999996``, and so is its whole part: what decides by such a number is not to be
traced at symbolic sizes. Nor is what wraps: a size as ``uint8``.

A number is known by its mark, which is put on it where it is made; see `watch_equalities`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bucketjit import _jax
from bucketjit._errors import MaskingError

_NARROW = frozenset(("int2", "int4", "int8", "int16", "uint2", "uint4", "uint8", "uint16"))
# What goes on as exact as it was, but for a rounding.
_SIGNS_MULTIPLY = frozenset(("mul", "div"))
_KEEP_SIGN = frozenset(
    ("broadcast_in_dim", "reshape", "squeeze", "copy", "name", "sqrt", "rsqrt", "cbrt")
    + ("reduce_precision", "convert_element_type", "sharding_constraint")
)
_SMOOTH = frozenset(
    ("exp", "exp2", "log", "log1p", "expm1", "tanh", "sinh", "cosh", "sin", "cos", "tan")
    + ("logistic", "erf", "erfc", "lgamma", "digamma", "asinh", "atan")
    + ("pow", "integer_pow", "square", "abs", "max", "min")
)
# Where it may meet arrays, with the positions of operands that decide something.
_MEETS: dict[str, frozenset[int]] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "pow", "max", "min", "atan2"), frozenset[int]()),
    **dict.fromkeys(("add_any", "concatenate", "pad", "dot_general", "stack"), frozenset[int]()),
    "dynamic_update_slice": frozenset[int](),
    "select_n": frozenset({0}),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul"), frozenset({1})),
}
_CALLS = frozenset(
    ("jit", "pjit", "call", "closed_call", "core_call", "remat2", "checkpoint", "remat_opt")
    + ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call")
)


class _Known(NamedTuple):
    """What is known of a value that depends on sizes alone.

    Attributes:
        is_number: Whether the unpadded run may have a float of Python in its place.
        sign: 1 or -1 where it has that sign at all sizes; 0 where that is not known.
    """

    is_number: bool
    sign: int


class Decides(MaskingError):
    """A program decides by a number that is not exact at symbolic sizes."""


def refuse_decisions(jaxpr: Any) -> None:
    """Refuse a program that decides by a number which it computes of sizes.

    Args:
        jaxpr: The program, open.

    Raises:
        Decides: An equation does.
    """
    _walk(jaxpr, [None] * len(jaxpr.invars))


def _walk(jaxpr: Any, given: Sequence[_Known | None]) -> list[_Known | None]:
    known: dict[Any, _Known] = {}
    known.update((v, k) for v, k in zip(jaxpr.invars, given, strict=True) if k is not None)

    def of(atom: Any) -> _Known | None:
        return None if _jax.is_literal(atom) else known.get(atom)

    for eqn in jaxpr.eqns:
        operands = [of(v) for v in eqn.invars]
        for var, found in zip(eqn.outvars, _results(eqn, operands), strict=True):
            if found is not None:
                known[var] = found
    return [of(v) for v in jaxpr.outvars]


def _results(eqn: Any, operands: Sequence[_Known | None]) -> Sequence[_Known | None]:
    name, params = _jax.name_of(eqn), eqn.params
    if name == "dim_as_value":
        return [_Known(False, 1 if _jax.is_positive(params["dim"]) else 0)]
    if name == "name" and params["name"] == _jax.NUMBER_OF_SIZES:
        return [_Known(True, 0 if operands[0] is None else operands[0].sign)]
    nothing: list[_Known | None] = [None] * len(eqn.outvars)
    if name in _CALLS:
        inner = _jax.open_jaxpr(_jax.called_jaxpr(params))[0]
        if len(inner.invars) == len(operands) and len(inner.outvars) == len(nothing):
            return _walk(inner, operands)
    if name in ("scan", "while", "cond"):
        _walk_control(eqn, operands)
        return nothing
    if not any(operands):
        for inner in _jax.bodies(eqn):
            opened = _jax.open_jaxpr(inner)[0]
            _walk(opened, [None] * len(opened.invars))
        return nothing
    has_number = any(k is not None and k.is_number for k in operands)
    literals = [_of_literal(v) for v in eqn.invars]
    meets_data = any(k is None and one is None for k, one in zip(operands, literals, strict=True))
    if name == "convert_element_type" and not has_number and not meets_data:
        if np.dtype(params["new_dtype"]).name in _NARROW:
            _refuse(eqn, f"a size becomes {np.dtype(params['new_dtype']).name}, and may wrap")
        return [operands[0]]
    if meets_data:
        if has_number:
            decided = _MEETS.get(name)
            if decided is None or any(
                k is not None and k.is_number for i, k in enumerate(operands) if i in decided
            ):
                _refuse(eqn, f"a number that is computed of sizes goes into {name}")
        return nothing
    signs = [one if k is None else k.sign for k, one in zip(operands, literals, strict=True)]
    sign = _sign(name, signs)
    if not has_number:
        return [_Known(False, sign)] * len(nothing)
    if name in ("add", "sub"):
        if sign == 0:
            _refuse(eqn, "numbers that are computed of sizes may cancel out")
    elif name == "convert_element_type":
        if not np.issubdtype(params["new_dtype"], np.inexact) and params["new_dtype"] != "bfloat16":
            _refuse(eqn, "a number that is computed of sizes becomes an integer")
    elif name not in _SIGNS_MULTIPLY | _KEEP_SIGN | _SMOOTH | {"neg"}:
        _refuse(eqn, f"a number that is computed of sizes goes into {name}")
    return [_Known(True, sign)] * len(nothing)


def _sign(name: str, signs: Sequence[Any]) -> int:
    if name in _SIGNS_MULTIPLY:
        return int(np.prod(signs))
    if name == "neg":
        return -int(signs[0])
    if name == "sub":
        signs = [signs[0], -signs[1]]
    if name in ("add", "sub", "max", "min"):
        return int(signs[0]) if signs[0] == signs[1] else 0
    if name in ("exp", "exp2", "logistic"):
        return 1
    return int(signs[0]) if name in _KEEP_SIGN else 0


def _of_literal(atom: Any) -> int | None:
    """The sign of a literal, or None for what is none."""
    if not _jax.is_literal(atom):
        return None
    value = np.asarray(atom.val)
    if value.shape or not np.isrealobj(value):
        return 0
    return int(value > 0) - int(value < 0)  # 0 of a NaN


def _walk_control(eqn: Any, operands: Sequence[_Known | None]) -> None:
    """What goes round in a loop is not followed."""
    params = eqn.params
    if _jax.name_of(eqn) == "cond":
        if operands[0] is not None and operands[0].is_number:
            _refuse(eqn, "a number that is computed of sizes chooses a branch")
        for branch in params["branches"]:
            _walk(_jax.open_jaxpr(branch)[0], operands[1:])
    elif _jax.name_of(eqn) == "scan":
        _walk(_jax.open_jaxpr(params["jaxpr"])[0], operands)
    else:
        cond, body = params["cond_nconsts"], params["body_nconsts"]
        carry = list(operands[cond + body :])
        _walk(_jax.open_jaxpr(params["cond_jaxpr"])[0], [*operands[:cond], *carry])
        _walk(_jax.open_jaxpr(params["body_jaxpr"])[0], [*operands[cond : cond + body], *carry])


def _refuse(eqn: Any, why: str) -> None:
    line = _jax.source_line(eqn)
    raise Decides(
        f"{why}, and is not as exact at symbolic sizes" + (f" [{line}]" if line else ""),
        "compute it with jax.numpy of jnp.shape(x)[0], or leave the axis static",
    )
