"""A primitive for ``lax.associative_scan`` over an axis of symbolic size.

JAX unrolls the scan into slices of halved sizes, which symbolic sizes cannot follow. Here it
becomes one equation, which its masking rule unrolls at padded sizes. Derivatives of every order
are equations of the same primitive, in one of four modes. ``C`` is the combining function, ``S``
the scan and ``J`` its Jacobian:

    primal     S(x)
    tangent    J(x) t: the second half of the scan of the pairs (x, t) with the dual of C
    pullback   J(x)^T u: the recursion of the scan, backwards
    curvature  the tangent of the pullback: the first half of the pullback of the pairs. Second
               derivatives are symmetric, so its transpose is a curvature, too

Tangents of the tangent and of the curvature are those of a scan of pairs, so no other mode is
needed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.errors import InconclusiveDimensionOperation
from jax.extend import core as jex_core
from jax.interpreters import ad, batching
from jax.tree_util import PyTreeDef

from bucketjit._jax.jaxprs import evaluate_jaxpr, open_jaxpr, stage
from bucketjit._jax.patches.shapes import fresh_dimension

PRIMAL, TANGENT, PULLBACK, CURVATURE = "primal", "tangent", "pullback", "curvature"

associative_scan_p = jex_core.Primitive("associative_scan")
associative_scan_p.multiple_results = True

_numbers = itertools.count()  # of dimension variables, so that no two scans share one


class Combine:
    """The combining function as a program over any number of elements.

    Attributes:
        jaxpr: ``(*consts, *left, *right) -> out``, closed. Left, right and out have
            the size ``length`` along ``axis``.
        length: The name of the dimension variable of that size, which no other part of the program
            has; its value changes from step to step of the scan.
        axis: The scanned axis of each element.
        num_consts: How many arrays the function closes over.
        floats: Positions of the floating-point arrays, among constants and among elements.
        apply: The function itself, for any number of pairs.
    """

    def __init__(
        self,
        fn: Callable[..., Sequence[Any]],
        consts: Sequence[Any],
        elems: Sequence[Any],
        axis: int,
        length: object,
    ) -> None:
        self.length, self.axis, self.num_consts = str(length), axis, len(consts)
        self._dim = length
        self.apply: Callable[..., list[Any]] = lambda *args: list(fn(*args))
        self._consts = [_struct(x) for x in consts]
        self._elems = [_struct(x, axis, length) for x in elems]
        self.jaxpr = self._trace(fn, self._consts + 2 * self._elems)
        self.floats = tuple(
            [i for i, x in enumerate(some) if jnp.issubdtype(x.dtype, jnp.inexact)]
            for some in (self._consts, self._elems)
        )

    def _trace(self, fn: Callable[..., Sequence[Any]], structs: Sequence[Any]) -> Any:
        try:
            return jax.make_jaxpr(fn)(*structs)
        except InconclusiveDimensionOperation as error:
            if self.length not in str(error):
                raise
            raise NotImplementedError(
                "associative_scan: its function depends on how many elements it is given"
            ) from error

    def split(self, args: Sequence[Any], *, floats: bool = False) -> tuple[list[Any], list[Any]]:
        """Cut a list after the entries of the constants."""
        n = len(self.floats[0]) if floats else self.num_consts
        return list(args[:n]), list(args[n:])

    def floats_of(self, consts: Sequence[Any], elems: Sequence[Any]) -> list[Any]:
        """The floating-point arrays among constants and elements, in order."""
        return [x[i] for x, at in zip((consts, elems), self.floats, strict=True) for i in at]

    @functools.cached_property
    def dual(self) -> Combine:
        """The function on pairs: ``consts, their tangents, elems, their tangents``.

        The result has the same order as elements and their tangents.
        """
        consts, elems = self._consts, self._elems
        in_c, in_e = self.floats
        moved = (in_c, [*in_e], [*in_e])

        def fn(*args: object) -> list[Any]:
            # consts, their tangents, left, its tangents, right, its tangents
            sizes = [len(consts), len(in_c)] + 2 * [len(elems), len(in_e)]
            parts = _cut(args, sizes)
            primals, dots = parts[0::2], list(itertools.chain(*parts[1::2]))

            def of_floats(*floats: object) -> tuple[list[Any], list[Any]]:
                given = iter(floats)
                full = [
                    next(given) if i in at else x
                    for some, at in zip(primals, moved, strict=True)
                    for i, x in enumerate(some)
                ]
                outs = self.apply(*full)
                return [outs[i] for i in in_e], outs

            floats = [some[i] for some, at in zip(primals, moved, strict=True) for i in at]
            _, tangents, outs = jax.jvp(of_floats, floats, dots, has_aux=True)
            return [*outs, *tangents]

        pairs = ([*consts, *(consts[i] for i in in_c)], [*elems, *(elems[i] for i in in_e)])
        return Combine(fn, *pairs, self.axis, self._dim)

    @functools.cached_property
    def pullback(self) -> Any:
        """The program ``(*consts, *left, *right, *cotangents) -> cotangents``.

        It returns those of constants, left and right elements. Only floating-point arrays have one.
        """
        in_c, in_e = self.floats
        moved = (in_c, in_e, in_e)
        sizes = [self.num_consts, len(self._elems), len(self._elems)]

        def fn(*args: object) -> list[Any]:
            *primals, cotangents = _cut(args, [*sizes, len(in_e)])

            def of_floats(*floats: object) -> list[Any]:
                given = iter(floats)
                full = [
                    next(given) if i in at else x
                    for some, at in zip(primals, moved, strict=True)
                    for i, x in enumerate(some)
                ]
                outs = self.apply(*full)
                return [outs[i] for i in in_e]

            floats = [some[i] for some, at in zip(primals, moved, strict=True) for i in at]
            return list(jax.vjp(of_floats, *floats)[1](cotangents))

        cotangents = [self._elems[i] for i in in_e]
        return self._trace(fn, self._consts + 2 * self._elems + cotangents)

    def batched(self, const_batched: Sequence[bool], size: object) -> Combine:
        """The function with a leading batch axis on all elements and on some constants."""
        axes = [0 if b else None for b in const_batched] + 2 * len(self._elems) * [0]
        fn = jax.vmap(lambda *args: self.apply(*args), in_axes=axes)
        consts = [
            _struct(x, shape=(size, *x.shape)) if b else x
            for x, b in zip(self._consts, const_batched, strict=True)
        ]
        elems = [_struct(x, shape=(size, *x.shape)) for x in self._elems]
        return Combine(fn, consts, elems, self.axis + 1, self._dim)


def _struct(x: Any, axis: int | None = None, size: Any = None, shape: Any = None) -> Any:
    shape = tuple(x.shape) if shape is None else shape
    if axis is not None:
        shape = (*shape[:axis], size, *shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _cut(items: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    rest = iter(items)
    return [list(itertools.islice(rest, n)) for n in sizes]


# --- the function ---------------------------------------------------------------------------


def associative_scan_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """``lax.associative_scan``, extended to axes of symbolic size."""

    @functools.wraps(original)
    def associative_scan(fn: object, elems: object, reverse: bool = False, axis: int = 0) -> Any:
        flat, tree = jax.tree_util.tree_flatten(elems)
        # JAX refuses a negative axis together with `reverse`: leave the error to it.
        where = axis + flat[0].ndim if flat and axis < 0 and not reverse else axis
        if not flat or not 0 <= where < flat[0].ndim or not _is_open(flat[0], where):
            return original(fn, elems, reverse=reverse, axis=axis)
        sizes = [x.shape[where] for x in flat]
        if any(size != sizes[0] for size in sizes):
            raise ValueError(
                f"Array inputs to associative_scan must have the same first dimension. "
                f"(saw: {[x.shape for x in flat]})"
            )
        if reverse:
            flat = [lax.rev(x, (where,)) for x in flat]
        consts, combine = _close(fn, tree, flat, where)
        outs = associative_scan_p.bind(*consts, *flat, combine=combine, mode=PRIMAL)
        if reverse:
            outs = [lax.rev(x, (where,)) for x in outs]
        return jax.tree_util.tree_unflatten(tree, outs)

    return associative_scan


def _is_open(x: Any, axis: int) -> bool:
    return jax.export.is_symbolic_dim(x.shape[axis])


def _close(fn: Any, tree: PyTreeDef, elems: Sequence[Any], axis: int) -> tuple[list[Any], Combine]:
    """Trace the user's function on one pair of elements, and map it over any number of pairs.

    Returns the arrays that it closes over, and the mapped function.
    """

    def of_flat(*args: Any) -> list[Any]:
        left, right = (
            jax.tree_util.tree_unflatten(tree, half)
            for half in (args[: len(elems)], args[len(elems) :])
        )
        outs = jax.tree_util.tree_leaves(fn(left, right))
        wanted = [(x.shape, x.dtype) for x in ones]
        if [(jnp.shape(x), jnp.asarray(x).dtype) for x in outs] != wanted:
            raise TypeError(
                "associative_scan: its function must return what it is given: "
                f"{wanted}, not {[(jnp.shape(x), jnp.asarray(x).dtype) for x in outs]}"
            )
        return outs

    ones = [_struct(x, axis, 1) for x in elems]
    single, consts = stage(of_flat, [*ones, *ones])

    num_consts = len(consts)  # `of_one` outlives the trace, so it must not hold its values

    def of_one(*args: Any) -> list[Any]:
        closed, pair = args[:num_consts], args[num_consts:]
        outs = evaluate_jaxpr(single, *closed, *(lax.expand_dims(x, (axis,)) for x in pair))
        return [lax.squeeze(x, (axis,)) for x in outs]

    in_axes = (*(None for _ in consts), *(axis for _ in [*elems, *elems]))
    of_any = jax.vmap(of_one, in_axes=in_axes, out_axes=axis)
    length = fresh_dimension(elems[0].shape[axis], f"scanned{next(_numbers)}")
    return list(consts), Combine(of_any, consts, elems, axis, length)


# --- the primitive --------------------------------------------------------------------------


def _bind(combine: Combine, mode: str, *operands: object) -> list[Any]:
    return list(associative_scan_p.bind(*operands, combine=combine, mode=mode))


@associative_scan_p.def_abstract_eval  # type: ignore[untyped-decorator]
def _abstract_eval(*avals: object, combine: Combine, mode: str) -> list[Any]:
    consts, rest = combine.split(avals)
    elems = rest[: len(rest) if mode == PRIMAL else _num_elems(combine)]
    if mode == PRIMAL:
        outs = elems
    elif mode == TANGENT:
        outs = [elems[i] for i in combine.floats[1]]
    else:
        outs = combine.floats_of(consts, elems)
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in outs]


def _num_elems(combine: Combine) -> int:
    return len(open_jaxpr(combine.jaxpr)[0].outvars)


def operands_of(combine: Combine, operands: Sequence[Any]) -> list[list[Any]]:
    """The operands of an equation in three lists: constants, elements, and those of the mode.

    Operands of the mode are none for primal, tangents for tangent, cotangents for pullback, and
    tangents, cotangents and tangents of the cotangents for curvature.
    """
    return _cut(operands, [combine.num_consts, _num_elems(combine), len(operands)])


def pullback_of_pairs(combine: Combine, operands: Sequence[Any]) -> list[Any]:
    """The operands of a pullback over pairs; its `first_half` is the curvature."""
    consts, elems, linear = operands_of(combine, operands)
    c, e = map(len, combine.floats)
    const_dots, elem_dots, cotangents, cotangent_dots = _cut(linear, [c, e, e, e])
    return [*consts, *const_dots, *elems, *elem_dots, *cotangent_dots, *cotangents]


def first_half(combine: Combine, outs: Sequence[Any]) -> list[Any]:
    """The outputs of a pullback over pairs that belong to the first of each pair."""
    c, e = map(len, combine.floats)
    return [*outs[:c], *outs[2 * c : 2 * c + e]]


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, combine: Combine, mode: str
) -> tuple[list[Any], list[Any]]:
    outs = _bind(combine, mode, *primals)
    # Only floats have tangents: operands of the primitive hold none for other dtypes.
    floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in primals]
    dots = [ad.instantiate_zeros(t) if f else None for t, f in zip(tangents, floats, strict=True)]
    if mode == CURVATURE:
        pairs, pair_dots = (pullback_of_pairs(combine, some) for some in (primals, dots))
        (_, found) = _jvp(
            pairs, _zeros_for_none(pairs, pair_dots), combine=combine.dual, mode=PULLBACK
        )
        return outs, first_half(combine, found)
    consts, elems, linear = operands_of(combine, primals)
    const_dots, elem_dots, linear_dots = operands_of(combine, dots)
    float_dots = combine.floats_of(const_dots, elem_dots)
    if mode == PRIMAL:
        given = iter(_bind(combine, TANGENT, *consts, *elems, *float_dots))
        at = combine.floats[1]
        return outs, [next(given) if i in at else _zero(x) for i, x in enumerate(outs)]
    if mode == PULLBACK:
        return outs, _bind(combine, CURVATURE, *consts, *elems, *float_dots, *linear, *linear_dots)
    # TANGENT: the tangent of S's tangent is the second half of the tangent of the scan of pairs.
    c_linear, e_linear = combine.split(linear, floats=True)
    c_linear_dots, e_linear_dots = combine.split(linear_dots, floats=True)
    c_dots, e_dots = combine.split(float_dots, floats=True)
    found = _bind(
        combine.dual,
        TANGENT,
        *(*consts, *c_linear, *elems, *e_linear),
        *(*c_dots, *c_linear_dots, *e_dots, *e_linear_dots),
    )
    return outs, found[len(e_dots) :]


def _zero(x: object) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _zeros_for_none(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    return [_zero(x) if t is None else t for x, t in zip(primals, tangents, strict=True)]


def _transpose(
    cotangents: Sequence[Any], *operands: object, combine: Combine, mode: str
) -> list[Any]:
    consts, elems, linear = operands_of(combine, operands)
    known = [*consts, *elems]
    given = [ad.instantiate_zeros(t) for t in cotangents]
    if mode == PRIMAL or any(map(ad.is_undefined_primal, known)):
        raise NotImplementedError("associative_scan is not linear in its elements")
    if mode == CURVATURE:
        found = _transpose_curvature(given, known, linear, combine)
    else:  # tangent and pullback are each other's transpose
        found = _bind(combine, PULLBACK if mode == TANGENT else TANGENT, *known, *given)
    wanted = [t if ad.is_undefined_primal(x) else None for t, x in zip(found, linear, strict=True)]
    return [None] * len(known) + wanted


def _transpose_curvature(
    given: list[Any], known: list[Any], linear: list[Any], combine: Combine
) -> list[Any]:
    """The transpose of a curvature, in the operands that the mode adds.

    A curvature is linear in all tangents together (those of constants and elements, and those of
    the cotangents), and linear in cotangents and their tangents together.
    """
    c, e = map(len, combine.floats)
    dots, cotangents, _ = _cut(linear, [c + e, e, e])
    to_cotangent_dots = _bind(combine, TANGENT, *known, *given)
    if not any(map(ad.is_undefined_primal, cotangents)):  # linear in the tangents
        none = [jnp.zeros_like(t) for t in cotangents]
        to_dots = _bind(combine, CURVATURE, *known, *given, *cotangents, *none)
        return [*to_dots, *cotangents, *to_cotangent_dots]
    # Linear in the cotangents and their tangents.
    consts, elems, _ = operands_of(combine, known)
    (const_dots, elem_dots), (given_c, given_e) = (
        combine.split(some, floats=True) for some in (dots, given)
    )
    none_c, none_e = ([jnp.zeros_like(t) for t in some] for some in (given_c, given_e))
    to_cotangents = _bind(
        combine.dual,
        TANGENT,
        *(*consts, *const_dots, *elems, *elem_dots),
        *(*given_c, *none_c, *given_e, *none_e),
    )[e:]
    return [*dots, *to_cotangents, *to_cotangent_dots]


# A batch axis is moved to the front of every element. Constants stay unbatched where they can.
def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, combine: Combine, mode: str
) -> tuple[list[Any], list[int]]:
    if mode == CURVATURE:
        pairs, pair_dims = (pullback_of_pairs(combine, some) for some in (operands, dims))
        outs, out_dims = _batch(pairs, pair_dims, combine=combine.dual, mode=PULLBACK)
        return first_half(combine, outs), first_half(combine, out_dims)
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    consts, elems, linear = operands_of(combine, operands)
    const_dims, elem_dims, linear_dims = operands_of(combine, dims)
    linear_consts: list[Any] = []
    linear_const_dims: list[Any] = []
    if mode == TANGENT:
        linear_consts, linear = combine.split(linear, floats=True)
        linear_const_dims, linear_dims = combine.split(linear_dims, floats=True)
    # A constant and its tangent are batched alike. In a pullback each row has its own cotangent of
    # a constant, so constants with cotangents are batched.
    batched = [d is not None for d in const_dims]
    for k, i in enumerate(combine.floats[0]):
        batched[i] |= mode == PULLBACK or (mode == TANGENT and linear_const_dims[k] is not None)
    front = [
        batching.bdim_at_front(x, d, size) if b else x
        for x, d, b in zip(consts, const_dims, batched, strict=True)
    ]
    front += [batching.bdim_at_front(x, d, size) for x, d in zip(elems, elem_dims, strict=True)]
    for x, d, i in zip(linear_consts, linear_const_dims, combine.floats[0], strict=False):
        front.append(batching.bdim_at_front(x, d, size) if batched[i] else x)
    front += [batching.bdim_at_front(x, d, size) for x, d in zip(linear, linear_dims, strict=True)]
    outs = _bind(combine.batched(batched, size), mode, *front)
    return outs, [0] * len(outs)


ad.primitive_jvps[associative_scan_p] = _jvp
ad.primitive_transposes[associative_scan_p] = _transpose
batching.primitive_batchers[associative_scan_p] = _batch
