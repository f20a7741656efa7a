"""Size expressions: parse, evaluate and solve the symbolic sizes of a traced program.

A *dimension* is an ``int`` or a symbolic expression of ``jax.export`` (``2*b + 1``). The text of an
expression is compiled once to a Python function. An evaluation then takes about 0.1 us (JAX's own
takes 14 us). `bounds` has the bounds of expressions; `fit` finds an expression from values.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from bucketjit._jax.number_hooks import Size

Dim = Any  # int, or a symbolic dimension of jax.export

Shape = tuple[Dim, ...]


def is_symbolic(dim: Any) -> bool:
    """True for a symbolic size, False for an int."""
    return type(dim) is not int and isinstance(dim, Size)


def symbolic_axes(shape: Iterable[Dim]) -> tuple[int, ...]:
    """The axes of ``shape`` whose size is symbolic."""
    return tuple(i for i, d in enumerate(shape) if is_symbolic(d))


# The functions that the text of an expression may call, by kind of the sizes: Python ints, NumPy
# arrays, or scalars that are known at run time.
_OF_ALL: dict[str, Callable[..., Any]] = {"floordiv": operator.floordiv, "mod": operator.mod}
FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "int": {**_OF_ALL, "max": max, "min": min},
    "array": {**_OF_ALL, "max": np.maximum, "min": np.minimum},
    "traced": {**_OF_ALL, "max": jnp.maximum, "min": jnp.minimum},
}


@functools.lru_cache(maxsize=4096)
def parsed(text: str) -> ast.expr:
    """The syntax tree of the text of a size expression; it is shared, so it must not be changed."""
    return ast.parse(text.replace("^", "**"), mode="eval").body


@functools.lru_cache(maxsize=4096)
def variables_of(text: str) -> tuple[str, ...]:
    """Names of the dimension variables in the text of an expression, sorted."""
    nodes = list(ast.walk(parsed(text)))
    names = {n.id for n in nodes if isinstance(n, ast.Name)}
    return tuple(sorted(names - FUNCTIONS["int"].keys()))


@functools.lru_cache(maxsize=4096)
def compiled(text: str, kind: str) -> Callable[..., Any]:
    """A function that computes an expression from its variables; cached."""
    code = f"lambda {', '.join(variables_of(text))}: {ast.unparse(parsed(text))}"
    # By the name of the module, hooks on sizes know that this is no code of users.
    names = {"__name__": __name__, **FUNCTIONS[kind]}
    return eval(compile(code, f"<dimension {text}>", "eval"), names)  # noqa: S307


def split_at_commas(text: str) -> list[str]:
    """The parts of a text between its commas, without those inside of parentheses.

    >>> split_at_commas("max(b, 4), s - 1")
    ['max(b, 4)', 's - 1']
    """
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def variables_in(sizes: Iterable[Any]) -> set[str]:
    """The variables of sizes, such as those of a shape."""
    return {v for d in sizes if is_symbolic(d) for v in variables_of(str(d))}


def evaluate(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The value of a dimension at these sizes, all Python ints."""
    return dim if isinstance(dim, int) else evaluate_text(str(dim), sizes)


def evaluate_text(text: str, sizes: Mapping[str, int]) -> int:
    """The value of the text of an expression."""
    return compiled(text, "int")(*(sizes[v] for v in variables_of(text)))


def shape_function(shape: Shape, variables: Sequence[str]) -> Callable[..., tuple[int, ...]]:
    """A function of the variables, in this order, that returns a whole shape in one call."""
    parts = [str(d).replace("^", "**") for d in shape]
    code = f"lambda {', '.join(variables)}: ({''.join(p + ', ' for p in parts)})"
    return eval(compile(code, f"<shape {shape}>", "eval"), dict(FUNCTIONS["int"]))  # noqa: S307


def solve(text: str, value: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Find the one unknown variable of an expression that is linear in it."""
    unknown = [v for v in variables_of(text) if v not in sizes]
    if len(unknown) != 1:
        return {}
    # Only three values are compared. The size of an expression that bends later may be wrong, so
    # the caller evaluates the expression at it.
    first, second, third = (evaluate_text(text, {**sizes, unknown[0]: n}) for n in (0, 1, 2))
    slope = second - first
    if slope == 0 or third - second != slope or (value - first) % slope:
        return {}
    size = (value - first) // slope
    return {unknown[0]: size} if size >= 0 else {}


def bind_unique_names(wanted: str, taken: Iterable[str]) -> str:
    """The name ``wanted``, or the first free one of ``wanted_1``, ``wanted_2``, ..."""
    used, numbered = set(taken), (f"{wanted}_{i}" for i in itertools.count(1))
    return next(name for name in itertools.chain([wanted], numbered) if name not in used)


# --- reshape groups -----------------------------------------------------------------------------

# Cut the two shapes of a reshape into groups of axes with equal products.
#
#     before   (b, s, 12) -> (b*s, 3, 4)
#     after    (b, s) -> (b*s,)   and   (12,) -> (3, 4)
#
# Masking rules and the tracing of merged axes treat each group alone.

Group = tuple[Shape, Shape]


def groups(before: Shape, after: Shape) -> list[Group]:
    """Cut two shapes without axes of size 1 into the smallest groups with equal products.

    Products such as those of ``(s,) -> (s // 2, 2)`` are equal at some sizes only. Groups are then
    matched from the front and from the back, and the middle is one group.
    """
    front = _matching(before, after)
    i, j = (sum(len(g[k]) for g in front) for k in (0, 1))
    before, after = before[i:], after[j:]
    back = [(b[::-1], a[::-1]) for b, a in _matching(before[::-1], after[::-1])]
    i, j = (sum(len(g[k]) for g in back) for k in (0, 1))
    middle = (before[: len(before) - i], after[: len(after) - j])
    return [*front, *([middle] if middle != ((), ()) else []), *back[::-1]]


def without_ones(shape: Shape) -> Shape:
    """A shape without its axes of size 1."""
    return tuple(d for d in shape if is_symbolic(d) or d != 1)


def _matching(before: Shape, after: Shape) -> list[Group]:
    """The groups with equal products, from the front up to the first axes without one."""
    matching: list[Group] = []
    while end := _first_end(before, after):
        matching.append((before[: end[0]], after[: end[1]]))
        before, after = before[end[0] :], after[end[1] :]
    return matching


def _first_end(before: Shape, after: Shape) -> tuple[int, int] | None:
    """The fewest axes of each shape, from the front, with equal products; None if none have."""
    if before and after and before[0] == after[0]:
        return 1, 1
    left, right = (list(itertools.accumulate(s, operator.mul)) for s in (before, after))
    # By number of axes on both sides together.
    ends = sorted(itertools.product(range(len(left)), range(len(right))), key=sum)
    return next(((i + 1, j + 1) for i, j in ends if left[i] == right[j]), None)


# --- fit ---

# Fit an expression of sizes to its values at some sizes, and a bucket to the sizes of a call.
#
# The expression is a guess. Its user compares its value with the right one at every size that it is
# used for, so a wrong guess costs another program, never a wrong result.


_DIVISORS = range(2, 9)  # of ``floordiv(n, k)`` and ``mod(n, k)`` that are tried

Samples = Sequence[Mapping[str, int]]


def fit(values: Sequence[int], samples: Samples) -> int | str | None:
    """The simplest expression with these values."""
    if len(set(values)) == 1:
        return values[0]
    for text in _candidates(values, samples):
        if all(evaluate_text(text, s) == v for s, v in zip(samples, values, strict=True)):
            return text
    return None


def _candidates(values: Sequence[int], samples: Samples) -> Iterator[str]:
    """Expressions to try, simpler ones first: each has the right value at two or three samples."""
    names = sorted(samples[0])
    terms = [
        *names,
        *(f"{a}*{b}" for a, b in itertools.combinations_with_replacement(names, 2)),
        *("*".join(three) for three in itertools.combinations(names, 3)),
    ]
    for count in (1, 2):
        for some in itertools.combinations(terms, count):
            yield from _through(some, values, samples)
    for name in names:
        for k in _DIVISORS:
            for shift in range(k):
                whole = f"floordiv({name} + {shift}, {k})" if shift else f"floordiv({name}, {k})"
                yield from _through([whole], values, samples)
            yield from _through([f"mod({name}, {k})"], values, samples)


def _through(terms: Sequence[str], values: Sequence[int], samples: Samples) -> Iterator[str]:
    """``a*one + b*two + c`` through the first samples that determine it, if all are whole."""
    columns = [[evaluate_text(term, s) for s in samples] for term in terms]
    for first, *others in itertools.combinations(range(len(samples)), len(terms) + 1):
        rows = [[column[i] - column[first] for column in columns] for i in others]
        changes = [values[i] - values[first] for i in others]
        if determinant := _determinant(rows):
            factors = []
            for k in range(len(terms)):  # Cramer's rule, in whole numbers
                pairs = zip(rows, changes, strict=True)
                replaced = [[*row[:k], change, *row[k + 1 :]] for row, change in pairs]
                factors.append(divmod(_determinant(replaced), determinant))
            if all(factor and not rest for factor, rest in factors):
                whole = [(a, term) for (a, _), term in zip(factors, terms, strict=True)]
                parts = (a * column[first] for (a, _), column in zip(factors, columns, strict=True))
                yield _written(whole, values[first] - sum(parts))
            return


def _determinant(rows: Sequence[Sequence[int]]) -> int:
    if len(rows) == 1:
        return rows[0][0]
    (a, b), (c, d) = rows
    return a * d - b * c


def _written(terms: Sequence[tuple[int, str]], constant: int) -> str:
    text = " + ".join(t if a == 1 else f"{a}*{t}" for a, t in terms)
    if constant:
        text += f" {'+' if constant > 0 else '-'} {abs(constant)}"
    return text


# --- holding ------------------------------------------------------------------------------------

# Which buckets hold the sizes of a call, and which of these is the smallest.

B = TypeVar("B", bound=Mapping[str, int])


def holds(bucket: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
    """Whether a bucket is at least as large as a call along every variable of the call."""
    return all(bucket[v] >= n for v, n in sizes.items())


def smallest_holding(buckets: Iterable[B], sizes: Mapping[str, int]) -> B | None:
    """The bucket with the smallest product of its sizes, among those that hold a call."""
    fitting = (bucket for bucket in buckets if holds(bucket, sizes))
    return min(fitting, key=lambda bucket: math.prod(bucket.values()), default=None)
