"""Expressions of sizes as trees of JSON, for programs that have no parser of Python.

    text   "2*b + floordiv(s, 2)"
    tree   {"op": "add", "args": [{"op": "mul", "args": [2, "b"]}, {"op": "floordiv", ...}]}

A number stands for itself, a text for the variable of this name. A negative term is a difference
from 0, so every operation is one of `OPERATIONS` and has two operands.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bucketjit._artifact.expressions import sides_of
from bucketjit._sizes.expressions import parsed, variables_of

Tree = int | str | dict[str, Any]

OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "max": max,
    "min": min,
    "pow": lambda a, b: a**b,
}
"""The operations of trees. Each takes two whole numbers; ``floordiv`` rounds down, ``mod`` is what
it leaves, and the second operand of ``pow`` is a number from 0 to 8."""

_OPERATORS: Mapping[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
}


def tree_of(axis: int | str) -> Tree:
    """The tree of a size.

    >>> tree_of("n^2 - 1")
    {'op': 'sub', 'args': [{'op': 'pow', 'args': ['n', 2]}, 1]}

    Args:
        axis: A number, or the text of an expression that `check_expression` has passed.

    Returns:
        The tree.
    """
    return axis if isinstance(axis, int) else _tree(parsed(axis))


def _tree(node: ast.expr) -> Tree:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return name
        case ast.UnaryOp(operand=operand):
            return made("sub", 0, _tree(operand))
        case ast.BinOp(left=left, op=op, right=right):
            return made(_OPERATORS[type(op)], _tree(left), _tree(right))
        case ast.Call(func=ast.Name(id=name), args=[left, right]):
            return made(name, _tree(left), _tree(right))
    raise AssertionError(ast.dump(node))  # `check_expression` has refused it


def made(op: str, left: Tree, right: Tree) -> Tree:
    """The tree of an operation; its value if both operands are numbers."""
    if isinstance(left, int) and isinstance(right, int) and op in _FOLDED:
        return OPERATIONS[op](left, right)
    return {"op": op, "args": [left, right]}


_FOLDED = ("add", "sub", "mul")  # a division may fail, and a power may be a number of any length


def value_of(tree: Tree, sizes: Mapping[str, int]) -> int:
    """The value of a tree.

    >>> value_of(tree_of("2*b - mod(s, 3)"), {"b": 4, "s": 5})
    6

    Args:
        tree: The tree.
        sizes: Size of each variable.

    Raises:
        ZeroDivisionError: It divides by zero at these sizes.
    """
    if isinstance(tree, dict):
        left, right = (value_of(arg, sizes) for arg in tree["args"])
        return OPERATIONS[tree["op"]](left, right)
    return sizes[tree] if isinstance(tree, str) else tree


def product_of(axes: Sequence[int | str]) -> Tree:
    """The tree of the number of elements of a shape."""
    found: Tree = 1
    for tree in map(tree_of, axes):
        found = tree if found == 1 else made("mul", found, tree)
    return found


def comparison(text: str) -> dict[str, Any]:
    """A guard as an object of JSON."""
    sides = sides_of(text)
    assert sides is not None
    left, op, right = sides
    return {"text": text, "left": tree_of(left), "op": op, "right": tree_of(right)}


def solutions(
    axes: Sequence[Sequence[int | str]], variables: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """How the variables follow from the sizes of arguments.

    >>> solutions([("2*b + 1", "s")], ["b", "s"])["b"]
    {'argument': 0, 'axis': 0, 'minus': 1, 'divide_by': 2}

    Args:
        axes: Sizes of each argument; of an argument that is itself a size the one size.
        variables: The variables.

    Returns:
        For each variable that can be found, in an order in which each needs earlier ones alone:
        the argument and the axis whose size to take, what to subtract from it, and the number that
        the rest is divided by.
    """
    found: dict[str, dict[str, Any]] = {}
    places = [
        (argument, axis, size)
        for argument, shape in enumerate(axes)
        for axis, size in enumerate(shape)
        if isinstance(size, str)
    ]
    places.sort(key=lambda place: place[2] not in variables)  # those that need no arithmetic first
    while True:
        for argument, axis, text in places:
            unknown = [v for v in variables_of(text) if v not in found]
            if len(unknown) != 1 or unknown[0] not in variables:
                continue
            if (linear := _linear(tree_of(text), unknown[0])) is not None:
                minus, slope = linear
                place = {"argument": argument, "axis": axis, "minus": minus, "divide_by": slope}
                found[unknown[0]] = place
                break
        else:
            return found


def _linear(tree: Tree, variable: str) -> tuple[Tree, Tree] | None:
    """The trees ``a`` and ``b`` of ``a + b*variable``; None if a tree is not of this form."""
    if tree == variable:
        return 0, 1
    if not isinstance(tree, dict):
        return tree, 0
    left, right = (_linear(arg, variable) for arg in tree["args"])
    if left is None or right is None:
        return None
    (a, b), (c, d) = left, right
    match tree["op"]:
        case "add" | "sub" as op:
            return _sum(op, a, c), _sum(op, b, d)
        case "mul" if d == 0:
            return _times(a, c), _times(b, c)
        case "mul" if b == 0:
            return _times(a, c), _times(a, d)
    return (tree, 0) if b == d == 0 else None


def _sum(op: str, left: Tree, right: Tree) -> Tree:
    if right == 0:
        return left
    return right if left == 0 and op == "add" else made(op, left, right)


def _times(left: Tree, right: Tree) -> Tree:
    if left == 0 or right == 0:
        return 0
    if left == 1:
        return right
    return left if right == 1 else made("mul", left, right)
