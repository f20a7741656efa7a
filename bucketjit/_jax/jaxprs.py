"""Jaxprs: read, walk, rebuild and evaluate them, in the forms that each version of JAX has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.extend import source_info_util as jex_source_info
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.interpreters import partial_eval

from bucketjit._jax import names
from bucketjit._jax.user_code import source_line

_core = names.module("core")
_partial_eval = names.module("interpreters.partial_eval")

Atom = Var | Literal

# Since 0.11 one class; before, a closed one holds the other and its constants.
AnyJaxpr = Jaxpr | ClosedJaxpr


def struct_of(aval: Any, shape: Sequence[Any] | None = None) -> jax.ShapeDtypeStruct:
    """An argument to trace with, of this abstract value, or of another shape."""
    weak = bool(getattr(aval, "weak_type", False))
    shape = getattr(aval, "shape", ()) if shape is None else shape
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=weak)


def shaped(struct: Any) -> Any:
    """The abstract value of an array like this ``ShapeDtypeStruct`` (``core.ShapedArray``)."""
    weak = bool(getattr(struct, "weak_type", False))
    return jax.core.ShapedArray(struct.shape, struct.dtype, weak_type=weak)


_JAXPR_TYPES = (jex_core.Jaxpr, jex_core.ClosedJaxpr)  # one since 0.11


def open_jaxpr(jaxpr: AnyJaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """``(jaxpr, consts)`` of a closed jaxpr; 0.11 merged the two classes into one."""
    inner: Any = getattr(jaxpr, "jaxpr", jaxpr)
    return inner, getattr(jaxpr, "consts", ())


def evaluate_jaxpr(jaxpr: Jaxpr, *args: object) -> list[Any]:
    """Evaluate an open jaxpr without constvars (``core.eval_jaxpr``, since 0.2)."""
    return jax.core.eval_jaxpr(jaxpr, (), *args)


def is_jaxpr(value: object) -> bool:
    """True for a jaxpr, closed or not."""
    return isinstance(value, _JAXPR_TYPES)


def all_equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of an open jaxpr, and of the programs among their parameters."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies(eqn):
            yield from all_equations(body)


def is_literal(atom: object) -> TypeGuard[Literal]:
    """Whether an operand is a number that is written into its equation."""
    return isinstance(atom, Literal)


def shape_of(atom: Atom) -> tuple[Any, ...]:
    """The shape of an operand or result; what is no array, such as a token, has no axes."""
    return tuple(getattr(atom.aval, "shape", ()))


def dtype_of(atom: Atom) -> Any:
    """The dtype of an operand or result; what is no array passes for a truth value."""
    return getattr(atom.aval, "dtype", np.dtype(bool))


def bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The programs among the parameters of an equation, as open jaxprs."""
    for value in jax.tree_util.tree_leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
        if is_jaxpr(value):
            yield open_jaxpr(value)[0]


def variables_read(jaxpr: Jaxpr) -> Set[Atom]:
    """The variables of an open jaxpr that an equation of it, or its outputs, read."""
    atoms = itertools.chain(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns))
    return {atom for atom in atoms if not is_literal(atom)}


def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr without equations whose outputs nothing reads, inside its calls too.

    ``jit`` does the same to what it compiles (``partial_eval.dce_jaxpr``, since 0.2.9): an
    equation that cannot be masked matters only if its result does. All inputs stay.
    """
    return partial_eval.dce_jaxpr(jaxpr, True, instantiate=True)[0]


def without_hi_primitives(closed: Any) -> Any:
    """A program whose equations name themselves: a hijax one hides its function in an object.

    ``jit`` lowers a program in the same way (``partial_eval.lower_jaxpr2``, since 0.7).
    """
    return _partial_eval.lower_jaxpr2(closed) if closed.is_high else closed


def is_shaped(aval: object) -> bool:
    """True for the abstract value of an array (``core.ShapedArray``, since 0.2)."""
    return type(aval) is jax.core.ShapedArray


def variable(aval: Any) -> Any:
    """A new variable of a jaxpr (``core.Var`` takes an aval alone since 0.7)."""
    return jex_core.Var(aval)


def equation(
    invars: Sequence[Any], outvars: Sequence[Any], primitive: Primitive, params: object
) -> Any:
    """A new equation without effects (``core.new_jaxpr_eqn``, since 0.2)."""
    effects = jex_core.no_effects
    return jex_core.new_jaxpr_eqn(list(invars), list(outvars), primitive, params, effects)


def rebuilt_jaxpr(
    original: Jaxpr,
    constvars: Sequence[Any],
    consts: Sequence[Any],
    invars: Sequence[Any],
    outvars: Sequence[Any],
    eqns: Sequence[Any],
) -> Jaxpr:
    """A jaxpr with other variables and equations; closed over its constants if the original was.

    ``jax.extend`` can make no jaxpr from another one (``Jaxpr.replace``, since 0.4).
    """
    jaxpr = open_jaxpr(original)[0]
    lists = {
        "constvars": list(constvars),
        "invars": list(invars),
        "outvars": list(outvars),
        "eqns": list(eqns),
    }
    if len(set(_JAXPR_TYPES)) == 1:
        return jaxpr.replace(**lists, consts=list(consts))
    rebuilt = jaxpr.replace(**lists)
    return (
        original.replace(jaxpr=rebuilt, consts=list(consts)) if original is not jaxpr else rebuilt
    )


def bind_equation(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Run one equation as it stands, sub-programs included (as ``core.eval_jaxpr`` does)."""
    out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


class EquationScopes:
    """Enters the names and configuration that an equation was traced under.

    ``core.eval_jaxpr`` does it for every equation. Configurations are interned (since 0.10), and
    nearly all equations have the current one, which need not be entered again.
    """

    def __init__(self) -> None:
        self._names = jex_source_info.current_name_stack()
        self._context = _core.current_jaxpr_eqn_context()

    def __call__(self, eqn: JaxprEqn) -> AbstractContextManager[Any]:
        """The scope of one equation."""
        source = eqn.source_info
        names = jex_source_info.user_context(
            source.traceback, name_stack=self._names + source.name_stack
        )
        if eqn.ctx is self._context:
            return names
        both = ExitStack()
        both.enter_context(names)
        both.enter_context(eqn.ctx.manager)
        return both


def first_effect(jaxpr: Jaxpr) -> str:
    """The first equation of an open jaxpr that has an effect, with its line; ``""`` if none has."""
    found = next((eqn for eqn in all_equations(jaxpr) if eqn.effects and not [*bodies(eqn)]), None)
    if found is None:
        return ""
    line = source_line(found, equations_around(jaxpr, found))
    return f"{found.primitive.name} [{line}]" if line else str(found.primitive.name)


def equations_around(jaxpr: Jaxpr, eqn: JaxprEqn) -> tuple[Any, ...]:
    """The equations of an open jaxpr, outermost first, whose sub-programs hold this equation."""
    for other in jaxpr.eqns:
        if other is eqn:
            return ()
        for body in bodies(other):
            if eqn in all_equations(body):
                return (other, *equations_around(body, eqn))
    return ()


def stage(fn: Callable[..., Any], operands: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Trace ``fn`` at these operands: an open jaxpr, and the values of its leading inputs.

    What ``fn`` closes over (run-time sizes, say) becomes those inputs, as primitives such as
    ``remat`` want it. ``jax.make_jaxpr`` leaves it in constvars, and only
    ``partial_eval.convert_constvars_jaxpr`` (since 0.2) moves it in every version.
    """
    closed = jax.make_jaxpr(fn)(*operands)
    return _partial_eval.convert_constvars_jaxpr(open_jaxpr(closed)[0]), list(closed.consts)


def scan_arity(params: Mapping[str, Any]) -> tuple[int, int]:
    """Number of constants and of carried values of a ``scan`` equation.

    0.10 keeps two ints; since 0.12 they are the lengths of the groups of ``ft_in``.
    """
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def expand_hi_primitive(prim: Any, avals: Sequence[Any]) -> Any:
    """The jaxpr of what a ``call_hi_primitive`` (since 0.12) expands to at these avals.

    The expansion is the primitive's own definition; it takes and returns trees that only its
    ``in_tree`` and ``out_tree`` describe.
    """

    def flat(*values: Any) -> list[Any]:
        return jax.tree_util.tree_leaves(
            prim.expand(*jax.tree_util.tree_unflatten(prim.in_tree, values))
        )

    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    return jax.make_jaxpr(flat)(*structs)


def out_types(jaxpr: Jaxpr) -> list[Any]:
    """The types of the results of a closed jaxpr (``out_avals``, since 0.2)."""
    return list(jaxpr.out_avals)
