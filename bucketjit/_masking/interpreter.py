"""Evaluation of a traced program at padded sizes, one masking rule per equation.

    before   b:f32[n] = exp a           after   b:f32[8] = exp a                    padded size 8
             c:f32[] = reduce_sum b             d:f32[8] = select (iota < n) b 0    rule: fill
                                                c:f32[] = reduce_sum d

The table of rules is an argument: the interpreter knows no primitive. An equation without symbolic
sizes runs as traced. An equation whose primitive has no rule is replaced by the implementation of
its primitive, if JAX can trace that.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.dataflow import ELEMENTWISE
from bucketjit._ir.expressions import Shape, is_symbolic
from bucketjit._ir.opaque import looked_inside
from bucketjit._ir.primitives import sized_p, unsized_p
from bucketjit._jax.arrays import explicit_sharding
from bucketjit._jax.config import without_leak_checks
from bucketjit._jax.jaxprs import (
    EquationScopes,
    bind_equation,
    is_jaxpr,
    is_literal,
    is_shaped,
    name_of,
    open_jaxpr,
    variables_read,
)
from bucketjit._jax.names import REMEDY_OF_VERSIONS, trouble_of_versions
from bucketjit._jax.user_code import in_brackets, source_line
from bucketjit._masking.array_ops import select
from bucketjit._masking.constants import folded
from bucketjit._masking.loops import has_loop_to_stop, is_inside, needs_retyping
from bucketjit._masking.padding import Padding
from bucketjit._masking.padding_facts import CERTAIN, MADE, open_axes
from bucketjit._masking.padding_plan import Plan, planned
from bucketjit._masking.rule_context import RuleContext, RuleTable
from bucketjit._masking.rules import default_rules
from bucketjit._raised import first_line, is_of_machine
from bucketjit.errors import MaskingError

# Called after each equation, with the equation, its padded outputs and the sizes. The outputs that
# it returns replace those of the equation.
Hook = Callable[[Any, list[Any], BucketSizes], list[Any]]


def interpret(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    sizes: BucketSizes,
    rules: RuleTable,
    after: Callable[[], Hook] | None = None,
    padding: object = None,
    known: Padding | None = None,
) -> list[Any]:
    """Evaluate a symbolic jaxpr on padded arguments.

    The padding of arguments holds 0, unless ``padding`` is None. What is found out of the padding
    of values is added to ``known``.
    """
    known, args = Padding() if known is None else known, list(args)
    plan = Plan()
    if not sizes.uneven:  # else a shard may have no real position
        plan = plan if padding is None else planned(jaxpr, known.results)
        known.follow_facts(plan)
    if padding is not None:
        for i, (var, value) in enumerate(zip(jaxpr.invars, args, strict=True)):
            shape = getattr(var.aval, "shape", ())
            if any(map(is_symbolic, shape)):
                known.note_zeros(value, shape)
                args[i] = repeating(value, shape, plan.repeated.get(i, ()), sizes, known)

    @functools.cache
    def hidden() -> Mapping[int, JaxprEqn]:
        from bucketjit._masking.vector_signs import hidden_signs

        return hidden_signs(jaxpr)

    walk = _Walk(sizes, rules, after, known, hidden)
    # No code of the user runs here, and what is made once for each trace is kept until the end.
    with without_leak_checks():
        return walk.run(jaxpr, consts, args)


def repeating(
    array: Any, shape: Shape, axes: Iterable[int], sizes: BucketSizes, padding: Padding
) -> Any:
    """An array whose padding along these axes holds slice 0; not if a mesh cuts arguments.

    Slice 0 of an axis that is cut is on one device, which would send it to all. Where another axis
    is cut, XLA would cut the filled array in another way than the argument.
    """
    if padding.around.is_cut or explicit_sharding(array) is not None:
        return array
    for axis in sorted(axes):
        first = lax.slice_in_dim(array, 0, 1, axis=axis)
        filled = select(sizes.in_bounds(shape, (axis,), array.shape), array, first)
        padding.note_fact(filled, shape, padding.fact(array, shape).repeating({axis: CERTAIN}))
        array = filled
    return array


_SCALARS = (bool, int, float, complex)


class _Walk:
    """The evaluation of one program; the programs inside it share its state.

    A program with dimension variables of its own, such as the function of an associative scan, gets
    a walk with more sizes.
    """

    def __init__(
        self,
        sizes: BucketSizes,
        rules: RuleTable,
        after: Callable[[], Hook] | None,
        padding: Padding,
        hidden: Callable[[], Mapping[int, Any]],
    ) -> None:
        self.hidden = hidden
        self._after = after
        self.padding = padding
        self.sizes = sizes
        self._rules = rules
        # Whether a jaxpr mentions sizes, by its `id` and `is_inside()`, which changes the answer.
        # The entry keeps the jaxpr alive, so that its `id` is not reused.
        self._mentions: dict[tuple[int, bool], tuple[Any, bool]] = {}

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Any],
        sizes: Mapping[str, tuple[int, Any]] | None = None,
        at: BucketSizes | None = None,
    ) -> list[Any]:
        """Evaluate an open jaxpr at padded sizes."""
        if sizes or at is not None:
            inside = (at or self.sizes).extended(sizes or {})
            padding = self.padding.at_other_sizes()
            walk = _Walk(inside, self._rules, self._after, padding, self.hidden)
            return walk.run(jaxpr, consts, args)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: object) -> Any:
            return atom.val if is_literal(atom) else env[atom]

        ever_read = variables_read(jaxpr)
        scopes_of = EquationScopes()
        hook = None if self._after is None else self._after()
        for eqn in jaxpr.eqns:
            names, configuration = scopes_of(eqn)
            with names, configuration:
                outs = self._equation(eqn, [read(v) for v in eqn.invars], ever_read)
                if hook is not None:
                    outs = hook(eqn, outs, self.sizes)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, operands: list[Any], ever_read: Set[Any]) -> list[Any]:
        """The outputs of one equation; equal equations are evaluated once."""
        key = _key(eqn, operands, self.sizes.defined)
        if key is None:
            return self._evaluated(eqn, operands, ever_read)
        evaluated: list[tuple[JaxprEqn, list[Any]]] = self.padding.once(key, operands, list)
        for earlier, outs in evaluated:
            if _are_equal(earlier, eqn):
                return outs
        outs = self._evaluated(eqn, operands, ever_read)
        evaluated.append((eqn, outs))
        return outs

    def _evaluated(self, eqn: JaxprEqn, operands: list[Any], ever_read: Set[Any]) -> list[Any]:
        """The outputs of one equation, by its rule if it mentions a symbolic size."""
        if not self._equation_mentions_sizes(eqn):
            outs = folded(eqn, operands) or bind_equation(eqn, operands)
            # The maximum of all scores may be one of them.
            self.padding.follow(eqn, operands, outs, is_plain=False, is_default=False)
            return outs
        name = eqn.primitive.name
        # The table holds names for primitives whose modules may not have been imported (Pallas).
        rule = self._rules.get(eqn.primitive) or self._rules.get(name)
        if rule is None:
            return self._look_inside(eqn, operands)
        operands = [_as_array(x, v.aval) for x, v in zip(operands, eqn.invars, strict=True)]
        operands = self.padding.operands(eqn, operands)
        try:
            ctx = RuleContext(eqn, operands, ever_read, self)
            out = rule(ctx, *operands)
            outs = list(out) if eqn.primitive.multiple_results else [out]
        except MaskingError as error:
            if error.names_a_line:  # an inner equation has raised it and added its own line
                raise
            raise MaskingError(
                _of(eqn, error.reason) + _where(eqn), error.remedy, in_bucket=error.in_bucket
            ) from error
        except FloatingPointError:  # from jax_debug_nans; JAX catches it to find the equation
            raise
        except Exception as error:
            if is_of_machine(error):
                raise
            if trouble := trouble_of_versions(error):
                raise MaskingError(f"{name}: {trouble}{_where(eqn)}", REMEDY_OF_VERSIONS) from error
            raise MaskingError(
                f"{name}: its masking rule failed with {type(error).__name__}: "
                f"{first_line(error)}{_where(eqn)}",
                _DEFECT,
                is_defect=True,
            ) from error
        if wrong := self._not_as_traced(outs, ctx.out_avals):
            raise MaskingError(
                f"{name}: its rule gave {wrong}{_where(eqn)}", _DEFECT, is_defect=True
            )
        # Padding constants describe what the primitive itself computes. They do not hold for a rule
        # that changed an operand or a parameter.
        is_default = inspect.unwrap(rule) is default_rules().get(eqn.primitive)
        self.padding.follow(eqn, operands, outs, is_plain=ctx.stands(out), is_default=is_default)
        if self.padding.plan.zeroed or self.padding.plan.repeated:
            outs = [
                self._filled(ctx, value, shape)
                for value, shape in zip(outs, ctx.out_shapes, strict=True)
            ]
        return outs

    def _filled(self, ctx: RuleContext, value: Any, shape: Shape) -> Any:
        is_open, where = frozenset(open_axes(shape)), id(ctx.eqn)
        if axes := self.padding.plan.repeated.get(where, frozenset()) & is_open:
            value = repeating(value, shape, axes, self.sizes, self.padding)
        if axes := self.padding.plan.zeroed.get(where, frozenset()) & is_open:
            value = ctx.fill(value, axes=axes, value=0, shape=shape)
            fact = self.padding.fact(value, shape).with_zeros(axes, MADE)
            self.padding.note_fact(value, shape, fact)
        return value

    def _not_as_traced(self, outs: Sequence[Any], avals: Sequence[Any]) -> str:
        """Describe the first result of a rule whose type differs from the program, or return ""."""
        if len(outs) != len(avals):
            return f"{len(outs)} results, expected {len(avals)}"
        for value, aval in zip(outs, avals, strict=True):
            if not is_shaped(aval):  # a token
                continue
            expected = self.sizes.padded_shape(aval.shape)
            if isinstance(value, _SCALARS) and not expected:  # a literal of an inner program
                continue
            if not hasattr(value, "shape") or not hasattr(value, "dtype"):
                return f"{type(value).__name__}, expected an array of shape {expected} for {aval}"
            if tuple(value.shape) != expected:
                return f"shape {tuple(value.shape)}, expected {expected} for {aval}"
            if value.dtype != aval.dtype:
                return f"dtype {value.dtype}, expected {aval.dtype} for {aval}"
        return ""

    def _look_inside(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        try:
            inner, consts = looked_inside(eqn)
        except MaskingError as error:
            raise MaskingError(error.reason + _where(eqn), error.remedy) from error
        return self.run(inner, consts, operands)

    def _equation_mentions_sizes(self, eqn: JaxprEqn) -> bool:
        """Whether an equation needs its rule: for a symbolic size, or for a loop to stop.

        An equation that cuts to a computed size has no symbolic result where a guard fixes the
        size. Some equations of a ``shard_map`` need it as well; see `needs_retyping`.
        """
        for v in (*eqn.invars, *eqn.outvars):
            if any(map(is_symbolic, getattr(v.aval, "shape", ()))):
                return True
        if any(map(self._param_mentions_sizes, eqn.params.values())):
            return True
        if eqn.primitive in (sized_p, unsized_p) or needs_retyping(eqn):
            return True
        return eqn.primitive in self._rules and has_loop_to_stop(eqn)

    def _param_mentions_sizes(self, value: Any) -> bool:
        """Whether a parameter holds a symbolic size, at any depth of tuples, trees and programs."""
        if is_symbolic(value):
            return True
        if is_jaxpr(value):
            key = (id(value), is_inside())
            if key not in self._mentions:
                inner = open_jaxpr(value)[0]
                answer = any(map(self._equation_mentions_sizes, inner.eqns))
                self._mentions[key] = (value, answer)
            return self._mentions[key][1]
        leaves = jax.tree_util.tree_leaves(value, is_leaf=is_jaxpr)
        if len(leaves) == 1 and leaves[0] is value:  # no tree: recursion would not end
            return False
        return any(map(self._param_mentions_sizes, leaves))


# Primitives whose equations are evaluated once where operands and parameters are the same.
_ONCE = frozenset(ELEMENTWISE) - {"copy"} | {
    *("broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "gather", "iota", "pad"),
    *("concatenate", "reduce_sum", "reduce_max", "reduce_min", "dot_general", "dynamic_slice"),
}


def _key(eqn: JaxprEqn, operands: Sequence[Any], defined: int) -> Any:
    """The operands of an equation and its name; None if equal equations are not looked for.

    Once the program has computed another size, no earlier equation is equal.
    """
    if name_of(eqn) not in _ONCE or eqn.effects:
        return None
    values = [
        np.asarray(v.val).tobytes() if is_literal(v) else id(x)
        for v, x in zip(eqn.invars, operands, strict=True)
    ]
    return defined, name_of(eqn), *values


def _are_equal(earlier: JaxprEqn, later: JaxprEqn) -> bool:
    """Whether two equations with one key have equal parameters and types."""

    def texts(eqn: JaxprEqn) -> Any:
        params = [(name, str(value)) for name, value in sorted(eqn.params.items())]
        return params, [str(v.aval) for v in (*eqn.invars, *eqn.outvars)]

    return bool(texts(earlier) == texts(later))


def _as_array(operand: Any, aval: Any) -> Any:
    """A Python scalar as an array of the dtype in the program, so that rules see arrays only."""
    return np.asarray(operand, aval.dtype) if isinstance(operand, _SCALARS) else operand


_DEFECT = "this is a defect of the rule; leave the axis static until it is mended"


def _of(eqn: JaxprEqn, reason: str) -> str:
    """A reason that begins with the name of a primitive; an inner equation's name is kept."""
    return reason if re.match(r"[\w-]+: ", reason) else f"{eqn.primitive.name}: {reason}"


def _where(eqn: JaxprEqn) -> str:
    return in_brackets(source_line(eqn))
