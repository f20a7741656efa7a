"""Replace primitives of other libraries, which have no masking rule, by the programs behind them.

    before   y:f32[n] = linear_solve[operators=... hidden shapes] a b      no rule
    after    the equations of its implementation, traced at f32[n]         a rule for each

Equinox, Lineax, ``jax.experimental.sparse`` and others wrap functions into their own primitives,
whose parameters hide shapes. The ``impl`` of such a primitive, or the function that its lowering is
made from, is written in JAX. Traced with the sizes of the equation it is a program that can be
masked.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.errors import InconclusiveDimensionOperation
from jax.extend.core import Jaxpr, JaxprEqn

from bucketjit._ir.jax_patches import lenient_jax
from bucketjit._jax.jaxprs import all_equations, implementation, open_jaxpr, struct_of
from bucketjit._jax.size_hooks import watch_equalities
from bucketjit._raised import in_one_line, is_of_machine
from bucketjit.errors import MaskingError


def looked_inside(eqn: JaxprEqn) -> tuple[Any, Sequence[Any]]:
    """The program that computes what an equation computes, from the code of its primitive."""
    prim = eqn.primitive
    code = implementation(prim)
    if code is None:
        raise _without_rule(prim.name)
    function, several = code
    decided: list[tuple[object, ...]] = []  # uses of sizes that may decide

    def note(*what: object) -> None:
        if len(what) < 2 or not _never_equal(*what):
            decided.append(what)

    structs = [struct_of(v.aval) for v in eqn.invars]

    def run(*operands: object) -> Any:
        outs = function(*operands, **prim.get_bind_params(eqn.params))
        return outs if several else [outs]

    try:
        with watch_equalities(note, note, note, note), lenient_jax():
            closed = jax.make_jaxpr(run)(*structs)
    except Exception as error:
        if is_of_machine(error):
            raise
        raise _without_rule(prim.name, f", and its implementation: {in_one_line(error)}") from error
    if decided:
        why = f", and its implementation decides by sizes: {' == '.join(map(str, decided[0]))}"
        raise _without_rule(prim.name, why) from EqualityOfSizes(*decided[0])
    jaxpr, consts = open_jaxpr(closed)
    if any(inner.primitive is prim for inner in jaxpr.eqns):  # it would be expanded for ever
        raise _without_rule(prim.name)
    return jaxpr, consts


class EqualityOfSizes(Exception):
    """An implementation compares two sizes, or uses one as a key or in a text."""


def _never_equal(left: Any, right: Any) -> bool:
    """Whether a size cannot be equal to another value: its scope, and so a guard, says so."""
    try:
        return bool(left > right or left < right)
    except TypeError:  # None, or a text
        return not isinstance(right, numbers.Number)
    except InconclusiveDimensionOperation:
        return False


def decisions_inside(jaxpr: Jaxpr, seen: tuple[Any, ...] = ()) -> Iterator[Exception]:
    """Why sizes keep primitives of other libraries from being replaced; a guard may change that."""
    for eqn in all_equations(jaxpr):
        code = None if eqn.primitive in seen else implementation(eqn.primitive)
        if code is None or _is_of_jax(code[0]):
            continue
        try:
            inner, _ = looked_inside(eqn)
        except MaskingError as error:
            if error.__cause__ is not None and isinstance(error.__cause__, Exception):
                yield error.__cause__
        else:
            yield from decisions_inside(inner, (*seen, eqn.primitive))


def _is_of_jax(function: Any) -> bool:
    """Whether JAX or bucketjit has written the implementation of a primitive."""
    module = str(getattr(getattr(function, "func", function), "__module__", ""))
    return module.startswith(("jax._src.", "jaxlib.", "bucketjit."))


def _without_rule(name: str, why: str = "") -> MaskingError:
    return MaskingError(
        f"{name}: no masking rule{why}",
        f"add one with .with_rules({{{name}_p: rule}}), or leave the axis static",
    )
