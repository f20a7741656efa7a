"""Expressions of sizes that come from a file: only arithmetic on known variables is taken.

The text of an expression is compiled to a Python function where sizes are computed
(`bucketjit._ir.expressions`), so a text from a file is parsed and looked through first.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Set

from bucketjit._ir.expressions import FUNCTIONS, parsed
from bucketjit.errors import ArtifactError

_LONGEST = 2000  # characters of an expression
_LARGEST = 2**63  # of a number in it
_HIGHEST = 8  # exponent
_HIGHEST_IN_ALL = 64  # exponents of powers of powers, multiplied
_COMPARISON = re.compile(r"(.+?) (>=|<=|==|!=) (.+)")
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)


def check_expression(text: str, variables: Set[str], place: str) -> None:
    """Refuse a text that is not arithmetic on dimension variables."""
    try:
        if len(text) > _LONGEST or not text.isprintable():
            raise SyntaxError("it is too long, or has other characters than text")
        _check(parsed(text), variables)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise ArtifactError(
            f"{place}: {shown!r} is no expression of the sizes {', '.join(sorted(variables))} "
            f"({error}); the file is damaged or was altered"
        ) from None


def check_comparison(text: str, variables: Set[str], place: str) -> None:
    """Refuse a text that is not a comparison of two expressions of dimension variables."""
    sides = sides_of(text)
    if sides is None:
        raise ArtifactError(
            f"{place}: {text[:60]!r} is no comparison of sizes; the file is damaged or was altered"
        )
    check_expression(sides[0], variables, place)
    check_expression(sides[2], variables, place)


def sides_of(text: str) -> tuple[str, str, str] | None:
    """The left side, the operator and the right side of a comparison; None if it is none."""
    found = _COMPARISON.fullmatch(text)
    return None if found is None else (found[1], found[2], found[3])


def _check(node: ast.expr, variables: Set[str], power_around: int = 1) -> None:
    """Raise ValueError for a tree that is no arithmetic; see `check_expression`."""
    match node:
        case ast.Constant(value=int(value)) if type(value) is int and abs(value) < _LARGEST:
            return
        case ast.Name(id=name) if name in variables:
            return
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check(operand, variables, power_around)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
            if not 0 <= power <= _HIGHEST or power * power_around > _HIGHEST_IN_ALL:
                raise ValueError(f"the power {power}")
            _check(left, variables, max(power, 1) * power_around)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _OPERATORS):
            _check(left, variables, power_around)
            _check(right, variables, power_around)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if (
            name in FUNCTIONS["int"] and len(args) == 2
        ):
            for arg in args:
                _check(arg, variables, power_around)
        case _:
            raise ValueError(f"{ast.unparse(node)} is not arithmetic")
