"""What a signature knows of calls of some shapes: their sizes and the program that serves them.

The sizes are those that bind the dimension variables to the axes of the arguments.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import export

from bucketjit._ir.dynamic_axes import STATIC, Tokens, places_of
from bucketjit._ir.expressions import evaluate_text, solve, variables_of
from bucketjit._ir.guards import fixed_by, parse_constraint
from bucketjit._ir.interface import NO_SIZE_CONSTANTS, Interface, SizeConstants
from bucketjit._ir.program import Program, TraceRefused
from bucketjit.errors import ArgumentError, SizeMismatchError


@dataclass(frozen=True)
class Resolution:
    """The sizes of calls, and the program that serves them.

    Attributes:
        tokens: A token per axis of each leaf.
        sizes: Logical size of each dimension variable.
        program: The program, or None if the call must run exact.
        refusal: Why the function was not traced; None if there is a program, or if nothing was
            tried (an empty array, no open axis).
        size_constants: What the program needs besides the sizes.
    """

    tokens: Tokens
    sizes: dict[str, int]
    program: Interface | None
    refusal: TraceRefused | None = None
    size_constants: SizeConstants = NO_SIZE_CONSTANTS

    @functools.cached_property
    def variables(self) -> tuple[str, ...]:
        """The dimension variables, with the unfitted sizes of the program at the end."""
        unfitted = () if self.program is None else self.program.unfitted
        return (*variables_in(self.tokens), *unfitted)

    @property
    def out_tree(self) -> Any:
        """The tree of the outputs. The call must have a program."""
        assert self.program is not None
        tree = self.size_constants.out_tree
        return self.program.out_tree if tree is None else tree

    @functools.cached_property
    def ordered(self) -> tuple[int, ...]:
        """The logical size of each of `variables`."""
        sizes = map(self.sizes.__getitem__, variables_in(self.tokens))
        return (*sizes, *self.size_constants.sizes)


UNRESOLVED = Resolution((), {}, None)


@functools.lru_cache(maxsize=1024)
def variables_in(tokens: Tokens) -> tuple[str, ...]:
    """The dimension variables of axes, in order of first appearance."""
    opened = places_of(tokens).opened
    return tuple(dict.fromkeys(v for place in opened for v in variables_of(place.token)))


def open_shapes(
    tokens: Sequence[Sequence[str]], shapes: Sequence[Sequence[int]]
) -> tuple[tuple[int | str, ...], ...]:
    """Shapes with variables and expressions in the place of the sizes of open axes."""

    def axis(token: str, size: int) -> int | str:
        return size if token == STATIC or token.isdigit() else token

    return tuple(tuple(map(axis, *pair)) for pair in zip(tokens, shapes, strict=True))


def check_declared(token: str, size: int, where: str) -> None:
    """Raise if an axis that was declared with a number has another size."""
    if int(token) != size:
        raise ArgumentError(f"{where} has size {size}, declared {token} in dynamic_axes")


@functools.lru_cache(maxsize=1024)
def without_empty(tokens: Tokens, empty: frozenset[str]) -> Tokens:
    """The tokens of a call in which some variables are 0: their axes are no longer open."""
    return tuple(tuple(_at_zero(token, empty) for token in row) for row in tokens)


def _at_zero(token: str, empty: frozenset[str]) -> str:
    if token == STATIC or empty.isdisjoint(variables := variables_of(token)):
        return token
    if empty.issuperset(variables):
        return str(evaluate_text(token, dict.fromkeys(variables, 0)))
    rest = re.sub(r"[^\W\d]\w*", lambda name: "0" if name[0] in empty else name[0], token)
    return str(export.symbolic_shape(rest)[0])


def bind_sizes(
    tokens: Tokens, shapes: Sequence[Sequence[int]], paths: Sequence[str]
) -> dict[str, int]:
    """The size of each dimension variable in a call."""
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    expressions: list[tuple[str, int, str]] = []
    for leaf, axis, token in places_of(tokens).opened:
        size, where = shapes[leaf][axis], f"axis {axis} of {paths[leaf]}"
        if token.isdigit():
            check_declared(token, size, where)
        elif token.isidentifier():
            if sizes.setdefault(token, size) != size:
                raise SizeMismatchError(
                    f"dimension {token!r} is {sizes[token]} at {origin[token]} and {size} at "
                    f"{where}; one name means one size: give the axes names of their own, or pass "
                    "arrays of one size"
                )
            origin.setdefault(token, where)
        else:
            expressions.append((token, size, where))
    _bind_expressions(expressions, sizes, origin)
    return sizes


def _bind_expressions(
    expressions: list[tuple[str, int, str]], sizes: dict[str, int], origin: dict[str, str]
) -> None:
    """Solve expressions for their unknown variables, then check that each one gives its size."""
    # One expression may need a variable that another one gives, so each round may solve one more.
    for _ in expressions:
        for token, size, where in expressions:
            for name, value in solve(token, size, sizes).items():
                sizes[name], origin[name] = value, where
    for token, size, where in expressions:
        missing = [v for v in variables_of(token) if v not in sizes]
        if missing:
            raise ArgumentError(
                f"{where} has size {size}, declared {token!r}: no whole size of "
                f"{', '.join(missing)} gives that"
            )
        if evaluate_text(token, sizes) != size:
            origins = ", ".join(f"{v} = {sizes[v]} at {origin[v]}" for v in variables_of(token))
            value = evaluate_text(token, sizes)
            raise SizeMismatchError(
                f"{where} has size {size}, but {token!r} is {value} with {origins}"
            )


# --- fixed sizes ---

# Programs that serve one size of an axis, because the function uses the size itself.
#
# {512: a}.get(n)        at n = 300 a guard n == 300, at 301 another program: told as a fallback
# if n == 1: ...         a program for n == 1, and one for all other sizes: nothing is told


_OTHERS = (3, 0), (4, 1)  # the sizes that a trace is tried at, each by a factor and a number

_REMEDY = (
    "compare sizes, compute on them with jax.numpy, do not use them as keys; or leave that axis "
    "static"
)


Again = Callable[[Mapping[str, int]], Resolution]


def refusing_one_size(
    call: Resolution,
    constraints: Sequence[str],
    fn: Any,
    programs: Sequence[Interface],
    run: Callable[[dict[str, int]], object],
    again: Again,
) -> Resolution:
    """A call whose program serves one size, with the reason if other sizes have such programs.

    ``run`` traces as the exact run does; a function that keeps what it makes by size fails there
    (``table[n] = jnp.arange(n)``), so its program serves. ``again`` resolves the call at other
    sizes. It is not asked if one of the programs has such a reason: a trace of each is dear enough.
    """
    program, sizes = call.program, call.sizes
    if not isinstance(program, Program) or program.computed or program.pairing:
        return call
    users = fixed_by(map(parse_constraint, constraints), sizes)
    users |= {v for v, n in sizes.items() if n == 1}  # which broadcasts, in a program of its own
    if not sizes.keys() - users or fixed_by(program.guards, sizes) < sizes.keys():
        return call
    from bucketjit._tracing.concrete import at_other_sizes

    if at_other_sizes(functools.partial(run, sizes)) is None:
        return call
    for factor, more in () if any(p.refusal for p in programs) else _OTHERS:
        ordered = enumerate(sorted(sizes.items()), more)  # no two that are equal stay so
        larger = {v: n if v in users else factor * n + i for i, (v, n) in ordered}
        at_larger = at_other_sizes(functools.partial(again, larger))
        program_there = at_larger and at_larger.program
        if program_there and fixed_by(program_there.guards, larger) < sizes.keys():
            return call
    line = next(filter(None, map(program.places.get, reversed(program.guards))), "")
    names = ", ".join(sorted(sizes))
    why = TraceRefused(f"each size of {names} has a program of its own{line}", _REMEDY)
    return replace(call, program=replace(program, refusal=why.placed(fn)))
