"""The function by which a scan combines, and how it is run over rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.errors import InconclusiveDimensionOperation

PRIMAL, TANGENT, PULLBACK = "primal", "tangent", "pullback"


class Combine:
    """The combining function as a program over any number of elements.

    Attributes:
        jaxpr: ``(*consts, *left, *right) -> out``, closed. Left, right and out have
            the size ``length`` along ``axis``.
        length: The name of the dimension variable of that size, which no other part of the program
            has; its value changes from step to step of the scan.
        axis: The scanned axis of each element.
        num_consts: How many arrays the function closes over.
        num_elems: How many arrays an element has.
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
        self.length, self.axis = str(length), axis
        self.num_consts, self.num_elems = len(consts), len(elems)
        self._dim = length
        self.apply: Callable[..., list[Any]] = lambda *args: list(fn(*args))
        self._consts = [struct_of(x) for x in consts]
        self._elems = [struct_of(x, axis, length) for x in elems]
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

    def operands(self, operands: Sequence[Any]) -> list[list[Any]]:
        """The operands of an equation in three lists: constants, elements, and those of the mode.

        Operands of the mode are none for primal, tangents for tangent, and cotangents for pullback.
        """
        return _cut(operands, [self.num_consts, self.num_elems, len(operands)])

    def floats_of(self, consts: Sequence[Any], elems: Sequence[Any]) -> list[Any]:
        """The floating-point arrays among constants and elements, in order."""
        return [*(consts[i] for i in self.floats[0]), *(elems[i] for i in self.floats[1])]

    def of_floats(self, lists: Sequence[Sequence[Any]], fn: Callable[..., Any]) -> Any:
        """A function of the floats in lists of constants and elements, and these floats.

        It puts them back into the lists, calls ``fn`` with all arrays, and returns what `fn` does.
        """
        places = [self.floats[0], *(self.floats[1] for _ in lists[1:])]

        def of_floats(*floats: Any) -> Any:
            rest = iter(floats)
            pairs = zip(lists, places, strict=True)
            return fn(*(next(rest) if i in ii else x for xs, ii in pairs for i, x in enumerate(xs)))

        return of_floats, [xs[i] for xs, ii in zip(lists, places, strict=True) for i in ii]

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
            *lists, dots = _cut(args, sizes)
            run, floats = self.of_floats(lists, self.float_outs)
            return list(jax.vjp(run, *floats)[1](dots))

        return self._trace(fn, self._consts + 2 * self._elems + cotangents)

    def batched(self, const_batched: Sequence[bool], size: object) -> Combine:
        """The function with a leading batch axis on all elements and on some constants."""
        axes = [0 if b else None for b in const_batched] + 2 * len(self._elems) * [0]
        fn = jax.vmap(lambda *args: self.apply(*args), in_axes=axes)
        pairs = zip(self._consts, const_batched, strict=True)
        consts = [struct_of(x, shape=(size, *x.shape)) if b else x for x, b in pairs]
        elems = [struct_of(x, shape=(size, *x.shape)) for x in self._elems]
        return Combine(fn, consts, elems, self.axis + 1, self._dim)


def struct_of(x: Any, axis: int | None = None, size: Any = None, shape: Any = None) -> Any:
    shape = tuple(x.shape) if shape is None else shape
    if axis is not None:
        shape = (*shape[:axis], size, *shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _cut(items: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    rest = iter(items)
    return [list(itertools.islice(rest, n)) for n in sizes]


def run(*operands: Any, combine: Combine, mode: str) -> list[Any]:
    """What an equation of an associative scan computes, at any size."""
    consts, elems, linear = combine.operands(operands)
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
            jnp.where(lax.expand_dims(there, [i for i in range(x.ndim) if i != axis]), new, x)
            for new, x in zip(combine.apply(*consts, *left, *right), right, strict=True)
        ]

    start = jnp.asarray(1, jnp.int32), list(elems)
    return list(lax.while_loop(lambda state: state[0] < last, step, start)[1])


def _one_by_one(combine: Combine, consts: Sequence[Any], elems: Sequence[Any]) -> list[Any]:
    axis = combine.axis
    firsts = [lax.slice_in_dim(x, 0, 1, axis=axis) for x in elems]
    rows = [jnp.moveaxis(x, axis, 0) for x in elems]
    positions = jnp.arange(rows[0].shape[0], dtype=jnp.int32)

    def step(left: list[Any], turn: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
        position, row = turn
        right = [lax.expand_dims(x, (axis,)) for x in row]
        # A `cond`: nothing may be computed of a pair that the scan does not combine, as the
        # derivative of that may not be finite.
        combined = lax.cond(
            position == 0,
            lambda left, right: right,
            lambda left, right: combine.apply(*consts, *left, *right),
            *(left, right),
        )
        return combined, [lax.squeeze(x, (axis,)) for x in combined]

    _, outs = lax.scan(step, firsts, (positions, rows))
    return [jnp.moveaxis(x, 0, axis) for x in outs]
