"""The forms of values whose merged axis is kept apart, and how each primitive passes a form on.

    a:f32[b, s, 4]          form: two axes
    c:f32[b*s, 4] = reshape a     merged, kept as [b, s, 4]
    d:f32[b*s, 4] = tanh c        elementwise: the same form
    e:f32[b, s, 4] = reshape d    splits where it was merged: nothing is left to do

`bucketjit._tracing.merged_axes` uses it to decide what is worth it, and rewrites the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from bucketjit._ir.expressions import Shape, groups, is_symbolic, without_ones
from bucketjit._ir.primitive_facts import ELEMENTWISE
from bucketjit._jax.jaxprs import Atom, shape_of


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
        """Axes of the split value, from axes of the merged one."""
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
    rank = len(shape_of(eqn.outvars[0]))
    if not all(f is None or form.same(f) for f in forms):
        return None
    ins = tuple(form if len(shape_of(v)) == rank else None for v in eqn.invars)
    return SplitEquation(ins, form, eqn.params)


def _merge_or_split(eqn: JaxprEqn, forms: Sequence[Form]) -> SplitEquation | None:
    params = eqn.params
    if params.get("dimensions") is not None or params.get("sharding") is not None:
        return None
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    places = [i for i, d in enumerate(after) if is_symbolic(d) or d != 1]
    form, axis, at = forms[0], 0, 0
    # Each group of old axes becomes a group of new ones; `axis` and `at` are where they begin,
    # counted without axes of size 1.
    for old, new in groups(without_ones(before), without_ones(after)):
        if form is None:
            # Merging static axes behind an open one keeps padding at the end: nothing to gain.
            if len(new) == 1 and any(map(is_symbolic, old[1:])):
                merged = SplitAxis(places[at], old)
                return SplitEquation((None,), merged, {**params, "new_sizes": merged.of(after)})
        elif axis == _position(before, form.axis):
            if list(map(str, new)) == list(map(str, form.sizes)) and len(old) == 1:
                return SplitEquation((form,), None, params)
            if len(new) == len(old) == 1:
                moved = SplitAxis(places[at], form.sizes)
                return SplitEquation((form,), moved, {**params, "new_sizes": moved.of(after)})
            return None
        axis, at = axis + len(old), at + len(new)
    return None


def _position(shape: Shape, axis: int) -> int:
    """The position of an axis among those whose size is not 1."""
    return len(without_ones(shape[:axis]))


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
    return SplitEquation((left, right), _out_of_dot(eqn, left, right), params)


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


def _others(atom: Atom, *used: Sequence[int]) -> list[int]:
    return [i for i in range(len(shape_of(atom))) if not any(i in u for u in used)]


def _reduction(eqn: JaxprEqn, forms: Sequence[Form]) -> SplitEquation | None:
    (form,) = forms
    assert form is not None
    axes = eqn.params["axes"]
    params = {**eqn.params, "axes": form.axes(axes)}
    if form.axis in axes:
        return SplitEquation((form,), None, params)
    below = sum(a < form.axis for a in axes)
    return SplitEquation((form,), SplitAxis(form.axis - below, form.sizes), params)


def _broadcast(eqn: JaxprEqn, forms: Sequence[Form]) -> SplitEquation | None:
    form, params = forms[0], eqn.params
    if form is None or len(forms) > 1 or params.get("sharding") is not None:
        return None
    places = params["broadcast_dimensions"]
    out = SplitAxis(places[form.axis], form.sizes)
    if str(shape_of(eqn.invars[0])[form.axis]) != str(params["shape"][out.axis]):
        return None
    spread = (
        *out.axes(places[: form.axis]),
        *out.axes([out.axis]),
        *out.axes(places[form.axis + 1 :]),
    )
    new = {"shape": out.of(params["shape"]), "broadcast_dimensions": spread}
    return SplitEquation((form,), out, {**params, **new})


def _transpose(eqn: JaxprEqn, forms: Sequence[Form]) -> SplitEquation | None:
    (form,) = forms
    assert form is not None
    order = eqn.params["permutation"]
    out = SplitAxis(order.index(form.axis), form.sizes)
    return SplitEquation((form,), out, {**eqn.params, "permutation": form.axes(order)})


def _squeeze(eqn: JaxprEqn, forms: Sequence[Form]) -> SplitEquation | None:
    (form,) = forms
    assert form is not None
    dropped = eqn.params["dimensions"]
    if form.axis in dropped:
        return None
    out = SplitAxis(form.axis - sum(a < form.axis for a in dropped), form.sizes)
    return SplitEquation((form,), out, {**eqn.params, "dimensions": form.axes(dropped)})


def _along_one_axis(eqn: JaxprEqn, forms: Sequence[Form]) -> SplitEquation | None:
    (form,) = forms
    assert form is not None
    if eqn.params["axis"] == form.axis:
        return None
    return SplitEquation((form,), form, {**eqn.params, "axis": form.axes([eqn.params["axis"]])[0]})


_REDUCTIONS = ("sum", "prod", "max", "min", "and", "or", "xor")

_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")

FOLLOW: dict[str, Callable[[Any, Sequence[Form]], SplitEquation | None]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **{f"reduce_{name}": _reduction for name in _REDUCTIONS},
    **dict.fromkeys(_CUMULATIVE, _along_one_axis),
    "reshape": _merge_or_split,
    "dot_general": _dot_general,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
}
