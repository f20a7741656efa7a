"""What is known of the values of a trace: which are equal, and between which sizes they are.

    a = gt x 0      number 7
    b = gt x 0      number 7: an equal equation of equal operands

Equal selections share one size, by `ValueNumbers`. By `Bounds` a size can be made of an integer:

    b:bool[n] = gt a 0.0          0 to 1
    c:i32[n] = convert b          0 to 1
    d:i32[] = reduce_sum c        0 to n      jnp.arange(d) is cut from n positions
    e:i32[] = add d 1             1 to n + 1

A bound is an int or a symbolic size; None if there is none. Bounds of floats are whole numbers
around them, and no sizes: of functions whose range is known, such as a sigmoid. Every rule is sound
for sizes that are at least 1. An integer that may wrap around has no bounds but those of its type;
to tell which may, sizes are taken to be at most 2**24.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from bucketjit._ir import dataflow, ranges
from bucketjit._ir.expressions import Dim, is_symbolic
from bucketjit._ir.ranges import Range, is_at_most, largest, smallest, tighter
from bucketjit._jax.jaxprs import CALLS, called_jaxpr, dtype_of, is_jaxpr, open_jaxpr, shape_of
from bucketjit._jax.tracers import Made, constant_of, equation_of, literal_of
from bucketjit._jax.user_code import is_code_of_jax

BITS_OF_SIZES = 32

_PLAIN = (int, float, complex, str, bytes, bool, type(None), np.dtype, np.generic, enum.Enum, type)


class ValueNumbers(dataflow.TraceAnalysis[int]):
    """Numbers the values of a trace: equal equations of equal operands have equal numbers.

    An equation that runs programs is compared as one, with these programs, but for a call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[Any, int] = {}
        self._kept: list[Any] = []  # what is known by its `id` alone
        self._false = self._number(("literal", "bool[]", "False"))
        self.table = {
            **dict.fromkeys((*CALLS, "cond", "scan", "while"), self.default),
            **dataflow.table({"jit pjit": self._called, "ne": self._unequal}),
        }

    def of_integer(self, value: Any) -> int:
        """The number of an integer, whatever its integer type is."""
        return self.of(unconverted(value))

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def held(self, value: Any) -> int:
        """Numbers are equal by value; anything else only to itself."""
        if (literal := literal_of(value)) is not None:
            return self.literal(literal)
        if not isinstance(value, jax.core.Tracer) and np.ndim(value) == 0:
            return self._number(("number", str(jax.typeof(value)), _shown(value)))
        return self._only(value)

    def _only(self, value: Any) -> int:
        self._kept.append(value)
        return self._number(("one", id(value)))

    def unknown(self, atom: Any) -> int:
        """A value that is equal to no other one."""
        return self._number(object())

    def literal(self, atom: Any) -> int:
        """A number written into an equation."""
        return self._number(("literal", str(atom.aval), _shown(atom.val)))

    def default(self, eqn: Any, ins: Sequence[int]) -> list[int]:
        """The numbers of the results of an equation, by its parameters and operands."""
        params = tuple((k, self._param(v)) for k, v in sorted(eqn.params.items()))
        key = eqn.primitive.name, params, tuple(ins)
        return [self._number((i, key)) for i in range(len(eqn.outvars))]

    def _unequal(self, eqn: Any, ins: Sequence[int]) -> list[int]:
        # As `jnp.count_nonzero` reads a mask.
        return [ins[0]] if ins[1] == self._false else self.default(eqn, ins)

    def _called(self, eqn: Any, ins: Sequence[int]) -> list[int]:
        """The numbers of the results of a function under ``jit``: those of its equations."""
        jaxpr, consts = open_jaxpr(called_jaxpr(eqn.params))
        if len(jaxpr.invars) != len(ins) or len(jaxpr.constvars) != len(consts):
            return self.default(eqn, ins)
        constants: dict[Any, int] = dict(zip(jaxpr.constvars, map(self._only, consts), strict=True))
        return dataflow.follow(self, jaxpr, ins, constants)

    def _param(self, value: Any) -> Any:
        """The key of a parameter: by value if it is a plain one, else by identity."""
        if isinstance(value, tuple | list):
            return (type(value).__name__, *map(self._param, value))
        if is_symbolic(value) or (isinstance(value, _PLAIN) and not is_jaxpr(value)):
            return type(value).__name__, repr(value)
        self._kept.append(value)
        return id(value)


def _shown(value: Any) -> str:
    return repr(np.asarray(value).tolist())


def unconverted(value: Any) -> Any:
    """An integer before its conversions to integer types that hold every size."""
    while _bits(value) >= BITS_OF_SIZES:
        eqn = equation_of(value)
        is_convert = eqn is not None and eqn.primitive.name == "convert_element_type"
        if eqn is None or not is_convert or not _bits(eqn.operands[0]):
            break
        (value,) = eqn.operands
    return value


def _bits(value: Any) -> int:
    """The number of bits of an integer type; 0 for any other type."""
    dtype = jax.typeof(value).dtype
    return 8 * dtype.itemsize if np.issubdtype(dtype, np.integer) else 0


def negated_mask(total: Made) -> Any | None:
    """The mask ``m`` of ``jnp.sum(~m)``, which is the size of `m` less ``jnp.sum(m)``."""
    (mask,) = total.operands
    for name in ("convert_element_type", "not"):
        eqn = equation_of(mask)
        if eqn is None or eqn.primitive.name != name:
            return None
        (mask,) = eqn.operands
    is_whole = len(total.params["axes"]) == mask.ndim
    return mask if is_whole and mask.dtype == bool else None


# --- bounds ---


class Bounds(dataflow.TraceAnalysis[Range]):
    """The bounds of the integers of a trace. `of` asks for those of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.table = _TABLE

    def held(self, value: Any) -> Range:
        """The range of a number or an array; of an argument, that of its type."""
        literal = literal_of(value)
        held = value if literal is None else literal.val
        held = constant_of(held) if isinstance(held, jax.core.Tracer) else held
        if held is None or isinstance(held, jax.core.Tracer):
            return ranges.range_of_type(jax.typeof(value))
        return ranges.range_of_array(held)

    def unknown(self, atom: Any) -> Range:
        """Only the type is known."""
        return ranges.range_of_type(atom.aval)

    def literal(self, atom: Literal) -> Range:
        """A number."""
        return ranges.range_of_array(atom.val)

    def join(self, left: Range, right: Range) -> Range:
        """The range around both."""
        return left | right

    def row(self, value: Range, var: Any) -> Range:
        """A row has values of its array, and an array those of its rows."""
        return value

    stacked = row

    def default(self, eqn: JaxprEqn, ins: Sequence[Range]) -> Sequence[Range]:
        """Only the types are known."""
        return [self.unknown(var) for var in eqn.outvars]


def _count(eqn: JaxprEqn, axes: Sequence[int]) -> Dim:
    return math.prod(shape_of(eqn.invars[0])[i] for i in axes)


def _is_float(eqn: JaxprEqn) -> bool:
    return bool(jnp.issubdtype(dtype_of(eqn.outvars[0]), np.floating))


# --- the rules: from an equation and the bounds of its operands to those of its result -----------

Rule = Callable[[JaxprEqn, Sequence[Range]], Range]


def _max(eqn: JaxprEqn, ins: Sequence[Range]) -> Range:
    a, b = ins
    return Range(tighter(largest, a.low, b.low), largest(a.high, b.high))


def _min(eqn: JaxprEqn, ins: Sequence[Range]) -> Range:
    a, b = ins
    return Range(smallest(a.low, b.low), tighter(smallest, a.high, b.high))


def _div(eqn: JaxprEqn, ins: Sequence[Range]) -> Range:
    if ins[0].is_natural and _is_share(*getattr(eqn, "operands", (None, None))):
        return Range(0, 1)
    return Range() if _is_float(eqn) else ranges.quotient(*ins)


def _is_share(part: Any, whole: Any) -> bool:
    """Whether a value is divided by its own sum, as in a softmax."""
    spread = equation_of(whole)
    total = equation_of(spread.operands[0]) if spread and spread.operands else None
    if not spread or not total or total.primitive.name != "reduce_sum":
        return False
    kept = tuple(i for i in range(np.ndim(part)) if i not in total.params["axes"])
    return total.operands[0] is part and spread.params.get("broadcast_dimensions") == kept


def _rest(eqn: JaxprEqn, ins: Sequence[Range]) -> Range:
    """``%`` of Python: of the sign of the divisor."""
    x, by = ins
    if not is_at_most(1, by.low):
        return Range()
    most = by.high if _is_float(eqn) else ranges.sum_of(by.high, -1)
    return Range(0, tighter(smallest, most, x.high) if x.is_natural else most)


def _rem(eqn: JaxprEqn, ins: Sequence[Range]) -> Range:
    rest = _rest(eqn, ins)
    return rest if ins[0].is_natural else Range((-rest).low, rest.high)


def _abs(eqn: JaxprEqn, ins: Sequence[Range]) -> Range:
    far = _max(eqn, [ins[0], -ins[0]])
    return ins[0] if ins[0].is_natural else Range(tighter(largest, 0, far.low), far.high)


def _has_some(eqn: JaxprEqn) -> bool:
    """Whether a reduction is never one of nothing, which has an extreme value."""
    return is_at_most(1, _count(eqn, eqn.params["axes"]))


def _convert(eqn: JaxprEqn, ins: Sequence[Range]) -> Range:
    (operand,), (result,) = eqn.invars, eqn.outvars
    before, after = dtype_of(operand), dtype_of(result)
    (x,) = ins
    if jnp.issubdtype(after, np.floating):
        return ranges.rounded(x, after)
    if jnp.issubdtype(before, np.floating):
        nan = _integer_of_nan(before, after)
        return x | Range(nan, nan)
    wraps = jnp.issubdtype(after, np.integer) and not ranges.is_within_type(
        ranges.within_type(x, operand.aval), after
    )
    return ranges.range_of_type(result.aval) if wraps else x


@functools.cache
def _integer_of_nan(before: Any, after: Any) -> int:
    """The integer that XLA makes of NaN: the default backend is asked, once for each pair of types.

    The specification leaves it open. Numbers beyond an integer type become its first or last one.
    An array of NumPy would be converted by NumPy, which warns and may make another integer of it.
    """
    with jax.ensure_compile_time_eval():
        return int(jax.lax.convert_element_type(jax.device_put(np.asarray(np.nan, before)), after))


def _gather(eqn: JaxprEqn, ins: Sequence[Range]) -> Range:
    if eqn.params["mode"] is not jax.lax.GatherScatterMode.FILL_OR_DROP:
        return ins[0]
    filled = eqn.params.get("fill_value")
    return Range() if filled is None else ins[0] | ranges.range_of_array(filled)


def _scatter_add(eqn: JaxprEqn, ins: Sequence[Range]) -> Range:
    operand, _, updates = ins
    added = ranges.times(updates, math.prod(shape_of(eqn.invars[2])), also_one=True)
    return operand + (added | Range(0, 0))


def _search(eqn: JaxprEqn, ins: Sequence[Range]) -> Range:
    shape = shape_of(eqn.invars[0])
    return Range(0, shape[0]) if len(shape) == 1 else Range()


# Functions of ``jax.numpy`` under ``jit``, of which more is known than of their equations.
_CALLED: Mapping[str, Rule] = {"floor_divide": _div, "remainder": _rest, "searchsorted": _search}


def _call(eqn: JaxprEqn, ins: Sequence[Range]) -> Sequence[Range]:
    rule = _CALLED.get(eqn.params.get("name", ""))
    is_whole = [jnp.issubdtype(dtype_of(x), np.integer) for x in eqn.outvars] == [True]
    if rule and is_whole and is_code_of_jax(open_jaxpr(called_jaxpr(eqn.params))[0]):
        return _fit(rule)(eqn, ins)
    return dataflow.through(Bounds(), eqn, ins)


def _fit(rule: Rule) -> dataflow.Transfer[Range]:
    """The rule of a primitive whose results are never larger than its type."""
    return lambda eqn, ins: [ranges.fitted(rule(eqn, ins), eqn.outvars[0].aval)]


def _arithmetic(rule: Rule) -> dataflow.Transfer[Range]:
    """The rule of a primitive whose integers may wrap around, and whose floats are rounded."""

    def transfer(eqn: JaxprEqn, ins: Sequence[Range]) -> list[Range]:
        aval = eqn.outvars[0].aval
        dtype = dtype_of(eqn.outvars[0])
        result = rule(eqn, ins)
        if jnp.issubdtype(dtype, np.floating):
            result = ranges.rounded(result, dtype)
        elif jnp.issubdtype(dtype, np.integer):
            operands = zip(ins, eqn.invars, strict=True)
            wide = rule(eqn, [ranges.within_type(x, atom.aval) for x, atom in operands])
            result = result if ranges.is_within_type(wide, dtype) else ranges.range_of_type(aval)
        return [ranges.fitted(result, aval)]

    return transfer


def _accumulated(rule: Rule) -> dataflow.Transfer[Range]:
    """The rule of a sum of many terms: floats are rounded in each of them."""
    return lambda eqn, ins: [Range()] if _is_float(eqn) else _arithmetic(rule)(eqn, ins)


_TABLE = dataflow.table(
    {
        "broadcast_in_dim reshape squeeze expand_dims transpose slice dynamic_slice rev copy": _fit(
            lambda eqn, ins: ins[0]
        ),
        "copy_p stop_gradient floor ceil round name cummax cummin": _fit(lambda eqn, ins: ins[0]),
        "reduce_max": _fit(lambda eqn, ins: ins[0] if _has_some(eqn) else Range(None, ins[0].high)),
        "reduce_min": _fit(lambda eqn, ins: ins[0] if _has_some(eqn) else Range(ins[0].low, None)),
        "convert_element_type": _fit(_convert),
        "concatenate pad": _fit(lambda eqn, ins: functools.reduce(operator.or_, ins)),
        "select_n": _fit(lambda eqn, ins: functools.reduce(operator.or_, ins[1:])),
        "dynamic_update_slice": _fit(lambda eqn, ins: ins[0] | ins[1]),
        "add": _arithmetic(lambda eqn, ins: ins[0] + ins[1]),
        "sub": _arithmetic(lambda eqn, ins: ins[0] + -ins[1]),
        "neg": _arithmetic(lambda eqn, ins: -ins[0]),
        "mul": _arithmetic(lambda eqn, ins: ins[0] * ins[1]),
        "max": _fit(_max),
        "min": _fit(_min),
        "clamp": _fit(lambda eqn, ins: _min(eqn, [_max(eqn, ins[:2]), ins[2]])),
        "logistic": _fit(lambda eqn, ins: Range(0, 1)),
        "tanh sin cos": _fit(lambda eqn, ins: Range(-1, 1)),
        "exp exp2": _fit(lambda eqn, ins: Range(0, 1 if is_at_most(ins[0].high, 0) else None)),
        "div": _fit(_div),
        "rem": _fit(_rem),
        "abs": _arithmetic(_abs),
        "reduce_sum": _accumulated(
            lambda eqn, ins: ranges.times(ins[0], _count(eqn, eqn.params["axes"]), also_one=False)
        ),
        "cumsum": _accumulated(
            lambda eqn, ins: ranges.times(ins[0], _count(eqn, [eqn.params["axis"]]), also_one=True)
        ),
        "argmax argmin": _fit(lambda eqn, ins: Range(0, _count(eqn, eqn.params["axes"]) - 1)),
        "iota": _fit(
            lambda eqn, ins: Range(0, shape_of(eqn.outvars[0])[eqn.params["dimension"]] - 1)
        ),
        "dim_as_value": _fit(lambda eqn, ins: Range(eqn.params["dim"], eqn.params["dim"])),
        "gather": _fit(_gather),
        "scatter": _fit(lambda eqn, ins: ins[0] | ins[2]),
        "scatter-add": _accumulated(_scatter_add),
        "sort optimization_barrier device_put": lambda eqn, ins: list(ins),
        "sized": lambda eqn, ins: list(ins[1:]),
        "unsized": lambda eqn, ins: [x | Range(0, 0) for x in ins[1:]],
        "jit pjit": _call,
    }
)
