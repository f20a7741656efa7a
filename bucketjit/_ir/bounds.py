"""Bounds of a size expression over all sizes of a bucket.

`bucket_sizes` takes padded sizes from here: the padded size of ``n // 2 + 1`` is its largest value
for ``n`` up to the bucket.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from bucketjit._ir.expressions import FUNCTIONS, compiled, evaluate_text, parsed, variables_of

_LATTICE_LIMIT = 1 << 20  # points of a box that are evaluated one by one for an exact bound

_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
}

Range = tuple[int, int]  # smallest and largest value, both included


def interval(node: ast.expr, lo: Mapping[str, int], hi: Mapping[str, int]) -> Range:
    """Bounds of an expression by interval arithmetic: always sound, not always tight."""

    def corners(op: Callable[[int, int], int], a: Range, b: Range) -> Range:
        values = [op(x, y) for x in a for y in b]
        return min(values), max(values)

    match node:
        case ast.Constant(value=int() as value):
            return value, value
        case ast.Name(id=name):
            return lo[name], hi[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            a, b = interval(operand, lo, hi)
            return -b, -a
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            x, y = interval(left, lo, hi), interval(right, lo, hi)
            low, high = corners(_OPERATORS[type(op)], x, y)
            # An even power of an interval around 0 is 0 inside, not in a corner.
            is_around_zero = isinstance(op, ast.Pow) and x[0] < 0
            return (min(low, 0) if is_around_zero else low), high
        case ast.Call(func=ast.Name(id=name), args=[left, right]):
            x, y = interval(left, lo, hi), interval(right, lo, hi)
            if name in ("max", "min"):
                return corners(FUNCTIONS["int"][name], x, y)
            if name == "floordiv":  # a divisor other than 0 never makes a number larger
                largest = max(map(abs, x))
                return corners(operator.floordiv, x, y) if y[0] > 0 else (-largest, largest)
            if name == "mod":  # the result has the sign of the divisor, and is nearer to 0
                most = max(0, y[1] - 1)
                return min(0, y[0] + 1), min(most, x[1]) if x[0] >= 0 < y[0] else most
    raise ValueError(f"cannot bound {ast.unparse(node)}")


def upper_bound_text(text: str, lo: Mapping[str, int], hi: Mapping[str, int]) -> int:
    """The largest value of an expression while every variable ``v`` is in ``lo[v]..hi[v]``.

    Exact where the expression grows with its variables or the box has at most 2**20 points;
    otherwise an upper bound from interval arithmetic.
    """
    return _upper_bound(text, tuple((v, lo[v], hi[v]) for v in variables_of(text)))


@functools.lru_cache(maxsize=16384)
def _upper_bound(text: str, box: tuple[tuple[str, int, int], ...]) -> int:
    node = parsed(text)
    lo, hi = {v: low for v, low, _ in box}, {v: h for v, _, h in box}
    most = max(0, interval(node, lo, hi)[1])
    with contextlib.suppress(ZeroDivisionError):  # a divisor may be 0 at sizes that do not occur
        if evaluate_text(text, hi) == most:  # it is reached, in the corner of the largest sizes
            return most
    if math.prod(h - low + 1 for _, low, h in box) <= _LATTICE_LIMIT:
        # Python's ints, in object arrays, where an intermediate value would overflow int64.
        widest = max(map(abs, reach(node, hi)))
        exact = np.int64 if widest <= MOST_OF_INT64 else object
        axes = [np.arange(low, h + 1, dtype=exact) for _, low, h in box]
        grid = np.meshgrid(*axes, indexing="ij", sparse=True)
        with np.errstate(divide="ignore"):
            return max(0, int(np.max(compiled(text, "array")(*grid))))
    return most


@functools.lru_cache(maxsize=16384)
def lower_bound(text: str, box: tuple[tuple[str, int, int], ...]) -> int:
    """A lower bound of an expression.

    Interval arithmetic gives the bound. Only if it is below int32, where the exact value matters,
    it is the upper bound of the negated expression.
    """
    least = interval(parsed(text), {v: low for v, low, _ in box}, {v: h for v, _, h in box})[0]
    return least if least >= -MOST else -_upper_bound(f"-({text})", box)


MOST, MOST_OF_INT64 = 2**31 - 1, 2**63 - 1  # the largest int32 and int64


def reach(node: ast.expr, hi: Mapping[str, int]) -> Range:
    """Bounds of an expression and all its parts, for sizes from 0 on."""
    lo = dict.fromkeys(hi, 0)
    bounds = [
        interval(part, lo, hi)
        for part in ast.walk(node)
        if isinstance(part, ast.expr) and getattr(part, "id", None) not in FUNCTIONS["int"]
    ]
    return min(low for low, _ in bounds), max(high for _, high in bounds)


# --- order --------------------------------------------------------------------------------------

# Which sizes are never negative, and how large they are: answers that ask JAX nothing.
#
# A comparison that JAX cannot decide raises, and a trace takes that for a question of the user.
# Here an expression is a polynomial over its variables and over the calls in it, so nothing is
# raised:
#
#     n - floordiv(2*n, 3)     3*n - 2*n >= 0, as 3*floordiv(2*n, 3) <= 2*n

#: A size is taken to be at most this where a multiple of it might not fit an integer type.
LARGE = 1 << 24

_ANY_SIZE = 1 << 40  # stands for the largest size
_DEEPEST = 12  # calls and variables that are replaced, one after the other

# The coefficient of each product of atoms. An atom is a variable or the text of a call.
_Polynomial = dict[tuple[str, ...], int]


@functools.lru_cache(maxsize=4096)
def is_never_negative(text: str, most_of: tuple[tuple[str, str], ...] = ()) -> bool:
    """Whether an expression is at least 0 for all sizes from 1 on; False if that is not known."""
    try:
        return _holds(_polynomial(parsed(text)), most_of, _DEEPEST)
    except ValueError:
        return False


@functools.lru_cache(maxsize=4096)
def magnitude(text: str) -> float:
    """How far from 0 an expression is if its sizes, and their products, are at most 2**24.

    A product of sizes counts as one: it is the size of an array.
    """
    try:
        return _magnitude(_polynomial(parsed(text)))
    except ValueError:
        return float("inf")


def _magnitude(polynomial: _Polynomial) -> float:
    return sum(abs(c) * max(map(_of_atom, atoms), default=1) for atoms, c in polynomial.items())


def _of_atom(atom: str) -> float:
    if atom.isidentifier():
        return LARGE
    name, left, right = _call(atom)
    sizes = _magnitude(left), _magnitude(right)
    if name == "floordiv":
        return sizes[0] / max(1, _number(right) or 1)
    return sizes[1] if name == "mod" else {"min": min, "max": max}[name](sizes)


# --- polynomials ---------------------------------------------------------------------------------


def _polynomial(node: ast.expr) -> _Polynomial:
    match node:
        case ast.Constant(value=int() as value):
            return {(): value} if value else {}
        case ast.Name(id=name):
            return {(name,): 1}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _product(_polynomial(operand), {(): -1})
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _sum(_polynomial(left), _polynomial(right))
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _sum(_polynomial(left), _product(_polynomial(right), {(): -1}))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _product(_polynomial(left), _polynomial(right))
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as power)):
            return functools.reduce(_product, [_polynomial(left)] * power, {(): 1})
        case ast.Call(func=ast.Name(id="floordiv" | "mod" | "max" | "min" as name), args=args):
            return {(f"{name}({', '.join(_text(_polynomial(x)) for x in args)})",): 1}
    raise ValueError(f"no polynomial: {ast.unparse(node)}")


def _text(polynomial: _Polynomial) -> str:
    terms = ["*".join([f"({c})", *atoms]) for atoms, c in sorted(polynomial.items())]
    return " + ".join(terms) or "0"


def _call(atom: str) -> tuple[str, _Polynomial, _Polynomial]:
    node = parsed(atom)
    assert isinstance(node, ast.Call)
    left, right = map(_polynomial, node.args)
    return ast.unparse(node.func), left, right


def _number(polynomial: _Polynomial) -> int | None:
    """The value of a constant polynomial; None for any other one."""
    return polynomial.get((), 0) if not polynomial.keys() - {()} else None


def _sum(*polynomials: _Polynomial) -> _Polynomial:
    total: Counter[tuple[str, ...]] = Counter()
    for polynomial in polynomials:
        total.update(polynomial)
    return {atoms: c for atoms, c in total.items() if c}


def _product(left: _Polynomial, right: _Polynomial) -> _Polynomial:
    return _sum(*({(*sorted((*a, *b)),): c * d} for a, c in left.items() for b, d in right.items()))


# --- the proof: atoms are replaced by their bounds, calls first ----------------------------------


def _holds(polynomial: _Polynomial, most_of: tuple[tuple[str, str], ...], steps: int) -> bool:
    if _is_plainly_natural(polynomial):
        return True
    if not steps:
        return False
    atoms = {atom for atoms in polynomial for atom in atoms}
    calls = sorted((x for x in atoms if not x.isidentifier()), key=len, reverse=True)
    bounded = [v for v, _ in reversed(most_of) if v in atoms]
    for atom in (*calls, *bounded):
        if any(atoms.count(atom) > 1 for atoms in polynomial):  # it is not linear
            continue
        factor = {tuple(a for a in k if a != atom): c for k, c in polynomial.items() if atom in k}
        rest = {k: c for k, c in polynomial.items() if atom not in k}
        for sign in (1, -1):
            if _holds(_product(factor, {(): sign}), most_of, steps - 1):
                cases = _cases(atom, factor, rest, sign, most_of)
                return any(all(_holds(x, most_of, steps - 1) for x in case) for case in cases)
    return False


def _cases(
    atom: str,
    factor: _Polynomial,
    rest: _Polynomial,
    sign: int,
    most_of: tuple[tuple[str, str], ...],
) -> Iterator[list[_Polynomial]]:
    """Lists of polynomials. If all of one list are natural, so is ``factor*atom + rest``."""

    def with_bound(bound: _Polynomial, divisor: int = 1) -> _Polynomial:
        # A whole number is natural if `divisor` times it is more than ``-divisor``.
        return _sum(_product(rest, {(): divisor}), _product(factor, bound), {(): divisor - 1})

    if atom.isidentifier():
        yield [with_bound({(): 1} if sign > 0 else _polynomial(parsed(dict(most_of)[atom])))]
        return
    name, left, right = _call(atom)
    if name in ("min", "max"):
        both = [with_bound(left), with_bound(right)]
        yield from [[x] for x in both] if (name == "max") == (sign > 0) else [both]
        return
    by = _number(right)
    if by is None or by < 1:
        return
    if name == "mod":
        yield [with_bound({} if sign > 0 else {(): by - 1})]
        if sign < 0:
            yield [with_bound(left), left]
    elif sign > 0:
        yield [rest, left]
        yield [with_bound(_sum(left, {(): 1 - by}), by)]
    else:
        yield [with_bound(left, by)]


def _is_plainly_natural(polynomial: _Polynomial) -> bool:
    """Whether no term is negative after ``v = 1 + w``, or interval arithmetic says so."""
    if all(atom.isidentifier() for atoms in polynomial for atom in atoms):
        shifted = _Polynomial()
        for atoms, c in polynomial.items():
            factors: list[_Polynomial] = [{(v,): 1, (): 1} for v in atoms]
            shifted = _sum(shifted, functools.reduce(_product, factors, {(): c}))
        if all(c >= 0 for c in shifted.values()):
            return True
    node = parsed(_text(polynomial))
    names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
    try:
        return interval(node, dict.fromkeys(names, 1), dict.fromkeys(names, _ANY_SIZE))[0] >= 0
    except (ValueError, KeyError):
        return False
