"""Values that a program compares with themselves, or with what it has chosen among them.

A computed ``y`` is equal to its own maximum somewhere: ``y == y.max(0)`` relies on that, and so
does the derivative of a maximum. XLA's CPU backend may compute ``y`` anew in each kernel that reads
it, and round it otherwise there: ``x - a * b`` in one step or in two, the last columns without
vector instructions (jaxlib 0.10.2 and 0.12, in ``jax.jit`` too). Then no element is the maximum,
and the gradient is lost. Which programs meet that hangs on sizes and on what is fused, so masks and
padding change it. This pass finds the values that must be computed once; the interpreter has them
kept (`bucketjit._rule.computed_once`).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from bucketjit import _jax
from bucketjit._elementwise import ELEMENTWISE

_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to"))
_CHOICES = frozenset(
    (
        *("reduce_max", "reduce_min", "argmax", "argmin", "cummax", "cummin", "reduce"),
        *("sort", "top_k", "approx_top_k", "reduce_window_max", "reduce_window_min"),
        *("reduce_window", "scatter-max", "scatter-min", "select_and_gather_add"),
    )
)
# What they make are the same numbers, up to their sign: of which operands, all if it is None.
_MOVES: dict[str, Sequence[int] | None] = {
    **dict.fromkeys(("broadcast_in_dim", "reshape", "transpose", "squeeze", "rev", "copy"), (0,)),
    **dict.fromkeys(("stop_gradient", "convert_element_type", "neg", "abs"), (0,)),
    **dict.fromkeys(("slice", "dynamic_slice", "gather"), (0,)),
    **dict.fromkeys(("concatenate", "pad", "dynamic_update_slice"), None),
}
_COMPUTED = frozenset(ELEMENTWISE) - _MOVES.keys() | {"reduce_sum", "reduce_prod"}
# Of a difference they keep whether it is 0, or its sign.
_SCALES = frozenset(("add", "add_any", "sub", "mul", "div", "select_n"))
# They take a difference of nearly 0 for another than one of 0, or one below 0 for none.
_READ_SIGNS = frozenset(
    ("sign", "sqrt", "rsqrt", "log", "log2", "pow", "floor", "ceil", "round", *_COMPARISONS)
)
_Values = frozenset[int]  # each by its number


class _Facts(NamedTuple):
    """What is known of a value.

    Attributes:
        number: Values of one number are computed in the same way, and XLA makes one of them.
        own: The computed values that its numbers are those of.
        chosen: The computed values among which something was chosen on the way to it.
        nearly: The computed values that it is the difference of, from what was chosen among them.
    """

    number: int
    own: _Values = frozenset()
    chosen: _Values = frozenset()
    nearly: _Values = frozenset()


def compared(jaxpr: Any) -> Mapping[Any, Hashable]:
    """The variables, of all programs inside this one too, that must be computed once.

    Args:
        jaxpr: An open jaxpr.

    Returns:
        A key for each: variables of one program with the same key are always equal.
    """
    names = {_jax.name_of(eqn) for eqn in _jax.all_equations(jaxpr)}
    if names.isdisjoint(_READ_SIGNS) or names.isdisjoint({*_CHOICES, *_COMPARISONS}):
        return {}
    work = _Following()
    work.program(jaxpr, work.unknown(jaxpr.invars))
    return {
        var: tuple(numbers)
        for var, numbers in work.numbers.items()
        if not work.found.isdisjoint(numbers)
    }


class _Following:
    """What was found out so far.

    Attributes:
        found: The values that must be computed once.
        numbers: Of each variable the value in each call of its program.
    """

    def __init__(self) -> None:
        self.found: _Values = frozenset()
        self.numbers: dict[Any, list[int]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._count = itertools.count()

    def unknown(self, variables: Sequence[Any]) -> list[_Facts]:
        """Facts of values of which nothing is known."""
        return [_Facts(next(self._count)) for _ in variables]

    def program(self, jaxpr: Any, facts: Sequence[_Facts]) -> list[_Facts]:
        env: dict[Any, _Facts] = dict(zip(jaxpr.invars, facts, strict=True))
        env.update(zip(jaxpr.constvars, self.unknown(jaxpr.constvars), strict=True))

        def read(atom: Any) -> _Facts:
            return self._literal(atom) if _jax.is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
            for var, fact in zip(eqn.outvars, outs, strict=True):
                self.numbers.setdefault(var, []).append(fact.number)
        return [read(v) for v in jaxpr.outvars]

    def _literal(self, atom: Any) -> _Facts:
        bits = np.asarray(atom.val).tobytes()
        return _Facts(self._number("literal", str(atom.aval), bits))

    def _number(self, *key: Hashable) -> int:
        if key not in self._numbers:
            self._numbers[key] = next(self._count)
        return self._numbers[key]

    def _equation(self, eqn: Any, ins: Sequence[_Facts]) -> Sequence[_Facts]:
        name = _jax.name_of(eqn)
        if name in _jax.CALLS:
            inner = _jax.open_jaxpr(_jax.called_jaxpr(eqn.params))[0]
            if len(inner.invars) == len(ins):
                return self.program(inner, ins)
        bodies = list(_jax.bodies(eqn))
        for body in bodies:
            self.program(body, self.unknown(body.invars))
        chosen = _all(f.chosen for f in ins)
        if bodies or name in _CHOICES:  # a loop may choose, one element after the other
            chosen |= _all(f.own for f in ins)
        near = _near(ins) if len(ins) == 2 else frozenset[int]()
        nearly = near if name == "sub" else frozenset[int]()
        if name in _MOVES or name in _SCALES:
            nearly |= _all(f.nearly for f in ins)
        if name in _READ_SIGNS:
            self.found |= _all(f.nearly for f in ins)
        if name in _COMPARISONS and ins[0].number != ins[1].number:  # ``y != y``: is it NaN
            self.found |= near | (ins[0].own & ins[1].own)
        if name == "concatenate":  # the same number, made by two loops of one kernel
            self.found |= _twice(f.own for f in ins)
        facts = []
        for i, out in enumerate(eqn.outvars):
            number = next(self._count)
            if not bodies and not eqn.effects:
                key = (name, _params(eqn), str(out.aval), i, *(f.number for f in ins))
                number = self._number(*key)
            facts.append(_Facts(number, _own(out, number, name, ins), chosen, nearly))
        return facts


def _params(eqn: Any) -> Hashable:
    """Parameters, equal only if they mean the same; text, as 0.0 and -0.0 are the same number."""
    params = tuple(sorted(eqn.params.items()))
    try:
        hash(params)
    except TypeError:  # an array, whose text may leave something out
        return object()
    return params, str(params)


def _near(ins: Sequence[_Facts]) -> _Values:
    """What is at two operands, by itself and by what was chosen among it."""
    one, other = ins
    return (one.own & other.chosen) | (other.own & one.chosen)


def _own(out: Any, number: int, name: str, ins: Sequence[_Facts]) -> _Values:
    if not jnp.issubdtype(getattr(out.aval, "dtype", np.dtype(bool)), np.inexact):
        return frozenset()
    if name == "select_n":
        return _all(f.own for f in ins[1:])
    if name in _MOVES:
        which = _MOVES[name]
        return _all(f.own for f in (ins if which is None else [ins[i] for i in which]))
    return frozenset((number,)) if name in _COMPUTED else frozenset()


def _twice(sets: Iterable[_Values]) -> _Values:
    """What is in more than one of them."""
    seen, found = frozenset[int](), frozenset[int]()
    for values in sets:
        found |= seen & values
        seen |= values
    return found


def _all(sets: Iterable[_Values]) -> _Values:
    return frozenset().union(*sets)
