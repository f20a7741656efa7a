"""What a program computes of sizes alone, where the unpadded run has numbers of Python.

``x.shape[0] * 0.29`` is a float of Python there, of 53 bits, and an array of 24 bits in a program
that holds for all sizes. Where it is added to arrays, or multiplied with them, that is one rounding
more. But ``29.0 > 28.999999999999996``, and so is its whole part: what decides by such a number is
not to be traced at symbolic sizes. Nor is what wraps: a size as ``uint8``.

A number is known by its mark, which is put on it where it is made; see `watch_equalities`. It is
followed through the program as long as it is computed with numbers, sizes and constants only. What
comes of it and of data is data, and rounds as that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from jax import dtypes

from bucketjit import _jax
from bucketjit._errors import MaskingError

_NARROW = frozenset(("int2", "int4", "int8", "int16", "uint2", "uint4", "uint8", "uint16"))
_SIGNS_MULTIPLY = frozenset(("mul", "div"))
# The same number, or some of several.
_CARRY = frozenset(
    ("broadcast_in_dim", "reshape", "squeeze", "copy", "name", "stop_gradient", "slice")
    + ("concatenate", "stack", "transpose", "rev", "optimization_barrier", "sharding_constraint")
)
# What goes on as exact as it was, but for a rounding.
_KEEP_SIGN = _CARRY | {"sqrt", "rsqrt", "cbrt", "reduce_precision", "convert_element_type"}
_SMOOTH = frozenset(
    ("exp", "exp2", "log", "log1p", "expm1", "tanh", "sinh", "cosh", "sin", "cos", "tan")
    + ("logistic", "erf", "erfc", "lgamma", "digamma", "asinh", "atan", "add", "sub", "neg")
    + ("integer_pow", "square", "abs", "max", "min", "reduce_sum", "reduce_max", "reduce_min")
)
_WHOLE_PART = frozenset(("floor", "ceil", "round", "sign", "is_finite"))
_COMPARE = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))
# Where it may meet data, with the positions of operands that decide something.
_MEETS: dict[str, frozenset[int]] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "pow", "max", "min", "atan2"), frozenset[int]()),
    **dict.fromkeys(("add_any", "concatenate", "pad", "dot_general", "stack"), frozenset[int]()),
    **dict.fromkeys(("dynamic_update_slice", "clamp"), frozenset[int]()),
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
        is_once: Whether it is what the number of Python is rounded to.
    """

    is_number: bool
    sign: int
    is_once: bool = False


_States = list[_Known | None]


def refuse_decisions(jaxpr: Any) -> None:
    """Refuse a program that decides by a number which it computes of sizes.

    Args:
        jaxpr: The program, open.

    Raises:
        MaskingError: An equation does.
    """
    _walk(jaxpr, [None] * len(jaxpr.invars))


def _walk(jaxpr: Any, given: Sequence[_Known | None]) -> _States:
    known: dict[Any, _Known] = {}
    known.update((v, k) for v, k in zip(jaxpr.invars, given, strict=True) if k is not None)

    def of(atom: Any) -> _Known | None:
        return None if _jax.is_literal(atom) else known.get(atom)

    for eqn in jaxpr.eqns:
        results = _results(eqn, list(map(of, eqn.invars)))
        known.update((v, k) for v, k in zip(eqn.outvars, results, strict=True) if k is not None)
    return list(map(of, jaxpr.outvars))


def _results(eqn: Any, operands: _States) -> _States:
    name, params = _jax.name_of(eqn), eqn.params
    nothing: _States = [None] * len(eqn.outvars)
    if name == "dim_as_value":
        return [_Known(False, 1 if _jax.is_positive(params["dim"]) else 0)]
    if name == "iota":
        return [_Known(False, 0)]
    if name == "name" and params["name"] in (_jax.NUMBER_OF_SIZES, _jax.ROUNDED_ONCE):
        sign = 0 if operands[0] is None else operands[0].sign
        return [_Known(True, sign, params["name"] == _jax.ROUNDED_ONCE)]
    if name in _CALLS:
        inner = _jax.open_jaxpr(_jax.called_jaxpr(params))[0]
        if len(inner.invars) == len(operands) and len(inner.outvars) == len(nothing):
            return _walk(inner, operands)
    if name in _CONTROL:
        return _CONTROL[name](eqn, operands)
    if not any(operands):
        for inner in _jax.bodies(eqn):
            opened = _jax.open_jaxpr(inner)[0]
            _walk(opened, [None] * len(opened.invars))
        return nothing
    literals = [_of_literal(v) for v in eqn.invars]
    every = [k or one for k, one in zip(operands, literals, strict=True)]
    numbers = [k for k in operands if k is not None and k.is_number]
    if name == "div" and (by := operands[1]) is not None and by.is_number and by.sign == 0:
        _refuse(eqn, "a number that is computed of sizes divides, and may be next to 0")
    if not all(every):
        return _with_data(eqn, operands, numbers)
    if name == "convert_element_type" and not numbers:
        if np.dtype(params["new_dtype"]).name in _NARROW:
            _refuse(eqn, f"a size becomes {np.dtype(params['new_dtype']).name}, and may wrap")
        return [operands[0]]
    sign = _sign(name, [k.sign for k in every if k is not None])
    if not numbers:
        return [_Known(False, sign)] * len(nothing)
    is_once = all(k.is_once for k in numbers)
    if name == "convert_element_type":
        if not dtypes.issubdtype(params["new_dtype"], np.inexact):
            _refuse(eqn, "a number that is computed of sizes becomes an integer")
    elif name in _COMPARE and is_once and eqn.outvars[0].aval.shape:
        return nothing  # arrays are compared in their own type, numbers of Python in theirs
    elif name not in _SIGNS_MULTIPLY | _KEEP_SIGN | _SMOOTH | (_WHOLE_PART if is_once else set()):
        _refuse(eqn, f"a number that is computed of sizes goes into {name}")
    keeps = name in _CARRY | _WHOLE_PART | {"neg"} or (
        name == "convert_element_type" and params["new_dtype"] in (np.float32, np.float64)
    )
    return [_Known(True, sign, is_once and keeps)] * len(nothing)


def _with_data(eqn: Any, operands: _States, numbers: Sequence[_Known]) -> _States:
    """What comes of values, some of which are data."""
    name = _jax.name_of(eqn)
    if not numbers or (name in _COMPARE and all(k.is_once for k in numbers)):
        return [None] * len(eqn.outvars)
    decide = _MEETS.get(name)
    if decide is None or any(k in numbers for i, k in enumerate(operands) if i in decide):
        _refuse(eqn, f"a number that is computed of sizes goes into {name}")
    is_chosen = name == "select_n"  # as it is
    return [_Known(True, 0, all(k.is_once for k in numbers)) if is_chosen else None]


def _sign(name: str, signs: Sequence[int]) -> int:
    if name in _SIGNS_MULTIPLY:
        return int(np.prod(signs))
    if name == "neg":
        return -signs[0]
    if name == "sub":
        signs = [signs[0], -signs[1]]
    if name in ("add", "sub", "max", "min", "concatenate", "stack"):
        return signs[0] if len(set(signs)) == 1 else 0
    if name in ("exp", "exp2", "logistic"):
        return 1
    return signs[0] if name in _KEEP_SIGN or name == "reduce_sum" else 0


def _of_literal(atom: Any) -> _Known | None:
    """A literal is as exact as it is in the unpadded run; None for what is none."""
    if not _jax.is_literal(atom):
        return None
    value = np.asarray(atom.val)
    if value.shape or not np.isrealobj(value):
        return _Known(False, 0)
    return _Known(False, int(value > 0) - int(value < 0))  # 0 of a NaN


# --- control flow ---------------------------------------------------------------------------


def _cond(eqn: Any, operands: _States) -> _States:
    if operands[0] is not None and operands[0].is_number:
        _refuse(eqn, "a number that is computed of sizes chooses a branch")
    outs = [_walk(_jax.open_jaxpr(b)[0], operands[1:]) for b in eqn.params["branches"]]
    return [_any_of(found) for found in zip(*outs, strict=True)]


def _scan(eqn: Any, operands: _States) -> _States:
    consts, carried = _jax.scan_arity(eqn.params)
    body = _jax.open_jaxpr(eqn.params["jaxpr"])[0]
    carry, xs = operands[consts : consts + carried], operands[consts + carried :]

    def step(carry: _States) -> _States:
        return _walk(body, [*operands[:consts], *carry, *xs])

    return _around(step, carry)


def _while(eqn: Any, operands: _States) -> _States:
    params = eqn.params
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    consts, carry = operands[of_cond : of_cond + of_body], operands[of_cond + of_body :]

    def step(carry: _States) -> _States:
        _walk(_jax.open_jaxpr(params["cond_jaxpr"])[0], [*operands[:of_cond], *carry])
        return _walk(_jax.open_jaxpr(params["body_jaxpr"])[0], [*consts, *carry])

    return _around(step, carry)


def _around(step: Any, carry: _States) -> _States:
    """The outputs of a loop: what may come round in any turn of it."""
    while True:
        outs = step(carry)
        joined = [_any_of(pair) for pair in zip(carry, outs, strict=False)]
        if joined == carry:
            return outs
        carry = joined


def _any_of(found: Sequence[_Known | None]) -> _Known | None:
    """What is known of one of several values; a number remains one."""
    known = [k for k in found if k is not None]
    if len(known) < len(found) and not any(k.is_number for k in known):
        return None
    signs = {k.sign for k in known} if len(known) == len(found) else {0}
    is_number = any(k.is_number for k in known)
    is_once = all(k.is_once for k in known if k.is_number)
    return _Known(is_number, signs.pop() if len(signs) == 1 else 0, is_number and is_once)


_CONTROL = {"cond": _cond, "scan": _scan, "while": _while}


def _refuse(eqn: Any, why: str) -> NoReturn:
    line = _jax.source_line(eqn)
    raise MaskingError(
        f"{why}, and is not as exact at symbolic sizes" + (f" [{line}]" if line else ""),
        "leave the axis static",
    )
