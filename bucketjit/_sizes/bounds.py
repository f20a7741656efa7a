"""Bounds of a size expression over all sizes of a bucket.

`bucket_sizes` takes padded sizes from here: the padded size of ``n // 2 + 1`` is its largest value
for ``n`` up to the bucket.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Mapping

import numpy as np

from bucketjit._sizes.expressions import (
    FUNCTIONS,
    Dim,
    compiled,
    evaluate_text,
    parsed,
    variables_of,
)


def _never_decreases(node: ast.expr) -> bool:
    """True if the expression is >= 0 and decreases with no variable, all of them being >= 0."""
    match node:
        case ast.Constant(value=int() as value):
            return value >= 0
        case ast.Name():
            return True
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult(), right=right):
            return _never_decreases(left) and _never_decreases(right)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant()):
            return _never_decreases(left)
        case ast.Call(func=ast.Name(id="floordiv"), args=[left, ast.Constant(value=int() as k)]):
            return k > 0 and _never_decreases(left)
        case ast.Call(func=ast.Name(id="max" | "min"), args=args):
            return all(map(_never_decreases, args))
    return False


def _grows(node: ast.expr) -> bool:
    """Like `_never_decreases`, but the expression may be negative, as ``b - 1`` is at 0."""
    match node:
        case ast.BinOp(left=left, op=ast.Sub(), right=ast.Constant()):
            return _grows(left)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _grows(left) and _grows(right)
        case ast.Call(func=ast.Name(id="floordiv"), args=[left, ast.Constant(value=int() as k)]):
            return k > 0 and _grows(left)
        case ast.Call(func=ast.Name(id="max" | "min"), args=args):
            return all(map(_grows, args))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()) | ast.Constant():
            return True
    return _never_decreases(node)


_LATTICE_LIMIT = 1 << 20  # points of a box that are evaluated one by one for an exact bound

Range = tuple[int, int]  # smallest and largest value, both included


def interval(node: ast.expr, lo: Mapping[str, int], hi: Mapping[str, int]) -> Range:
    """Bounds of an expression by interval arithmetic: always sound, not always tight."""

    def corners(
        op: Callable[[int, int], int], a: tuple[int, int], b: tuple[int, int]
    ) -> tuple[int, int]:
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
        case ast.BinOp(left=left, op=op, right=right):
            x, y = interval(left, lo, hi), interval(right, lo, hi)
            if isinstance(op, ast.Add):
                return x[0] + y[0], x[1] + y[1]
            if isinstance(op, ast.Sub):
                return x[0] - y[1], x[1] - y[0]
            if isinstance(op, ast.Mult):
                return corners(lambda a, b: a * b, x, y)
            if isinstance(op, ast.Pow):
                # An even power of an interval around 0 is 0 inside, not in a corner.
                low, high = corners(lambda a, b: a**b, x, y)
                return (min(low, 0) if x[0] < 0 else low), high
        case ast.Call(func=ast.Name(id=name), args=[left, right]):
            x, y = interval(left, lo, hi), interval(right, lo, hi)
            if name == "max":
                return max(x[0], y[0]), max(x[1], y[1])
            if name == "min":
                return min(x[0], y[0]), min(x[1], y[1])
            if name == "floordiv":  # a divisor other than 0 never makes a number larger
                largest = max(map(abs, x))
                return corners(lambda a, b: a // b, x, y) if y[0] > 0 else (-largest, largest)
            if name == "mod":  # the result has the sign of the divisor, and is nearer to 0
                most = max(0, y[1] - 1)
                return min(0, y[0] + 1), min(most, x[1]) if x[0] >= 0 < y[0] else most
    raise ValueError(f"cannot bound {ast.unparse(node)}")


def upper_bound(dim: Dim, lo: Mapping[str, int], hi: Mapping[str, int]) -> int:
    """The largest value of ``dim`` while every variable ``v`` is in ``lo[v]..hi[v]``.

    Exact where the expression grows with its variables or the box has at most 2**20 points;
    otherwise an upper bound from interval arithmetic.
    """
    return dim if isinstance(dim, int) else upper_bound_text(str(dim), lo, hi)


def upper_bound_text(text: str, lo: Mapping[str, int], hi: Mapping[str, int]) -> int:
    """`upper_bound` of the text of an expression."""
    return _upper_bound(text, tuple((v, lo[v], hi[v]) for v in variables_of(text)))


@functools.lru_cache(maxsize=16384)
def _upper_bound(text: str, box: tuple[tuple[str, int, int], ...]) -> int:
    node = parsed(text)
    hi = {v: h for v, _, h in box}
    if _grows(node):  # the largest value is in the corner of the largest sizes
        return max(0, evaluate_text(text, hi))
    if math.prod(h - low + 1 for _, low, h in box) <= _LATTICE_LIMIT:
        # Python's ints, in object arrays, where an intermediate value would overflow int64.
        widest = max(map(abs, reach(node, hi)))
        exact = np.int64 if widest <= MOST_OF_INT64 else object
        axes = [np.arange(low, h + 1, dtype=exact) for _, low, h in box]
        grid = np.meshgrid(*axes, indexing="ij", sparse=True)
        with np.errstate(divide="ignore"):
            return max(0, int(np.max(compiled(text, "array")(*grid))))
    return max(0, interval(node, {v: low for v, low, _ in box}, hi)[1])


@functools.lru_cache(maxsize=16384)
def lower_bound(text: str, box: tuple[tuple[str, int, int], ...]) -> int:
    """A lower bound of an expression; 0 if the expression is known not to be negative.

    Interval arithmetic gives the bound. Only if it is below int32, where the exact value matters,
    the bound of `upper_bound` for the negated expression is taken.
    """
    node = parsed(text)
    if _never_decreases(node):
        return 0
    least = interval(node, {v: low for v, low, _ in box}, {v: h for v, _, h in box})[0]
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
