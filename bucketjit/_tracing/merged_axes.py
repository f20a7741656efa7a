"""Keep axes apart that a program merges and splits again.

A common way to write a layer is ``x.reshape(b * s, d) @ w``, then back to ``(b, s, e)``::

    before   m:f32[b*s,d] = reshape x        after   y:f32[b,s,e] = dot_general x w
             n:f32[b*s,e] = dot_general m w
             y:f32[b,s,e] = reshape n

At padded sizes each of the two reshapes is a gather, since a merged axis has its real data at the
front. The equations between them mostly treat the merged axis as rows, so the program computes the
same with the axes kept apart, and nothing has to be moved. The pass rewrites the traced program
once, before any bucket is built, so no masking rule has to know of it.

A value whose merged axis is kept apart has a *form*, `SplitAxis`. The pass finds the form of each
equation's results. It counts the reshapes that this saves and the gathers that it costs (where a
value is needed merged after all). It rewrites the equations where more is saved than spent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from bucketjit._ir.expressions import groups, is_symbolic, without_ones
from bucketjit._jax.jaxprs import (
    Atom,
    EquationScopes,
    bind_equation,
    is_literal,
    open_jaxpr,
    shape_of,
    struct_of,
    without_dead_code,
)
from bucketjit._jax.primitives import called_jaxpr, name_of
from bucketjit._tracing.split_axes import FOLLOW, Form, SplitAxis, SplitEquation


@dataclass
class _Analysis:
    """The forms of all values, and the gathers that they save.

    Values whose forms depend on each other make a group (a union-find in `_parent`). A group is
    rewritten as a whole or not at all, so savings are counted for each group.

    Attributes:
        forms: The form of each value that has one.
        plans: The plan of each equation that touches such a value, by position.
        made_by: The equation that each value comes from.
    """

    forms: dict[Any, SplitAxis] = field(default_factory=dict)
    plans: dict[int, SplitEquation] = field(default_factory=dict)
    made_by: dict[Any, Any] = field(default_factory=dict)
    _parent: dict[Any, Any] = field(default_factory=dict)
    _saved: dict[Any, int] = field(default_factory=dict)

    def run(self, jaxpr: Jaxpr) -> None:
        """Find forms and plans for a program, and count savings and costs."""
        self.made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        paid: set[Any] = set()

        # A value that is needed in a form other than its own costs one gather, once per form.
        def pay(v: object, wanted: Form) -> None:
            free = wanted is not None and _spreads(self.made_by.get(v), wanted)
            if (v, _key(wanted)) not in paid and not free:
                paid.add((v, _key(wanted)))
                self._add(v, -1)

        for i, eqn in enumerate(jaxpr.eqns):
            forms = [None if is_literal(v) else self.forms.get(v) for v in eqn.invars]
            plan = _plan(eqn, forms)
            if plan is None:  # the equation needs its operands merged
                for v, form in zip(eqn.invars, forms, strict=True):
                    if form is not None:
                        pay(v, None)
                continue
            self.plans[i] = plan
            touched = [v for v, f in zip(eqn.invars, plan.ins, strict=True) if f is not None]
            if plan.out is not None:
                (out,) = eqn.outvars
                self.forms[out] = plan.out
                touched.append(out)
            for v in touched:
                self._join(touched[0], v)
            for v, form, wanted in zip(eqn.invars, forms, plan.ins, strict=True):
                if wanted is not None and form is None:
                    pay(v, wanted)
            # A reshape that merges or splits the axis moves nothing any more: one gather saved.
            if name_of(eqn) == "reshape" and (plan.ins[0] is None or plan.out is None):
                self._add(touched[0], 1)
        for v in jaxpr.outvars:
            if not is_literal(v) and v in self.forms:
                pay(v, None)

    def keep_what_pays(self, jaxpr: Jaxpr) -> None:
        """Drop the forms and plans of groups that do not save more than they cost."""
        for i in list(self.plans):
            eqn, plan = jaxpr.eqns[i], self.plans[i]
            pairs = [*zip(eqn.invars, plan.ins, strict=True), (eqn.outvars[0], plan.out)]
            touched = next(v for v, f in pairs if f is not None)
            if self._saved.get(self._root(touched), 0) <= 0:
                del self.plans[i]
                self.forms.pop(eqn.outvars[0], None)

    def _root(self, v: object) -> Any:
        while (parent := self._parent.get(v, v)) is not v:
            v = parent
        return v

    def _join(self, a: object, b: object) -> None:
        a, b = self._root(a), self._root(b)
        if a is not b:
            self._parent[b] = a
            self._saved[a] = self._saved.pop(b, 0) + self._saved.get(a, 0)

    def _add(self, v: object, gathers: int) -> None:
        root = self._root(v)
        self._saved[root] = self._saved.get(root, 0) + gathers


def _key(form: Form) -> Any:
    """A hashable key of a form, with sizes as text; see `SplitAxis.same`."""
    return None if form is None else (form.axis, tuple(map(str, form.sizes)))


def _plan(eqn: JaxprEqn, forms: Sequence[Form]) -> SplitEquation | None:
    name = name_of(eqn)
    if name not in FOLLOW or (name != "reshape" and not any(forms)):
        return None
    return FOLLOW[name](eqn, forms)


def _spreads(eqn: JaxprEqn | None, form: SplitAxis) -> bool:
    """Whether an equation broadcasts along the merged axis, so that it makes any form for free."""
    return (
        eqn is not None
        and name_of(eqn) == "broadcast_in_dim"
        and len(eqn.invars) == 1
        and form.axis not in eqn.params["broadcast_dimensions"]
    )


class _Rewriting:
    """Evaluates a program by the plans of its equations, and converts values between forms."""

    def __init__(self, analysis: _Analysis) -> None:
        self._analysis = analysis
        self._values: dict[Any, Any] = {}  # each in the form that the analysis found for it
        self._converted: dict[Any, Any] = {}  # by value and form

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        self._values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        scope_of = EquationScopes()
        for i, eqn in enumerate(jaxpr.eqns):
            plan = self._analysis.plans.get(i)
            forms = plan.ins if plan is not None else (None,) * len(eqn.invars)
            with scope_of(eqn):
                operands = [self._read(v, f) for v, f in zip(eqn.invars, forms, strict=True)]
                if plan is not None:
                    outs = [eqn.primitive.bind(*operands, **plan.params)]
                else:
                    outs = bind_equation(eqn, operands)
            self._values.update(zip(eqn.outvars, outs, strict=True))
        return [self._read(v, None) for v in jaxpr.outvars]

    def _read(self, v: Atom, wanted: Form) -> Any:
        if is_literal(v):
            return v.val
        own = self._analysis.forms.get(v)
        if (own is None) == (wanted is None):
            return self._values[v]
        key = (v, _key(wanted))
        if key not in self._converted:
            self._converted[key] = self._convert(v, wanted)
        return self._converted[key]

    def _convert(self, v: Atom, wanted: Form) -> Any:
        eqn = self._analysis.made_by.get(v)
        if eqn is not None and wanted is not None and _spreads(eqn, wanted):
            places = wanted.axes(eqn.params["broadcast_dimensions"])
            operand = self._read(eqn.invars[0], None)
            return lax.broadcast_in_dim(operand, wanted.of(shape_of(v)), places)
        shape = shape_of(v) if wanted is None else wanted.of(shape_of(v))
        return lax.reshape(self._values[v], shape)


_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")


def keep_apart(jaxpr: Jaxpr, consts: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Rewrite a program so that axes which it merges and splits again stay apart."""
    if not _merges_and_splits(jaxpr):  # most programs do not, and are spared two traces
        return jaxpr, consts
    flat, flat_consts = _retrace(jaxpr, lambda *args: _inlined(jaxpr, consts, args))
    analysis = _Analysis()
    analysis.run(flat)
    analysis.keep_what_pays(flat)
    if not analysis.plans:
        return jaxpr, consts
    return _retrace(flat, lambda *args: _Rewriting(analysis).run(flat, flat_consts, args))


def _retrace(jaxpr: Jaxpr, fn: Callable[..., list[Any]]) -> tuple[Any, Sequence[Any]]:
    """Trace a function with the arguments of a program; dead code is left out."""
    structs = [struct_of(v.aval) for v in jaxpr.invars]
    inner, consts = open_jaxpr(jax.make_jaxpr(fn)(*structs))
    return without_dead_code(inner), tuple(consts)


def _inlined(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a program, with the programs that it calls inlined."""
    env: dict[Atom, Any] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True)
    )
    scope_of = EquationScopes()
    for eqn in jaxpr.eqns:
        operands = [v.val if is_literal(v) else env[v] for v in eqn.invars]
        with scope_of(eqn):
            if name_of(eqn) in _CALLS:
                outs = _inlined(*open_jaxpr(called_jaxpr(eqn.params)), operands)
            else:
                outs = bind_equation(eqn, operands)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [v.val if is_literal(v) else env[v] for v in jaxpr.outvars]


def _merges_and_splits(jaxpr: Jaxpr) -> bool:
    """Whether a program merges symbolic axes in one reshape, and splits one in another.

    Programs that it calls are searched too.
    """
    found = {"merge": False, "split": False}

    def visit(inner: Any) -> None:
        for eqn in inner.eqns:
            if name_of(eqn) == "reshape":
                pairs = groups(
                    *map(without_ones, (shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])))
                )
                for old, new in pairs:
                    found["merge"] |= len(new) == 1 and any(map(is_symbolic, old[1:]))
                    found["split"] |= len(old) == 1 and any(map(is_symbolic, new[1:]))
            elif name_of(eqn) in _CALLS:
                visit(open_jaxpr(called_jaxpr(eqn.params))[0])

    visit(jaxpr)
    return all(found.values())
