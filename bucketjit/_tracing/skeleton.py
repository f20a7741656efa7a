"""Decompose a traced program into its skeleton, its sizes and its constants, and recompose it.

    a:f32[4] -> b:f32[8] = pad[(0, 4, 0)] a 1.0

    parts    pad, operand 0, a literal, f32 of rank 1 ...    the skeleton
    sizes    4, 4, 8 ...
    values   1.0

Two concrete traces of one function have equal *skeletons* if they do the same: the same primitives
on the same operands, with equal parameters except for sizes. Sizes and constants are listed in a
fixed order, that of the walk. So those of several traces can be compared place by place, and
`recompose` can put symbolic sizes and other constants in their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from bucketjit._ir.closures import held_by
from bucketjit._ir.primitive_facts import SIZE_PARAMS
from bucketjit._jax.jaxprs import is_jaxpr, is_literal, is_shaped, open_jaxpr
from bucketjit._jax.primitives import CALLBACKS, CALLS, name_of
from bucketjit._jax.user_code import source_line
from bucketjit._raised import is_of_machine

# Parameters that do not change what an equation computes: names, and functions for derivatives.
# The programs here are traced after differentiation, so nobody calls these functions any more.
IDLE = frozenset(
    (
        "jvp_jaxpr_fun",
        "jvp_jaxpr_thunk",
        "fwd_jaxpr_thunk",
        "bwd",
        "out_trees",
        "name",
        "debug_info",
    )
)


@dataclass(frozen=True, eq=False)
class HostFunction:
    """The host function of a callback. It counts as a constant, so it may differ between traces.

    Attributes:
        function: The function.
    """

    function: Any


def is_host(eqn: JaxprEqn, param: str) -> bool:
    return param == "callback" and eqn.primitive.name in CALLBACKS


@dataclass
class Skeleton:
    """A decomposed program.

    Attributes:
        parts: What must be equal in two traces that do the same.
        sizes: Every size, in order.
        values: Every constant, literals and host functions included, in order.
        equations: By the position of a primitive among the parts, its equation, preceded by the
            equations whose inner programs contain it.
        told: By position, which piece of an equation the parts from there on describe, such as
            ``"parameter axes"``.
        owners: For each constant, its equation and those around it; empty for constants of the
            whole program.
    """

    parts: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    equations: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    told: dict[int, str] = field(default_factory=dict)
    owners: list[tuple[Any, ...]] = field(default_factory=list)

    def difference(self, other: Skeleton) -> str | None:
        """The first difference between two programs, in words, with its line."""
        for i, (a, b) in enumerate(zip(self.parts, other.parts, strict=False)):
            if not _same(a, b):
                return self._difference_at(i, a, other, b)
        if len(self.parts) == len(other.parts):
            return None
        longer = max(self, other, key=lambda skeleton: len(skeleton.parts))
        after = min(len(self.parts), len(other.parts))
        first = next((e for i, e in longer.equations.items() if i >= after), ())
        return f"{_told(first)}, at one size only" if first else "it returns other arrays"

    def _difference_at(self, i: int, a: object, other: Skeleton, b: object) -> str:
        if i in self.equations and i in other.equations:
            mine = self.equations[i]
            names = [_name(s.equations[i][-1]) for s in (self, other)]
            return f"{names[0]} at one size, {names[1]} at another{_where(mine)}"
        for skeleton in (self, other):
            if i in skeleton.equations:
                return f"{_told(skeleton.equations[i])}, at one size only"
        at = max((k for k in self.equations if k <= i), default=None)
        if at is None and isinstance(a, _Type):
            return f"an argument: {_both(a, b)}"
        if at is None:
            return (
                "it closes over more arrays, or takes or returns more, at one size than at another"
            )
        of = self.equations[at]
        part = max((k for k in self.told if at < k <= i), default=None)
        what = "" if part is None else f"{self.told[part]}: "
        return f"{_name(of[-1])}: {what}{_both(a, b)}{_where(of)}"

    def line_of_constant(self, index: int) -> str:
        """The line of user code that a constant comes from, in brackets; ``""`` if unknown."""
        return _where(self.owners[index])


def _told(equations: tuple[Any, ...]) -> str:
    return f"{_name(equations[-1])}{_where(equations)}"


def _name(eqn: JaxprEqn) -> str:
    """The name of a primitive, and of the function that it calls."""
    called = eqn.params.get("name") if name_of(eqn) in CALLS else None
    return f"{eqn.primitive.name} of {called}" if called else str(eqn.primitive.name)


def _where(equations: tuple[Any, ...]) -> str:
    line = source_line(equations[-1], equations[:-1]) if equations else ""
    return f" [{line}]" if line else ""


def _both(a: object, b: object) -> str:
    """The difference between two parts, in words."""
    match a, b:
        case _Type(), _Type() if a[:2] == b[:2] and len(a.kinds) == len(b.kinds):
            return "an axis of size 1 at one size, of more at another, which broadcast differently"
        case _Type(), _Type():
            return f"an array of {a} at one size, of {b} at another"
    return "another one at another size"


class _Type(NamedTuple):
    """The part of an array's type that must be equal.

    Attributes:
        dtype: The dtype.
        weak_type: JAX's weak type.
        kinds: For each axis 0, 1, or 2 for any larger size: an axis of size 1 may broadcast.
    """

    dtype: Any
    weak_type: bool
    kinds: tuple[int, ...]

    def __str__(self) -> str:
        return f"rank {len(self.kinds)} and {self.dtype}"


def _same(a: Any, b: Any, depth: int = 8) -> bool:
    """Whether two parameters are equal; functions are, if their code and parts are.

    Nested functions are compared down to `depth`, below which they count as different.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    try:
        if a == b:
            return True
    except Exception as error:  # ``==`` returns an array, or raises
        if is_of_machine(error):
            raise
        return False
    return depth > 0 and _same_parts(a, b, depth - 1)


def _same_parts(a: Any, b: Any, depth: int) -> bool:
    """Whether two functions, or objects that hold functions, have equal parts.

    What a function does is decided by its code, its globals, its defaults and its closure.
    """
    if isinstance(a, FunctionType) and (
        a.__code__ is not b.__code__ or a.__globals__ is not b.__globals__
    ):
        return False
    held, others = held_by(a), held_by(b)
    if held is None or others is None or len(held) != len(others):
        return False
    return all(_same(x, y, depth) for x, y in zip(held, others, strict=True))


def same_constant(a: Any, b: Any) -> bool:
    """Whether two constants of programs are equal bit by bit, in shape and in dtype."""
    if a is b:
        return True
    if isinstance(a, HostFunction) or isinstance(b, HostFunction):
        return type(a) is type(b) and _same(a.function, b.function)
    dtypes = [getattr(x, "dtype", None) for x in (a, b)]
    # NumPy cannot read random keys, so their words are compared.
    if any(d is not None and jax.dtypes.issubdtype(d, jax.dtypes.extended) for d in dtypes):
        return dtypes[0] == dtypes[1] and same_constant(*map(jax.random.key_data, (a, b)))
    x, y = np.asarray(a), np.asarray(b)
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


def decompose(jaxpr: Jaxpr, consts: Sequence[Any]) -> Skeleton:
    """Decompose a concrete program."""
    found = Skeleton()
    _Apart(found).program(jaxpr, consts)
    return found


class _Apart:
    """Fills a `Skeleton`. It must walk a program in the same order as `_Together`."""

    def __init__(self, found: Skeleton) -> None:
        self._found = found
        self._part = found.parts.append
        self._within: tuple[Any, ...] = ()  # the current equation, preceded by those around it

    def program(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> None:
        number: dict[Any, int] = {}  # variables are compared by the order in which they are bound
        self._part(("program", len(consts), len(jaxpr.invars), len(jaxpr.outvars)))
        for var, value in zip(jaxpr.constvars, consts, strict=False):
            number[var] = len(number)
            self._aval(var.aval)
            self._value(value)
        # An inner program may get its constants as operands, and has no values of them then.
        for var in (*jaxpr.constvars[len(consts) :], *jaxpr.invars):
            number[var] = len(number)
            self._aval(var.aval)
        for eqn in jaxpr.eqns:
            outer, self._within = self._within, (*self._within, eqn)
            self._found.equations[len(self._found.parts)] = self._within
            self._part(eqn.primitive)
            for i, atom in enumerate(eqn.invars):
                self._tell(f"operand {i}")
                self._atom(atom, number)
            slots = SIZE_PARAMS.get(eqn.primitive.name, ())
            for name in sorted(eqn.params):
                self._tell(f"parameter {name}")
                self._part(name)
                if is_host(eqn, name):
                    self._value(HostFunction(eqn.params[name]))
                elif name not in IDLE:
                    self._param(eqn.params[name], name in slots)
            for i, var in enumerate(eqn.outvars):
                number[var] = len(number)
                self._tell(f"result {i}")
                self._aval(var.aval)
            self._within = outer
        self._tell("what its program returns")
        for atom in jaxpr.outvars:
            self._atom(atom, number)

    def _tell(self, what: str) -> None:
        self._found.told[len(self._found.parts)] = what

    def _value(self, value: object) -> None:
        self._found.values.append(value)
        self._found.owners.append(self._within)

    def _atom(self, atom: object, number: Mapping[Any, int]) -> None:
        if is_literal(atom):
            self._part("literal")
            self._aval(atom.aval)
            self._value(atom.val)
        else:
            self._part(number[atom])

    def _aval(self, aval: Any) -> None:
        if not is_shaped(aval):
            self._part(aval)
            return
        # An axis of size 1 broadcasts, in the same equation that takes two axes of equal size.
        kinds = tuple(min(n, 2) for n in aval.shape)
        self._part(_Type(aval.dtype, bool(getattr(aval, "weak_type", False)), kinds))
        self._found.sizes += aval.shape

    def _param(self, value: Any, slot: bool) -> None:
        if slot and is_int(value):
            self._found.sizes.append(int(value))
        elif is_jaxpr(value):
            self.program(*open_jaxpr(value))
        elif isinstance(value, tuple | list):
            self._part((type(value), len(value)))
            for v in value:
                self._param(v, slot)
        elif isinstance(value, dict):
            self._part(tuple(value))
            for v in value.values():
                self._param(v, slot)
        elif is_shaped(value):
            self._aval(value)
        else:
            self._part(value)


def is_int(value: object) -> bool:
    """Whether a value is an int of Python or NumPy, and no bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
