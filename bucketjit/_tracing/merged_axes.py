"""Keep axes apart that a program merges and splits again.

A common way to write a layer is ``x.reshape(b * s, d) @ w``, then back to ``(b, s, e)``::

    before   m:f32[b*s,d] = reshape x        after   y:f32[b,s,e] = dot_general x w
             n:f32[b*s,e] = dot_general m w
             y:f32[b,s,e] = reshape n

At padded sizes each of the two reshapes is a gather, since a merged axis has its real data at the
front. The equations between them mostly treat the merged axis as rows, so the program computes the
same with the axes kept apart, and nothing has to be moved. The pass rewrites the traced program
once, before any bucket is built, so no masking rule has to know of it.

A value whose merged axis is kept apart has a *form*, `SplitAxis`. The table says how each primitive
passes a form on. Where a value is needed merged after all, it is merged there, once. The pass
counts for each merge the reshapes that it saves and the gathers that it costs, and leaves alone
those that do not pay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from bucketjit._ir.dataflow import ELEMENTWISE
from bucketjit._ir.expressions import Shape, groups, is_symbolic, without_ones
from bucketjit._jax import jaxprs

_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")


def keep_apart(jaxpr: Jaxpr, consts: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Rewrite a program so that axes which it merges and splits again stay apart."""
    if not _merges_and_splits(jaxpr):  # most programs do not, and are spared a trace
        return jaxpr, consts
    structs = [jaxprs.struct_of(v.aval) for v in jaxpr.invars]
    left_alone: set[int] = set()
    for _ in range(2):
        work = _Keeping(left_alone)
        closed = jax.make_jaxpr(work.results(jaxpr, consts))(*structs)
        worthless = {merge for merge, saved in work.saved.items() if saved <= 0}
        if not worthless:
            break
        left_alone |= worthless
    if sum(work.saved.values()) <= 0:
        return jaxpr, consts
    inner, constants = jaxprs.open_jaxpr(closed)
    return jaxprs.without_dead_code(inner), tuple(constants)


def _merges_and_splits(jaxpr: Jaxpr) -> bool:
    """Whether a program merges symbolic axes in one reshape, and splits one in another.

    Programs that it calls are searched too.
    """
    merges = splits = False
    programs = [jaxpr]
    for inner in programs:
        for eqn in inner.eqns:
            if jaxprs.name_of(eqn) == "reshape":
                shapes = jaxprs.shape_of(eqn.invars[0]), jaxprs.shape_of(eqn.outvars[0])
                for old, new in groups(*map(without_ones, shapes)):
                    merges |= len(new) == 1 and any(map(is_symbolic, old[1:]))
                    splits |= len(old) == 1 and any(map(is_symbolic, new[1:]))
            elif jaxprs.name_of(eqn) in _CALLS:
                programs.append(jaxprs.open_jaxpr(jaxprs.called_jaxpr(eqn.params))[0])
    return merges and splits


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

    def axes(self, merged: Sequence[int]) -> tuple[int, ...]:
        """Axes of the split value, from axes of the merged one."""
        extra = len(self.sizes) - 1
        split: list[int] = []
        for a in merged:
            first = a + extra * (a > self.axis)
            split += range(first, first + 1 + extra * (a == self.axis))
        return tuple(split)


Form = SplitAxis | None


class SplitEquation(NamedTuple):
    """How an equation runs on values with split axes.

    Attributes:
        ins: The form that each operand must have.
        out: The form of the result.
        params: The parameters of the equation on these operands.
    """

    ins: tuple[Form, ...]
    out: Form
    params: Mapping[str, Any]


def _elementwise(eqn: JaxprEqn, forms: Sequence[Form]) -> SplitEquation | None:
    form = next(f for f in forms if f is not None)
    rank = len(jaxprs.shape_of(eqn.outvars[0]))
    if not all(f is None or _key(f) == _key(form) for f in forms):
        return None
    ins = tuple(form if len(jaxprs.shape_of(v)) == rank else None for v in eqn.invars)
    return SplitEquation(ins, form, eqn.params)


def _merge_or_split(eqn: JaxprEqn, forms: Sequence[Form]) -> SplitEquation | None:
    params = eqn.params
    if params.get("dimensions") is not None or params.get("sharding") is not None:
        return None
    before, after = jaxprs.shape_of(eqn.invars[0]), jaxprs.shape_of(eqn.outvars[0])
    places = [i for i, d in enumerate(after) if is_symbolic(d) or d != 1]
    form, axis, place = forms[0], 0, 0
    # Each group of old axes becomes a group of new ones; `axis` and `place` are where they begin,
    # counted without axes of size 1.
    for old, new in groups(without_ones(before), without_ones(after)):
        if form is None:
            # Merging static axes behind an open one keeps padding at the end: nothing to gain.
            if len(new) == 1 and any(map(is_symbolic, old[1:])):
                merged = SplitAxis(places[place], old)
                return SplitEquation((None,), merged, {**params, "new_sizes": merged.of(after)})
        elif axis == len(without_ones(before[: form.axis])):
            if list(map(str, new)) == list(map(str, form.sizes)) and len(old) == 1:
                return SplitEquation((form,), None, params)
            if len(new) == len(old) == 1:
                moved = SplitAxis(places[place], form.sizes)
                return SplitEquation((form,), moved, {**params, "new_sizes": moved.of(after)})
            return None
        axis, place = axis + len(old), place + len(new)
    return None


def _dot_general(eqn: JaxprEqn, forms: Sequence[Form]) -> SplitEquation | None:
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
        is_alike = _key(left) == _key(SplitAxis(left.axis, right.sizes))
        if not is_alike or (left.axis, right.axis) not in pairs:
            return None
    numbers = tuple((_axes(left, a), _axes(right, b)) for a, b in (contract, batch))
    params = {**eqn.params, "dimension_numbers": numbers}
    return SplitEquation((left, right), _out_of_dot(eqn, left, right), params)


def _axes(form: Form, merged: Sequence[int]) -> tuple[int, ...]:
    return tuple(merged) if form is None else form.axes(merged)


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


def _others(atom: jaxprs.Atom, *used: Sequence[int]) -> list[int]:
    return [i for i in range(len(jaxprs.shape_of(atom))) if not any(i in u for u in used)]


def _reduction(eqn: JaxprEqn, form: SplitAxis) -> SplitEquation | None:
    axes = eqn.params["axes"]
    params = {**eqn.params, "axes": form.axes(axes)}
    if form.axis in axes:
        return SplitEquation((form,), None, params)
    below = sum(a < form.axis for a in axes)
    return SplitEquation((form,), SplitAxis(form.axis - below, form.sizes), params)


def _broadcast(eqn: JaxprEqn, form: SplitAxis) -> SplitEquation | None:
    params = eqn.params
    if params.get("sharding") is not None:
        return None
    places = params["broadcast_dimensions"]
    out = SplitAxis(places[form.axis], form.sizes)
    if str(jaxprs.shape_of(eqn.invars[0])[form.axis]) != str(params["shape"][out.axis]):
        return None
    new = {"shape": out.of(params["shape"]), "broadcast_dimensions": out.axes(places)}
    return SplitEquation((form,), out, {**params, **new})


def _transpose(eqn: JaxprEqn, form: SplitAxis) -> SplitEquation | None:
    order = eqn.params["permutation"]
    out = SplitAxis(order.index(form.axis), form.sizes)
    return SplitEquation((form,), out, {**eqn.params, "permutation": form.axes(order)})


def _squeeze(eqn: JaxprEqn, form: SplitAxis) -> SplitEquation | None:
    dropped = eqn.params["dimensions"]
    if form.axis in dropped:
        return None
    out = SplitAxis(form.axis - sum(a < form.axis for a in dropped), form.sizes)
    return SplitEquation((form,), out, {**eqn.params, "dimensions": form.axes(dropped)})


def _along_one_axis(eqn: JaxprEqn, form: SplitAxis) -> SplitEquation | None:
    if eqn.params["axis"] == form.axis:
        return None
    return SplitEquation((form,), form, {**eqn.params, "axis": form.axes([eqn.params["axis"]])[0]})


def _of_one(
    follow: Callable[[JaxprEqn, SplitAxis], SplitEquation | None],
) -> Callable[[JaxprEqn, Sequence[Form]], SplitEquation | None]:
    """How an equation of one operand runs, whose axis is split."""

    def follow_one(eqn: JaxprEqn, forms: Sequence[Form]) -> SplitEquation | None:
        return None if forms[0] is None or len(forms) > 1 else follow(eqn, forms[0])

    return follow_one


_REDUCTIONS = ("sum", "prod", "max", "min", "and", "or", "xor")
_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")

_FOLLOW: dict[str, Callable[[Any, Sequence[Form]], SplitEquation | None]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **{f"reduce_{name}": _of_one(_reduction) for name in _REDUCTIONS},
    **dict.fromkeys(_CUMULATIVE, _of_one(_along_one_axis)),
    "reshape": _merge_or_split,
    "dot_general": _dot_general,
    "broadcast_in_dim": _of_one(_broadcast),
    "transpose": _of_one(_transpose),
    "squeeze": _of_one(_squeeze),
}


@dataclass
class _InForms:
    """A value of the program, in one form or in several.

    Attributes:
        shape: Its shape, with the axes merged.
        arrays: The array in each form, by `_key`.
        form: The form in which it was computed.
        merge: The equation that merged its axes, by its id; 0 if none did.
        spread: The operand and the axes of a broadcast, which makes any form for free.
    """

    shape: Shape
    arrays: dict[Any, Any]
    form: Form = None
    merge: int = 0
    spread: tuple[_InForms, Sequence[int]] | None = None


class _Keeping:
    """Evaluates a program with merged axes kept apart, and with its calls inlined.

    Attributes:
        saved: The gathers that each merge saves, less those that it costs, by its id.
    """

    def __init__(self, left_alone: set[int]) -> None:
        self._left_alone = left_alone
        self.saved: Counter[int] = Counter()

    def results(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> Callable[..., list[Any]]:
        """The program as a function."""

        def fn(*args: Any) -> list[Any]:
            values = self._run(jaxpr, consts, [_InForms(x.shape, {None: x}) for x in args])
            return [self._array(value, None, value.merge) for value in values]

        return fn

    def _run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[_InForms]) -> list[_InForms]:
        env: dict[Any, _InForms] = dict(zip(jaxpr.invars, args, strict=True))
        for var, constant in zip(jaxpr.constvars, consts, strict=True):
            env[var] = _InForms(jaxprs.shape_of(var), {None: constant})

        def value_of(v: Any) -> _InForms:
            return _InForms(jaxprs.shape_of(v), {None: v.val}) if jaxprs.is_literal(v) else env[v]

        scopes_of = jaxprs.EquationScopes()
        for eqn in jaxpr.eqns:
            ins = list(map(value_of, eqn.invars))
            names, configuration = scopes_of(eqn)
            with names, configuration:
                env.update(zip(eqn.outvars, self._equation(eqn, ins), strict=True))
        return list(map(value_of, jaxpr.outvars))

    def _equation(self, eqn: JaxprEqn, ins: list[_InForms]) -> list[_InForms]:
        name = jaxprs.name_of(eqn)
        if name in _CALLS:
            inner, consts = jaxprs.open_jaxpr(jaxprs.called_jaxpr(eqn.params))
            return self._run(inner, consts, ins)
        forms = [value.form for value in ins]
        merge = next((value.merge for value in ins if value.form), id(eqn))
        plan = None
        if any(forms) or (name == "reshape" and merge not in self._left_alone):
            plan = _FOLLOW[name](eqn, forms) if name in _FOLLOW else None
        shapes = [jaxprs.shape_of(v) for v in eqn.outvars]
        if plan is None:  # the equation needs its operands merged
            operands = [self._array(value, None, value.merge) for value in ins]
            outs = jaxprs.bind_equation(eqn, operands)
            places: Any = eqn.params.get("broadcast_dimensions")
            spread = (ins[0], places) if name == "broadcast_in_dim" and len(ins) == 1 else None
            pairs = zip(shapes, outs, strict=True)
            return [_InForms(shape, {None: x}, spread=spread) for shape, x in pairs]
        # A reshape that merges or splits the axis moves nothing any more.
        self.saved[merge] += name == "reshape" and (plan.ins[0] is None or plan.out is None)
        operands = [self._array(x, form, merge) for x, form in zip(ins, plan.ins, strict=True)]
        out = eqn.primitive.bind(*operands, **plan.params)
        return [_InForms(shapes[0], {_key(plan.out): out}, plan.out, merge if plan.out else 0)]

    def _array(self, value: _InForms, form: Form, merge: int) -> Any:
        """The array of a value in a form. Another form than its own costs a gather."""
        key = _key(form)
        if key in value.arrays:
            return value.arrays[key]
        shape = value.shape if form is None else form.of(value.shape)
        if form is not None and value.spread and form.axis not in value.spread[1]:
            operand, places = value.spread
            array = self._array(operand, None, merge)
            value.arrays[key] = lax.broadcast_in_dim(array, shape, form.axes(places))
        else:
            self.saved[merge] -= 1
            value.arrays[key] = lax.reshape(value.arrays[_key(value.form)], shape)
        return value.arrays[key]


def _key(form: Form) -> Any:
    """A key by which forms are compared: ``==`` of symbolic sizes may be inconclusive, or raise."""
    return None if form is None else (form.axis, tuple(map(str, form.sizes)))
