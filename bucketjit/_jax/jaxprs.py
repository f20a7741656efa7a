"""Jaxprs in each version of JAX: read, walk, rebuild and evaluate them, and their primitives.

Primitives are found by name, with the program or function behind them. `bucketjit._ir.dataflow`
has the walk of all analyses.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, TypeGuard

import jax
import jax.export  # an attribute of jax only after this import
import numpy as np
from jax.extend import core as jex_core
from jax.extend import source_info_util as jex_source_info
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.interpreters import mlir, partial_eval

from bucketjit._jax import names
from bucketjit._jax.user_code import source_line

_partial_eval = names.module("interpreters.partial_eval")

Atom = Var | Literal

# JAX 0.11 merged the two classes. Before, a `ClosedJaxpr` holds a `Jaxpr` and its constants.
AnyJaxpr = Jaxpr | ClosedJaxpr


def struct_of(aval: Any, shape: Sequence[Any] | None = None) -> jax.ShapeDtypeStruct:
    """A ``ShapeDtypeStruct`` to trace with, like ``aval``."""
    weak = bool(getattr(aval, "weak_type", False))
    shape = getattr(aval, "shape", ()) if shape is None else shape
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=weak)


def shaped(struct: Any) -> Any:
    """The abstract value of an array like this ``ShapeDtypeStruct`` (``core.ShapedArray``)."""
    weak = bool(getattr(struct, "weak_type", False))
    return jax.core.ShapedArray(struct.shape, struct.dtype, weak_type=weak)


_JAXPR_TYPES = (jex_core.Jaxpr, jex_core.ClosedJaxpr)  # one since 0.11


def open_jaxpr(jaxpr: AnyJaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """``(jaxpr, consts)`` of a jaxpr, closed or open.

    The public classes differ by version: 0.11 merged them into one.
    """
    inner: Any = getattr(jaxpr, "jaxpr", jaxpr)
    return inner, getattr(jaxpr, "consts", ())


def is_jaxpr(value: object) -> bool:
    """True for a jaxpr, closed or not."""
    return isinstance(value, _JAXPR_TYPES)


def all_equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of an open jaxpr and, each after its equation, those of its sub-programs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies(eqn):
            yield from all_equations(body)


def value_of_size(size: Any) -> Any:
    """A symbolic size as a scalar that the program computes with; anything else as it is."""
    return size.__jax_array__() if jax.export.is_symbolic_dim(size) else size


def is_literal(atom: object) -> TypeGuard[Literal]:
    """Whether an operand is a literal: a number written into its equation."""
    return isinstance(atom, Literal)


def shape_of(atom: Atom) -> tuple[Any, ...]:
    """The shape of an operand or result; ``()`` for one that is no array, such as a token."""
    return tuple(getattr(atom.aval, "shape", ()))


def dtype_of(atom: Atom) -> Any:
    """The dtype of an operand or result; ``bool`` for one that is no array, such as a token."""
    return getattr(atom.aval, "dtype", np.dtype(bool))


def varies(atom: Atom) -> bool:
    """Whether the type of a value says that it varies over the shards of a ``shard_map``.

    No public name tells it (``ShapedArray.mat``, since 0.10; nothing varies before).
    """
    return bool(getattr(getattr(atom.aval, "mat", None), "varying", ()))


def bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The programs among the parameters of an equation, as open jaxprs."""
    # Some parameters are tuples of jaxprs, such as the branches of a ``cond``.
    params = [value for value in eqn.params.values() if not is_plain(value)]
    for value in jax.tree_util.tree_leaves(params, is_leaf=is_jaxpr) if params else ():
        if is_jaxpr(value):
            yield open_jaxpr(value)[0]


_PLAIN = frozenset((bool, int, float, str, type(None)))


def is_plain(param: object) -> bool:
    """Whether a parameter is a number, a text, a dtype or a tuple of such: most of them are.

    It holds neither a program nor an array.
    """
    if type(param) is tuple:
        return all(type(part) in _PLAIN for part in param)
    return type(param) in _PLAIN or isinstance(param, np.dtype)


def variables_read(jaxpr: Jaxpr) -> Set[Atom]:
    """The variables of an open jaxpr that its equations read or that it returns."""
    atoms = itertools.chain(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns))
    return {atom for atom in atoms if not is_literal(atom)}


def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr without equations whose results are not read, inside its calls too.

    So an equation that cannot be masked matters only if its result does. All inputs stay. ``jit``
    removes the same equations (``partial_eval.dce_jaxpr``, since 0.2.9; no public name does).
    """
    return partial_eval.dce_jaxpr(jaxpr, True, instantiate=True)[0]


def without_hi_primitives(closed: Any) -> Any:
    """A program with its hijax equations expanded, each of which hides its function in an object.

    ``jit`` expands a program in the same way (``partial_eval.lower_jaxpr2``, since 0.7; no public
    name does).
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
    """A copy of a jaxpr with other variables and equations.

    ``jax.extend`` cannot make a jaxpr from another one (``Jaxpr.replace``, since 0.4).
    """
    jaxpr = open_jaxpr(original)[0]
    names = "constvars", "invars", "outvars", "eqns"
    lists = dict(zip(names, map(list, (constvars, invars, outvars, eqns)), strict=True))
    if len(set(_JAXPR_TYPES)) == 1:  # since 0.11 every jaxpr holds its constants
        return jaxpr.replace(**lists, consts=list(consts))
    rebuilt = jaxpr.replace(**lists)
    is_open = original is jaxpr
    return rebuilt if is_open else original.replace(jaxpr=rebuilt, consts=list(consts))


def bind_equation(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The results of one equation at these operands, evaluated as ``core.eval_jaxpr`` does."""
    out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


class EquationScopes:
    """Scopes of equations: the names and the configuration that an equation was traced under.

    ``core.eval_jaxpr`` enters both for every equation, but evaluates whole programs only.
    """

    def __init__(self) -> None:
        self._names = jex_source_info.current_name_stack()

    def __call__(self, eqn: JaxprEqn) -> tuple[AbstractContextManager[Any], ...]:
        """Two context managers: that of the names of ``eqn``, and that of its configuration."""
        source = eqn.source_info
        stack = self._names + source.name_stack
        return jex_source_info.user_context(source.traceback, name_stack=stack), eqn.ctx.manager


def first_effect(jaxpr: Jaxpr) -> str:
    """The name and line of the first equation of an open jaxpr with an effect; ``""`` if none has.

    Equations that hold programs are passed over: their effects are those of the equations inside.
    """
    eqn = next((eqn for eqn in all_equations(jaxpr) if eqn.effects and not [*bodies(eqn)]), None)
    if eqn is None:
        return ""
    line = source_line(eqn, equations_around(jaxpr, eqn))
    return f"{eqn.primitive.name} [{line}]" if line else str(eqn.primitive.name)


def equations_around(jaxpr: Jaxpr, eqn: JaxprEqn) -> tuple[Any, ...]:
    """The equations of an open jaxpr whose sub-programs contain ``eqn``, outermost first."""
    for around in jaxpr.eqns:
        for body in bodies(around):
            if eqn in all_equations(body):
                return (around, *equations_around(body, eqn))
    return ()


def stage(fn: Callable[..., Any], operands: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Trace ``fn`` to an open jaxpr whose leading inputs are the values that ``fn`` closes over.

    Primitives such as ``remat`` take closed-over values (run-time sizes, say) as operands.
    ``jax.make_jaxpr`` leaves them in constvars.
    """
    closed = jax.make_jaxpr(fn)(*operands)
    jaxpr = open_jaxpr(closed)[0]
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return rebuilt_jaxpr(jaxpr, [], [], invars, jaxpr.outvars, jaxpr.eqns), list(closed.consts)


def scan_arity(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried values of a ``scan`` equation.

    In 0.10 the parameters hold them as ints. Since 0.12 they are the lengths of the first two
    groups of ``ft_in``. No public name has them.
    """
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def expand_hi_primitive(prim: Any, avals: Sequence[Any]) -> Any:
    """The jaxpr that the primitive of a ``call_hi_primitive`` (since 0.12) expands to.

    The primitive's method ``expand`` is its definition, and no public name reaches it. The method
    takes and returns trees, which only ``in_tree`` and ``out_tree`` of the primitive describe.
    """

    def flat(*values: Any) -> list[Any]:
        arguments = jax.tree_util.tree_unflatten(prim.in_tree, values)
        return jax.tree_util.tree_leaves(prim.expand(*arguments))

    return jax.make_jaxpr(flat)(*map(struct_of, avals))


_primitives: dict[str, Any] = {}
_searched: dict[str, int] = {}  # the modules that were searched, and how many names they had


def _find_primitives() -> None:
    """Look for primitives in the modules of JAX that were imported, or have grown, since.

    ``jax.extend.core.primitives`` lists only some of them.
    """
    for name, module in modules_of_jax().items():
        if name.startswith("jax.") and _searched.get(name) != len(vars(module)):
            names = vars(module).copy()
            for value in names.values():
                if isinstance(value, jex_core.Primitive):
                    _primitives.setdefault(value.name, value)
            _searched[name] = len(names)


def modules_of_jax() -> dict[str, Any]:
    """All modules that are imported now, by name.

    ``sys.modules.copy()`` is one step of the interpreter. A loop over the items is not: an
    allocation in it can start the garbage collector, and another thread can then import a module.
    """
    return {name: m for name, m in sys.modules.copy().items() if m is not None}


_modules = [0]  # how many there were: one that came later may have added a name


def primitive(name: str) -> Any | None:
    """The primitive called ``name``, or None where this JAX has none of that name."""
    if name not in _primitives and _modules[0] != (count := len(sys.modules)):
        _find_primitives()
        _modules[0] = count
    return _primitives.get(name)


def name_of(eqn: JaxprEqn) -> str:
    """The name of the primitive of an equation; ``""`` if the primitive is not one of JAX."""
    return _name_of(eqn.primitive)


@functools.lru_cache(maxsize=4096)
def _name_of(prim: Primitive) -> str:
    name = str(prim.name)
    return name if primitive(name) is prim else ""


# Names of the primitives that call back into Python.
CALLBACKS = frozenset(("pure_callback", "io_callback", "debug_callback"))


def primitives(*names: str) -> list[Any]:
    """Those primitives of these names that this version of JAX has."""
    return [p for p in map(primitive, names) if p is not None]


_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "callee", "call")

# Names of the primitives that only run the program that they hold, on their operands.
CALLS = frozenset(
    (
        *("jit", "pjit", "call", "closed_call", "core_call", "remat2", "checkpoint"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
        *("custom_vmap_call", "remat_opt"),
    )
)


def called_jaxpr(params: Mapping[str, Any]) -> Any:
    """The program that an equation with a primitive of `CALLS` runs.

    The name of its parameter differs from primitive to primitive.
    """
    return next(params[name] for name in _CALLED if name in params)


# The code of the functions that `mlir.lower_fun` returns: all share it.
_LOWERED_BY_FUNCTION = mlir.lower_fun(lambda: None).__code__


def implementation(primitive: Primitive) -> tuple[Callable[..., Any], bool] | None:
    """The function, written in JAX, that computes what a primitive computes.

    That is its ``impl``. If ``impl`` only compiles the primitive (``apply_primitive``), it is the
    function that ``mlir.lower_fun`` made the lowering from, which no public name returns
    (``mlir._lowerings``, since 0.4). Only the lowering for all platforms counts: that for one
    platform may be a library call.
    """
    run = primitive.impl
    if not (isinstance(run, functools.partial) and run.func.__name__ == "apply_primitive"):
        return run, primitive.multiple_results
    rule: Any = getattr(mlir._lowerings.get(primitive), "rule", None)
    if getattr(rule, "__code__", None) is not _LOWERED_BY_FUNCTION:
        return None
    held = inspect.getclosurevars(rule).nonlocals  # the arguments of `mlir.lower_fun`
    return held["fun"], held["multiple_results"]


def lower_by(primitive: Primitive, function: Callable[..., Any]) -> Primitive:
    """Let JAX lower a primitive of bucketjit as a function written in JAX.

    ``mlir.register_lowering`` (since 0.4) is public in ``jax.interpreters`` alone.
    """
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=True))
    return primitive


def has_ordered_effect(eqn: JaxprEqn) -> bool:
    """Whether an equation has an effect whose order JAX keeps."""
    return any("Ordered" in type(effect).__name__ for effect in eqn.effects)
