"""A primitive for ``lax.associative_scan`` over an axis of symbolic size.

JAX unrolls the scan into slices of halved sizes, which symbolic sizes cannot follow. Here it
becomes one equation, which its masking rule unrolls at padded sizes. Derivatives are equations of
the same primitive, in one of three modes. ``C`` is the combining function, ``S`` the scan and ``J``
its Jacobian:

    primal     S(x)
    tangent    J(x) t: the second half of the scan of the pairs (x, t) with the dual of C
    pullback   J(x)^T u: the recursion of the scan, backwards

Tangents of all three are those of a scan of pairs, so ``jax.hessian`` has its equations. A pullback
of pairs is not transposed: the gradient of a gradient needs sizes that are known.

Exported programs compute the scan in a loop over distances instead (Hillis and Steele):

    distance 1    y[i] = x[i-1] * x[i]         for i >= 1
    distance 2    y[i] = y[i-2] * y[i]         for i >= 2
    distance 4    ...                          until the distance is the size

Derivatives of a loop of unknown length cannot be taken backwards, so pullbacks are those of a
``lax.scan``, element by element.
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
from bucketjit._jax.primitives import lower_by

PRIMAL, TANGENT, PULLBACK = "primal", "tangent", "pullback"

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

    def of_floats(self, lists: Sequence[Sequence[Any]], fn: Callable[..., Any]) -> Any:
        """A function of the floats in lists of constants and elements, and these floats.

        It puts them back into the lists, calls ``fn`` with all arrays, and returns what `fn` does.
        """
        places = [self.floats[0], *(self.floats[1] for _ in lists[1:])]

        def of_floats(*floats: Any) -> Any:
            rest = iter(floats)
            pairs = zip(lists, places, strict=True)
            return fn(*(next(rest) if i in at else x for xs, at in pairs for i, x in enumerate(xs)))

        return of_floats, [xs[i] for xs, at in zip(lists, places, strict=True) for i in at]

    def float_outs(self, *args: Any) -> list[Any]:
        """The floating-point results of the function."""
        outs = self.apply(*args)
        return [outs[i] for i in self.floats[1]]

    @functools.cached_property
    def dual(self) -> Combine:
        """The function on pairs: ``consts, their tangents, elems, their tangents``.

        The result has the same order as elements and their tangents.
        """
        consts, elems = self._consts, self._elems
        in_c, in_e = self.floats

        def fn(*args: object) -> list[Any]:
            # consts, their tangents, left, its tangents, right, its tangents
            parts = _cut(args, [len(consts), len(in_c)] + 2 * [len(elems), len(in_e)])
            dots = list(itertools.chain(*parts[1::2]))
            run, floats = self.of_floats(parts[0::2], self.apply)
            tangents, outs = jax.jvp(
                lambda *xs: (lambda outs: ([outs[i] for i in in_e], outs))(run(*xs)),
                *(floats, dots),
                has_aux=True,
            )[1:]
            return [*outs, *tangents]

        pairs = ([*consts, *(consts[i] for i in in_c)], [*elems, *(elems[i] for i in in_e)])
        return Combine(fn, *pairs, self.axis, self._dim)

    @functools.cached_property
    def pullback(self) -> Any:
        """The program ``(*consts, *left, *right, *cotangents) -> cotangents``.

        It returns those of constants, left and right elements. Only floating-point arrays have one.
        """
        cotangents = [self._elems[i] for i in self.floats[1]]
        sizes = [self.num_consts, len(self._elems), len(self._elems), len(cotangents)]

        def fn(*args: object) -> list[Any]:
            *lists, given = _cut(args, sizes)
            run, floats = self.of_floats(lists, self.float_outs)
            return list(jax.vjp(run, *floats)[1](given))

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

    Operands of the mode are none for primal, tangents for tangent, and cotangents for pullback.
    """
    return _cut(operands, [combine.num_consts, _num_elems(combine), len(operands)])


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, combine: Combine, mode: str
) -> tuple[list[Any], list[Any]]:
    outs = _bind(combine, mode, *primals)
    # Only floats have tangents: operands of the primitive hold none for other dtypes.
    floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in primals]
    dots = [ad.instantiate_zeros(t) if f else None for t, f in zip(tangents, floats, strict=True)]
    consts, elems, linear = operands_of(combine, primals)
    const_dots, elem_dots, linear_dots = operands_of(combine, dots)
    float_dots = combine.floats_of(const_dots, elem_dots)
    if mode == PRIMAL:
        given = iter(_bind(combine, TANGENT, *consts, *elems, *float_dots))
        at = combine.floats[1]
        return outs, [next(given) if i in at else _zero(x) for i, x in enumerate(outs)]
    if mode == PULLBACK:  # the tangent of a pullback is the first half of the pullback of pairs
        c, e = map(len, combine.floats)
        const_and_elem_dots = combine.split(float_dots, floats=True)
        found = _bind(
            combine.dual,
            PULLBACK,
            *(*consts, *const_and_elem_dots[0], *elems, *const_and_elem_dots[1]),
            *(*linear_dots, *linear),
        )
        return outs, [*found[:c], *found[2 * c : 2 * c + e]]
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


def _transpose(
    cotangents: Sequence[Any], *operands: object, combine: Combine, mode: str
) -> list[Any]:
    consts, elems, linear = operands_of(combine, operands)
    known = [*consts, *elems]
    given = [ad.instantiate_zeros(t) for t in cotangents]
    if mode == PRIMAL or any(map(ad.is_undefined_primal, known)):
        raise NotImplementedError(
            "associative_scan: the gradient of its gradient needs sizes that are known; "
            "jax.hessian, which is forward over reverse, does not"
        )
    # Tangent and pullback are each other's transpose.
    found = _bind(combine, PULLBACK if mode == TANGENT else TANGENT, *known, *given)
    wanted = [t if ad.is_undefined_primal(x) else None for t, x in zip(found, linear, strict=True)]
    return [None] * len(known) + wanted


# A batch axis is moved to the front of every element. Constants stay unbatched where they can.
def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, combine: Combine, mode: str
) -> tuple[list[Any], list[int]]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    consts, start = combine.num_consts, combine.num_consts + _num_elems(combine)
    is_batched = [d is not None or i >= consts for i, d in enumerate(dims)]
    # A constant and its tangent are batched alike. In a pullback each row has its own cotangent of
    # a constant, so constants with cotangents are batched.
    for k, i in enumerate(combine.floats[0]):
        if mode == TANGENT:
            is_batched[i] = is_batched[start + k] = is_batched[i] or dims[start + k] is not None
        is_batched[i] |= mode == PULLBACK
    front = [
        batching.bdim_at_front(x, d, size) if b else x
        for x, d, b in zip(operands, dims, is_batched, strict=True)
    ]
    outs = _bind(combine.batched(is_batched[:consts], size), mode, *front)
    return outs, [0] * len(outs)


ad.primitive_jvps[associative_scan_p] = _jvp
ad.primitive_transposes[associative_scan_p] = _transpose
batching.primitive_batchers[associative_scan_p] = _batch


# --- lowering, for exported programs: masked ones have a rule --------------------------------


def run(*operands: Any, combine: Combine, mode: str) -> list[Any]:
    """What an equation of an associative scan computes, at any size."""
    consts, elems, linear = operands_of(combine, operands)
    if mode == PRIMAL:
        return _by_distances(combine, consts, elems)
    if mode == TANGENT:
        const_dots, elem_dots = combine.split(linear, floats=True)
        both = [*consts, *const_dots], [*elems, *elem_dots]
        return _by_distances(combine.dual, *both)[len(elems) :]

    def scanned(*args: Any) -> list[Any]:
        outs = _one_by_one(combine, *combine.split(args))
        return [outs[i] for i in combine.floats[1]]

    of_floats, floats = combine.of_floats([consts, elems], scanned)
    return list(jax.vjp(of_floats, *floats)[1](linear))


def _by_distances(combine: Combine, consts: Sequence[Any], elems: Sequence[Any]) -> list[Any]:
    axis = combine.axis
    size = elems[0].shape[axis]
    positions = jnp.arange(size, dtype=jnp.int32)
    last = jnp.asarray(size, jnp.int32)

    def step(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        distance, right = state
        before = jnp.maximum(positions - distance, 0)
        left = [jnp.take(x, before, axis, mode="clip") for x in right]
        there = positions >= distance
        return 2 * distance, [
            jnp.where(lax.expand_dims(there, _others(x.ndim, axis)), new, x)
            for new, x in zip(combine.apply(*consts, *left, *right), right, strict=True)
        ]

    start = jnp.asarray(1, jnp.int32), list(elems)
    return list(lax.while_loop(lambda state: state[0] < last, step, start)[1])


def _others(rank: int, axis: int) -> list[int]:
    return [i for i in range(rank) if i != axis]


def _one_by_one(combine: Combine, consts: Sequence[Any], elems: Sequence[Any]) -> list[Any]:
    axis = combine.axis
    firsts = [lax.slice_in_dim(x, 0, 1, axis=axis) for x in elems]
    rows = [jnp.moveaxis(x, axis, 0) for x in elems]
    positions = jnp.arange(rows[0].shape[0], dtype=jnp.int32)

    def step(left: list[Any], given: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
        position, row = given
        right = [lax.expand_dims(x, (axis,)) for x in row]
        # A `cond`: nothing may be computed of a pair that the scan does not combine, as the
        # derivative of that may not be finite.
        made = lax.cond(
            position == 0,
            lambda left, right: right,
            lambda left, right: combine.apply(*consts, *left, *right),
            *(left, right),
        )
        return made, [lax.squeeze(x, (axis,)) for x in made]

    _, made = lax.scan(step, firsts, (positions, rows))
    return [jnp.moveaxis(x, 0, axis) for x in made]


lowered = lower_by(associative_scan_p, run)
