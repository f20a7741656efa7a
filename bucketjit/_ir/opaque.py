"""Replace primitives of other libraries, which have no masking rule, by the programs behind them.

    before   y:f32[n] = linear_solve[operators=... hidden shapes] a b      no rule
    after    the equations of its implementation, traced at f32[n]         a rule for each

Equinox, Lineax, ``jax.experimental.sparse`` and others wrap functions into their own primitives,
whose parameters hide shapes. The ``impl`` of such a primitive, or the function that its lowering is
made from, is written in JAX. Traced with the sizes of the equation it is a program that can be
masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from bucketjit._ir.jax_patches import lenient_jax
from bucketjit._jax.jaxprs import open_jaxpr, struct_of
from bucketjit._jax.names import Without, lacking
from bucketjit._jax.primitives import implementation
from bucketjit._jax.size_hooks import watch_equalities
from bucketjit._raised import in_one_line, is_of_machine
from bucketjit.errors import MaskingError


def looked_inside(eqn: JaxprEqn) -> tuple[Any, Sequence[Any]]:
    """The program that computes what an equation computes, from the code of its primitive.

    Args:
        eqn: An equation whose primitive has no rule.

    Returns:
        An open jaxpr with symbolic shapes, and its constants.

    Raises:
        MaskingError: The primitive has no implementation in JAX, or JAX cannot trace it with
            symbolic sizes, or it decides by a size, or it only calls the primitive again.
        Exception: An error of the machine, such as missing memory, while it was traced.
    """
    prim = eqn.primitive
    found = implementation(prim)
    if found is None:
        lack = lacking(Without.INSIDE)
        raise _without_rule(prim.name, f", and {lack} to find its implementation" if lack else "")
    function, several = found
    decided: list[str] = []  # uses of sizes that may decide: there is no guard to hold them here

    def note(*what: object) -> None:
        decided.append(" == ".join(map(str, what)))

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
        raise _without_rule(prim.name, f", and its implementation decides by sizes: {decided[0]}")
    jaxpr, consts = open_jaxpr(closed)
    if any(inner.primitive is prim for inner in jaxpr.eqns):  # it would be expanded for ever
        raise _without_rule(prim.name)
    return jaxpr, consts


def _without_rule(name: str, why: str = "") -> MaskingError:
    return MaskingError(
        f"{name}: no masking rule{why}",
        f"add one with .with_rules({{{name}_p: rule}}), or leave the axis static",
    )
