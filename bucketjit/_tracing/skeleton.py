"""Decompose a traced program into its skeleton, its sizes and its constants, and recompose it.

    a:f32[4] -> b:f32[8] = pad[(0, 4, 0)] a 1.0

    parts    pad, operand 0, a literal, f32 of rank 1 ...    the skeleton
    sizes    4, 4, 8 ...
    values   1.0

Two concrete traces of one function have equal *skeletons* if they do the same: the same primitives
on the same operands, with equal parameters except for sizes. Sizes and constants are listed in a
fixed order, that of one walk. So those of several traces can be compared place by place, and
`recompose` can put symbolic sizes and size constants in their places.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from bucketjit._ir.closures import SizedHost, held_by
from bucketjit._ir.dataflow import SIZE_PARAMS
from bucketjit._ir.expressions import Dim, Shape
from bucketjit._ir.primitives import size_constant_p
from bucketjit._jax import jaxprs
from bucketjit._jax.user_code import in_brackets, source_line
from bucketjit._raised import is_of_machine

# Parameters that do not change what an equation computes: names, and functions for derivatives.
# The programs here are traced after differentiation, so nobody calls these functions any more.
_IDLE = (
    *("jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd"),
    *("out_trees", "name", "debug_info"),
)


class _Piece(NamedTuple):
    """What must be equal in two traces that do the same.

    Attributes:
        within: The equation that it belongs to, preceded by those around it; empty outside of any.
        what: Which piece of the equation it is, such as ``"parameter axes"``.
        value: The part.
    """

    within: tuple[Any, ...]
    what: str
    value: Any


@dataclass
class Skeleton:
    """A decomposed program.

    Attributes:
        parts: What must be equal in two traces that do the same.
        sizes: Every size, in order.
        values: Every constant, literals included, in order.
        owners: For each constant, its equation and those around it; empty for constants of the
            whole program.
        hosts: The host function of every callback that has results, in order. They may differ.
    """

    parts: list[_Piece] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    owners: list[tuple[Any, ...]] = field(default_factory=list)
    hosts: list[Any] = field(default_factory=list)

    def difference(self, beside: Skeleton) -> str | None:
        """The first difference between two programs, in words, with its line."""
        for a, b in itertools.zip_longest(self.parts, beside.parts):
            if a is None or b is None:
                return _at_one_size((a or b).within)
            if not _same(a.value, b.value):
                return _difference(a, b)
        return None

    def line_of_constant(self, index: int) -> str:
        """The line of user code that a constant comes from, in brackets; ``""`` if unknown."""
        return _where(self.owners[index])


def _difference(a: _Piece, b: _Piece) -> str:
    starts = [part for part in (a, b) if part.what == _PRIMITIVE]
    if len(starts) == 2:
        names = [_name(part.within[-1]) for part in starts]
        return f"{names[0]} at one size, {names[1]} at another{_where(a.within)}"
    if starts:
        return _at_one_size(starts[0].within)
    if a.within:
        what = f"{a.what}: {_both(a.value, b.value)}"
        return f"{_name(a.within[-1])}: {what}{_where(a.within)}"
    return f"an argument: {_both(a.value, b.value)}" if isinstance(a.value, _Type) else _OTHERWISE


_PRIMITIVE = "primitive"  # the first part of an equation
_OTHERWISE = "it closes over more arrays, or takes or returns more, at one size than at another"


def _at_one_size(equations: tuple[Any, ...]) -> str:
    if not equations:
        return _OTHERWISE
    return f"{_name(equations[-1])}{_where(equations)}, at one size only"


def _name(eqn: JaxprEqn) -> str:
    called = eqn.params.get("name") if jaxprs.name_of(eqn) in jaxprs.CALLS else None
    return f"{eqn.primitive.name} of {called}" if called else str(eqn.primitive.name)


def _where(equations: tuple[Any, ...]) -> str:
    return in_brackets(source_line(equations[-1], equations[:-1])) if equations else ""


def _both(a: object, b: object) -> str:
    if not isinstance(a, _Type) or not isinstance(b, _Type):
        return "another one at another size"
    if a[:2] == b[:2] and len(a.kinds) == len(b.kinds):
        return "an axis of size 1 at one size, of more at another, which broadcast differently"
    return f"an array of {a} at one size, of {b} at another"


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
    # What a function does is decided by its code, its globals, its defaults and its closure.
    if isinstance(a, FunctionType) and (
        a.__code__ is not b.__code__ or a.__globals__ is not b.__globals__
    ):
        return False
    parts, beside = held_by(a), held_by(b)
    if not depth or parts is None or beside is None or len(parts) != len(beside):
        return False
    return all(_same(x, y, depth - 1) for x, y in zip(parts, beside, strict=True))


def is_key(value: Any) -> bool:
    """Whether a constant is an array of random keys, which NumPy cannot read."""
    return jax.dtypes.issubdtype(getattr(value, "dtype", bool), jax.dtypes.extended)


def same_constant(a: Any, b: Any) -> bool:
    """Whether two constants of programs are equal bit by bit, in shape and in dtype."""
    if a is b:
        return True
    if is_key(a) or is_key(b):
        same_type = getattr(a, "dtype", None) == getattr(b, "dtype", None)
        return same_type and same_constant(*map(jax.random.key_data, (a, b)))
    x, y = np.asarray(a), np.asarray(b)
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


def decompose(jaxpr: Jaxpr, consts: Sequence[Any]) -> Skeleton:
    """Decompose a concrete program."""
    listing = _Listing()
    listing.program(jaxpr, consts)
    return listing.skeleton


def recompose(
    jaxpr: Jaxpr, consts: Sequence[Any], *replacements: Any
) -> tuple[Any, Sequence[Any], tuple[Shape, ...]]:
    """Rebuild a program with the ``replacements`` that `_Together` describes."""
    work = _Together(*replacements)
    together, kept = work.program(jaxpr, consts)
    return together, kept, tuple(shape for _, shape in sorted(work.shapes.items()))


class _Together:
    """Rebuilds a program with other sizes, constants and host functions.

    Args:
        sizes: Each size, in the order of the walk.
        numbers: For each constant, its number if `size_constant_p` is to fill it in at run time.
        depends_on: A symbolic size.
        host_at: Returns a host function, by its position, of the trace at logical sizes.

    Attributes:
        shapes: Shape of each size constant, by its number.
        within, what: See `_Piece`.
    """

    def __init__(
        self, sizes: Iterable[Dim], numbers: Iterable[int | None], depends_on: Dim, host_at: Any
    ) -> None:
        self._sizes, self._numbers, self._depends_on = iter(sizes), iter(numbers), depends_on
        self._hosts_at = (functools.partial(host_at, i) for i in itertools.count())
        self.shapes: dict[int, Shape] = {}
        self.within: tuple[Any, ...] = ()
        self.what = ""

    def part(self, value: object) -> None:
        """Take notice of a part."""

    def size(self, size: int) -> Dim:
        """What takes the place of a size."""
        return next(self._sizes)

    def constant(self, value: object) -> int | None:
        """The number of the size constant in the place of a constant; None if it stays."""
        return next(self._numbers)

    def host(self, function: Any) -> Any:
        """What takes the place of a host function."""
        return SizedHost(next(self._hosts_at), self._depends_on)

    def program(self, original: Any, consts: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """The rebuilt program, and its constants."""
        jaxpr, _ = jaxprs.open_jaxpr(original)
        # Variables are compared by the order in which they are bound.
        env: dict[Any, tuple[int, Any]] = {}
        eqns, kept, constvars = list[Any](), list[Any](), list[Any]()
        self.part((len(consts), len(jaxpr.invars), len(jaxpr.outvars)))
        for var, value in zip(jaxpr.constvars, consts, strict=False):
            aval = self._aval(var.aval)
            index = self.constant(value)
            if index is None:  # it is equal in all traces, so it stays a constant
                env[var] = len(env), jaxprs.variable(aval)
                constvars.append(env[var][1])
                kept.append(value)
            else:
                env[var] = len(env), self._given(index, aval, eqns)
        # An inner program may get its constants as operands, and has no values of them then.
        for var in (*jaxpr.constvars[len(consts) :], *jaxpr.invars):
            env[var] = len(env), jaxprs.variable(self._aval(var.aval))
        constvars += [env[v][1] for v in jaxpr.constvars[len(consts) :]]
        for eqn in jaxpr.eqns:
            eqns.append(self._equation(eqn, env, eqns))
        self.what = "what its program returns"
        results = [self._atom(atom, env, eqns) for atom in jaxpr.outvars]
        inputs = [env[v][1] for v in jaxpr.invars]
        return jaxprs.rebuilt_jaxpr(original, constvars, kept, inputs, results, eqns), kept

    def _equation(self, eqn: JaxprEqn, env: dict[Any, tuple[int, Any]], eqns: list[Any]) -> Any:
        outer, self.within = self.within, (*self.within, eqn)
        self.what = _PRIMITIVE
        self.part(eqn.primitive)
        operands = []
        for i, atom in enumerate(eqn.invars):
            self.what = f"operand {i}"
            operands.append(self._atom(atom, env, eqns))
        slots = SIZE_PARAMS.get(eqn.primitive.name, ())
        params = {}
        for name in sorted(eqn.params):
            self.what, value = f"parameter {name}", eqn.params[name]
            self.part(name)
            if name == "callback" and eqn.outvars:
                value = self.host(value)
            elif name not in _IDLE:
                value = self._param(value, name in slots)
            params[name] = value
        for i, var in enumerate(eqn.outvars):
            self.what = f"result {i}"
            env[var] = len(env), type(var)(self._aval(var.aval))
        self.within = outer
        outs = [env[v][1] for v in eqn.outvars]
        return eqn.replace(invars=operands, outvars=outs, params=params)

    def _given(self, index: int, aval: Any, eqns: list[Any]) -> Any:
        var = jaxprs.variable(aval)
        self.shapes[index] = tuple(aval.shape)
        params = {"index": index, "aval": aval, "depends_on": self._depends_on}
        eqns.append(jaxprs.equation([], [var], size_constant_p, params))
        return var

    def _atom(self, atom: Any, env: Mapping[Any, tuple[int, Any]], eqns: list[Any]) -> Any:
        if not jaxprs.is_literal(atom):
            number, var = env[atom]
            self.part(number)
            return var
        self.part("literal")
        aval = self._aval(atom.aval)
        index = self.constant(atom.val)
        return atom if index is None else self._given(index, aval, eqns)

    def _aval(self, aval: Any) -> Any:
        if not jaxprs.is_shaped(aval):
            self.part(aval)
            return aval
        # An axis of size 1 broadcasts, in the same equation that takes two axes of equal size.
        kinds = tuple(min(n, 2) for n in aval.shape)
        self.part(_Type(aval.dtype, bool(getattr(aval, "weak_type", False)), kinds))
        shape = tuple(map(self.size, aval.shape))
        return aval if shape == tuple(aval.shape) else aval.update(shape=shape)

    def _param(self, value: Any, slot: bool) -> Any:
        if slot and isinstance(value, int | np.integer) and not isinstance(value, bool):
            return self.size(int(value))
        if jaxprs.is_jaxpr(value):
            return self.program(value, jaxprs.open_jaxpr(value)[1])[0]
        if isinstance(value, tuple | list):
            self.part((type(value), len(value)))
            parts = [self._param(v, slot) for v in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, dict):
            self.part(tuple(value))
            return {k: self._param(v, slot) for k, v in value.items()}
        if jaxprs.is_shaped(value):
            return self._aval(value)
        self.part(value)
        return value


class _Listing(_Together):
    """Lists the pieces of a program in a `Skeleton`, and leaves them as they are."""

    def __init__(self) -> None:
        super().__init__((), (), 0, None)
        self.skeleton = Skeleton()

    def part(self, value: object) -> None:
        self.skeleton.parts.append(_Piece(self.within, self.what, value))

    def size(self, size: int) -> Dim:
        self.skeleton.sizes.append(size)
        return size

    def constant(self, value: object) -> None:
        self.skeleton.values.append(value)
        self.skeleton.owners.append(self.within)

    def host(self, function: Any) -> Any:
        self.skeleton.hosts.append(function)
        return function
