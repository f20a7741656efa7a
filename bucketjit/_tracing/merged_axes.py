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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from bucketjit._ir.primitive_facts import ELEMENTWISE
from bucketjit._jax.jaxprs import (
    Atom,
    EquationScopes,
    bind_equation,
    is_literal,
    open_jaxpr,
    struct_of,
    without_dead_code,
)
from bucketjit._jax.primitives import called_jaxpr, name_of
from bucketjit._sizes.expressions import Shape, is_symbolic
from bucketjit._sizes.reshape_groups import groups, without_ones


class SplitAxis(NamedTuple):
    """A form: one merged axis of a value is kept as several axes.

    Attributes:
        axis: The merged axis.
        sizes: Sizes of the axes in its place.
    """

    axis: int
    sizes: Shape

    def of(self, shape: Shape) -> Shape:
        """The shape of the split value, from the shape of the merged one."""
        return (*shape[: self.axis], *self.sizes, *shape[self.axis + 1 :])

    def axes(self, given: Sequence[int]) -> tuple[int, ...]:
        """Axes of the split value, from axes of the merged one.

        Args:
            given: Axes of the merged value.

        Returns:
            The same axes, in order; for the merged axis all of those in its place.
        """
        extra = len(self.sizes) - 1
        found: list[int] = []
        for a in given:
            if a == self.axis:
                found += range(a, a + extra + 1)
            else:
                found.append(a + extra * (a > self.axis))
        return tuple(found)

    def same(self, other: SplitAxis | None) -> bool:
        """Whether two forms are equal.

        Sizes are compared as text: ``==`` of symbolic sizes may be inconclusive, or raise.
        """
        return (
            other is not None
            and self.axis == other.axis
            and list(map(str, self.sizes)) == list(map(str, other.sizes))
        )


Form = SplitAxis | None


class Plan(NamedTuple):
    """How an equation runs on values with split axes.

    Attributes:
        ins: The form that each operand must have.
        out: The form of the result.
        params: The parameters of the equation on these operands.
    """

    ins: tuple[Form, ...]
    out: Form
    params: Mapping[str, Any]


# --- equations that treat a merged axis as rows ----------------------------------------------

# Each function takes an equation and the forms of its operands, at least one of which is split
# (except for `_merge_or_split`), and returns a plan, or None if the axis cannot stay split there.


def _shape(atom: Any) -> Shape:
    return tuple(getattr(atom.aval, "shape", ()))


def _elementwise(eqn: JaxprEqn, forms: Sequence[Form]) -> Plan | None:
    form = next(f for f in forms if f is not None)
    rank = len(_shape(eqn.outvars[0]))
    if not all(f is None or form.same(f) for f in forms):
        return None
    ins = tuple(form if len(_shape(v)) == rank else None for v in eqn.invars)
    return Plan(ins, form, eqn.params)


def _merge_or_split(eqn: JaxprEqn, forms: Sequence[Form]) -> Plan | None:
    params = eqn.params
    if params.get("dimensions") is not None or params.get("sharding") is not None:
        return None
    before, after = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    places = [i for i, d in enumerate(after) if is_symbolic(d) or d != 1]
    form, axis, at = forms[0], 0, 0
    # Each group of old axes becomes a group of new ones; `axis` and `at` are where they begin,
    # counted without axes of size 1.
    for old, new in groups(without_ones(before), without_ones(after)):
        if form is None:
            # Merging static axes behind an open one keeps padding at the end: nothing to gain.
            if len(new) == 1 and any(map(is_symbolic, old[1:])):
                merged = SplitAxis(places[at], old)
                return Plan((None,), merged, {**params, "new_sizes": merged.of(after)})
        elif axis == _position(before, form.axis):
            if list(map(str, new)) == list(map(str, form.sizes)) and len(old) == 1:
                return Plan((form,), None, params)
            if len(new) == len(old) == 1:
                moved = SplitAxis(places[at], form.sizes)
                return Plan((form,), moved, {**params, "new_sizes": moved.of(after)})
            return None
        axis, at = axis + len(old), at + len(new)
    return None


def _position(shape: Shape, axis: int) -> int:
    """The position of an axis among those whose size is not 1."""
    return len(without_ones(shape[:axis]))


def _dot_general(eqn: JaxprEqn, forms: Sequence[Form]) -> Plan | None:
    (contract, batch), (left, right) = eqn.params["dimension_numbers"], forms
    pairs = [*zip(*contract, strict=True), *zip(*batch, strict=True)]
    rows = [f is not None and f.axis not in {p[i] for p in pairs} for i, f in enumerate(forms)]
    if any(rows):  # the axis is a free one of its operand, so the other operand is not split
        if (left is not None) and (right is not None):
            return None
    else:
        # The axis is contracted, or a batch axis: the other operand must be split alike.
        for a, b in pairs:
            if left is not None and left.axis == a:
                right = right or SplitAxis(b, left.sizes)
            elif right is not None and right.axis == b:
                left = left or SplitAxis(a, right.sizes)
        assert left is not None and right is not None
        matched = (left.axis, right.axis) in pairs and left.same(SplitAxis(left.axis, right.sizes))
        if not matched:
            return None
    numbers = tuple(
        (
            left.axes(of_left) if left else tuple(of_left),
            right.axes(of_right) if right else tuple(of_right),
        )
        for of_left, of_right in (contract, batch)
    )
    params = {**eqn.params, "dimension_numbers": numbers}
    return Plan((left, right), _out_of_dot(eqn, left, right), params)


def _out_of_dot(eqn: JaxprEqn, left: Form, right: Form) -> Form:
    """The form of a product. Its axes are batch axes, then free axes of the left, of the right."""
    (of_left, of_right), (batch_left, batch_right) = eqn.params["dimension_numbers"]
    free_left = _others(eqn.invars[0], of_left, batch_left)
    free_right = _others(eqn.invars[1], of_right, batch_right)
    if left is not None and left.axis not in of_left:
        return SplitAxis([*batch_left, *free_left].index(left.axis), left.sizes)
    if right is not None and right.axis not in of_right:
        place = [*batch_right, *free_right].index(right.axis)
        return SplitAxis(place + len(free_left) * (place >= len(batch_right)), right.sizes)
    return None


def _others(atom: object, *used: Sequence[int]) -> list[int]:
    return [i for i in range(len(_shape(atom))) if not any(i in u for u in used)]


def _reduction(eqn: JaxprEqn, forms: Sequence[Form]) -> Plan | None:
    (form,) = forms
    assert form is not None
    axes = eqn.params["axes"]
    params = {**eqn.params, "axes": form.axes(axes)}
    if form.axis in axes:
        return Plan((form,), None, params)
    below = sum(a < form.axis for a in axes)
    return Plan((form,), SplitAxis(form.axis - below, form.sizes), params)


def _broadcast(eqn: JaxprEqn, forms: Sequence[Form]) -> Plan | None:
    form, params = forms[0], eqn.params
    if form is None or len(forms) > 1 or params.get("sharding") is not None:
        return None
    places = params["broadcast_dimensions"]
    out = SplitAxis(places[form.axis], form.sizes)
    if str(_shape(eqn.invars[0])[form.axis]) != str(params["shape"][out.axis]):
        return None
    spread = (
        *out.axes(places[: form.axis]),
        *out.axes([out.axis]),
        *out.axes(places[form.axis + 1 :]),
    )
    new = {"shape": out.of(params["shape"]), "broadcast_dimensions": spread}
    return Plan((form,), out, {**params, **new})


def _transpose(eqn: JaxprEqn, forms: Sequence[Form]) -> Plan | None:
    (form,) = forms
    assert form is not None
    order = eqn.params["permutation"]
    out = SplitAxis(order.index(form.axis), form.sizes)
    return Plan((form,), out, {**eqn.params, "permutation": form.axes(order)})


def _squeeze(eqn: JaxprEqn, forms: Sequence[Form]) -> Plan | None:
    (form,) = forms
    assert form is not None
    dropped = eqn.params["dimensions"]
    if form.axis in dropped:
        return None
    out = SplitAxis(form.axis - sum(a < form.axis for a in dropped), form.sizes)
    return Plan((form,), out, {**eqn.params, "dimensions": form.axes(dropped)})


def _along_one_axis(eqn: JaxprEqn, forms: Sequence[Form]) -> Plan | None:
    (form,) = forms
    assert form is not None
    if eqn.params["axis"] == form.axis:
        return None
    return Plan((form,), form, {**eqn.params, "axis": form.axes([eqn.params["axis"]])[0]})


_REDUCTIONS = ("sum", "prod", "max", "min", "and", "or", "xor")
_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
_FOLLOW: dict[str, Callable[[Any, Sequence[Form]], Plan | None]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **{f"reduce_{name}": _reduction for name in _REDUCTIONS},
    **dict.fromkeys(_CUMULATIVE, _along_one_axis),
    "reshape": _merge_or_split,
    "dot_general": _dot_general,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
}


# --- what a rewriting saves ------------------------------------------------------------------


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
    plans: dict[int, Plan] = field(default_factory=dict)
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


def _plan(eqn: JaxprEqn, forms: Sequence[Form]) -> Plan | None:
    name = name_of(eqn)
    if name not in _FOLLOW or (name != "reshape" and not any(forms)):
        return None
    return _FOLLOW[name](eqn, forms)


def _spreads(eqn: JaxprEqn | None, form: SplitAxis) -> bool:
    """Whether an equation broadcasts along the merged axis, so that it makes any form for free."""
    return (
        eqn is not None
        and name_of(eqn) == "broadcast_in_dim"
        and len(eqn.invars) == 1
        and form.axis not in eqn.params["broadcast_dimensions"]
    )


# --- the rewriting -----------------------------------------------------------------------------


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

    def _read(self, v: object, wanted: Form) -> Any:
        if is_literal(v):
            return v.val
        own = self._analysis.forms.get(v)
        if (own is None) == (wanted is None):
            return self._values[v]
        key = (v, _key(wanted))
        if key not in self._converted:
            self._converted[key] = self._convert(v, wanted)
        return self._converted[key]

    def _convert(self, v: object, wanted: Form) -> Any:
        eqn = self._analysis.made_by.get(v)
        if eqn is not None and wanted is not None and _spreads(eqn, wanted):
            places = wanted.axes(eqn.params["broadcast_dimensions"])
            operand = self._read(eqn.invars[0], None)
            return lax.broadcast_in_dim(operand, wanted.of(_shape(v)), places)
        shape = _shape(v) if wanted is None else wanted.of(_shape(v))
        return lax.reshape(self._values[v], shape)


# --- the pass ------------------------------------------------------------------------------------

_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")


def keep_apart(jaxpr: Jaxpr, consts: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Rewrite a program so that axes which it merges and splits again stay apart.

    Args:
        jaxpr: An open jaxpr whose shapes may hold symbolic sizes.
        consts: Values of its constants.

    Returns:
        A jaxpr that computes the same, and its constants; the arguments themselves if there is
        nothing to gain.

    Raises:
        Exception: JAX cannot trace the program again with its symbolic sizes.
    """
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
                pairs = groups(*map(without_ones, (_shape(eqn.invars[0]), _shape(eqn.outvars[0]))))
                for old, new in pairs:
                    found["merge"] |= len(new) == 1 and any(map(is_symbolic, old[1:]))
                    found["split"] |= len(old) == 1 and any(map(is_symbolic, new[1:]))
            elif name_of(eqn) in _CALLS:
                visit(open_jaxpr(called_jaxpr(eqn.params))[0])

    visit(jaxpr)
    return all(found.values())
