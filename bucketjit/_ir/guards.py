"""Guards: comparisons of sizes that must hold for a program to serve a call.

    JAX      "comparison 'n' >= '8' is inconclusive"       while a function is traced at n = 5
    guard    n <= 7                                        the program serves sizes up to 7

JAX cannot answer every comparison of symbolic sizes. Its error names the comparison, the sizes of
the call decide it, and the decision becomes a guard of the program.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.errors import InconclusiveDimensionOperation

from bucketjit._ir.expressions import evaluate_text, parsed, split_at_commas, variables_of
from bucketjit._raised import text_of

COMPARE = {">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne}
# The texts of JAX's errors (jax 0.10 to 0.12).
_COMPARISON = re.compile(r"comparison '(.+?)' (>=|<=|>|<) '(.+?)' is inconclusive")
_DIVISION = re.compile(r"The remainder (.+?) should be 0")
_UNEVEN = re.compile(r"partitioned (\d+) times, but does not evenly divide .*? size (.+?)\. ")
_SLICE = re.compile(r"[Ss]lice size at index \d+ in gather op .*? \[0, (.+?) \+ 1\), got (.+?)\.")
_EXTREME = re.compile(r"\b(?:min|max)\(")
_LOOKED_AT = 1 << 8  # sizes on each side of one, and multiples of it
_DIVISOR = re.compile(r"Possible division by 0 in division by (.+)")


@dataclass(frozen=True)
class Guard:
    """A comparison of sizes that holds in every call its program serves.

    Attributes:
        left: The left expression of dimension variables, as text.
        op: One of ``>=``, ``<=``, ``==``, ``!=``.
        right: The right expression.
    """

    left: str
    op: str
    right: str

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether the guard holds at these sizes."""
        try:
            a, b = evaluate_text(self.left, sizes), evaluate_text(self.right, sizes)
        except ZeroDivisionError:  # then a guard on the divisor fails, too
            return False
        return bool(COMPARE[self.op](a, b))

    @property
    def pins(self) -> bool:
        """Whether the guard is ``variable == number``, so that the variable has one size only."""
        return self.op == "==" and self.left.isidentifier() and not variables_of(self.right)

    @property
    def variables(self) -> frozenset[str]:
        """The dimension variables of both sides."""
        return frozenset(variables_of(self.left)) | frozenset(variables_of(self.right))

    def __str__(self) -> str:
        return f"{self.left} {self.op} {self.right}"


def parse_constraint(text: str) -> Guard:
    """Parse a constraint ``e1 >= e2``, ``e1 <= e2`` or ``e1 == e2``."""
    match = re.fullmatch(r"\s*(.+?)\s*(>=|<=|==)\s*(.+?)\s*", text)
    if not match:
        raise ValueError(f"{text!r} is not of the form 'e1 >= e2', 'e1 <= e2' or 'e1 == e2'")
    for side in (match[1], match[3]):
        variables_of(side)
        if re.search(r"\d\.|\.\d", side):
            raise ValueError(f"{text!r} compares a size with {side}; sizes are whole numbers")
    return Guard(match[1], match[2], match[3])


def _side(left: str, right: str, sizes: Mapping[str, int], shift: int = 0) -> Guard:
    """On which side of ``right + shift`` an expression is at these sizes.

    A guard has no strict comparison: for whole numbers ``a > b`` is ``a >= b + 1``.
    """
    is_at_least = evaluate_text(left, sizes) >= evaluate_text(right, sizes) + shift
    n = shift if is_at_least else shift - 1
    if n and not variables_of(right):
        right = str(evaluate_text(right, {}) + n)
    elif n:
        right = f"{right} {'+' if n > 0 else '-'} {abs(n)}"
    return Guard(left, ">=" if is_at_least else "<=", right)


def decide(failure: Exception, sizes: Mapping[str, int], guards: Sequence[Guard]) -> Guard | None:
    """The guard that decides, as at these sizes, what the error of a failed trace is about."""
    message = text_of(failure)
    if not isinstance(failure, InconclusiveDimensionOperation):
        return _decide_failure(message, sizes, guards)
    if match := _COMPARISON.search(message):
        left, op, right = match.groups()
        return _side(left, right, sizes, int(op in (">", "<=")))
    if (match := _DIVISION.search(message)) and evaluate_text(match[1], sizes) == 0:
        return Guard(match[1], "==", "0")
    if (match := _DIVISOR.search(message)) and evaluate_text(match[1], sizes) >= 1:
        return Guard(match[1], ">=", "1")
    return None


def _decide_failure(
    message: str, sizes: Mapping[str, int], guards: Sequence[Guard]
) -> Guard | None:
    """The first new guard that decides what the error of a failed trace is about.

    - An axis has as many elements as a gather takes of it, or has fewer. An axis of a computed size
      may have none, and JAX then refuses to take one.
    - Which of the two in a ``min`` or ``max`` is smaller. ``table[: x.shape[1]]`` has
      ``min(64, s)`` rows, and can be added to nothing of size ``s`` until that is known.
    - Two shapes are equal. ``x[::2] + x[1::2]`` adds arrays of ``floordiv(n + 1, 2)`` and of
      ``floordiv(n, 2)`` elements, which are as many at even sizes.
    - A mesh cuts evenly, see `decide_even`.
    """
    extremes = (_enclosed(message, m.end(), ")") for m in _EXTREME.finditer(message))
    pairs = [p for p in itertools.combinations(shapes_in(message), 2) if len(p[0]) == len(p[1])]
    candidates = itertools.chain(
        ((_side, *texts) for texts in _SLICE.findall(message)),
        ((_order, *split_at_commas(inside or "")) for inside in extremes),
        ((_equal, *texts) for pair in pairs for texts in zip(*pair, strict=True)),
    )
    return _first_new(candidates, sizes, guards) or decide_even(message, sizes, guards)


def decide_even(message: str, sizes: Mapping[str, int], guards: Sequence[Guard]) -> Guard | None:
    """A guard that a size is a multiple of the parts of a mesh, which a failed trace asks for.

    Explicit axes of a mesh are part of types, so JAX must know that each cut is even. A derived
    size needs a guard of its own: ``concatenate([x, x])`` has ``2*b`` rows.
    """
    texts = _UNEVEN.findall(message)
    return _first_new([(_divided, size, parts) for parts, size in texts], sizes, guards)


def _first_new(
    candidates: Iterable[tuple[Any, ...]], sizes: Mapping[str, int], guards: Sequence[Guard]
) -> Guard | None:
    """The first new guard that a function makes of two texts and the sizes of a call."""
    for make, *texts in candidates:
        with contextlib.suppress(SyntaxError, KeyError, ValueError, TypeError):
            guard = make(*texts, sizes)  # it raises if a text is no expression of sizes
            if guard is not None and guard.variables and guard not in guards:
                return guard
    return None


def _order(left: str, right: str, sizes: Mapping[str, int]) -> Guard:
    is_at_least = evaluate_text(left, sizes) >= evaluate_text(right, sizes)
    return Guard(left, ">=" if is_at_least else "<=", right)


def _divided(size: str, parts: str, sizes: Mapping[str, int]) -> Guard | None:
    guard = Guard(f"mod({size}, {parts})", "==", "0")
    return guard if guard.holds(sizes) else None


def _equal(left: str, right: str, sizes: Mapping[str, int]) -> Guard | None:
    left, right = (left, right) if variables_of(left) else (right, left)
    if left == right or evaluate_text(left, sizes) != evaluate_text(right, sizes):
        return None
    if any(a in b and not a.isidentifier() for a, b in ((left, right), (right, left))):
        return _even(left, sizes)
    return Guard(left, "==", right)


def _even(text: str, sizes: Mapping[str, int]) -> Guard | None:
    """A guard that a quotient in an expression has no rest, if it has none at these sizes.

    Both halves of an axis are equal then: ``floordiv(n, 2)`` and ``n - floordiv(n, 2)``. JAX does
    not end where it replaces an expression by one that holds it.
    """
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "floordiv":
            guard = Guard(f"mod({', '.join(map(ast.unparse, node.args))})", "==", "0")
            if guard.holds(sizes):
                return guard
    return None


def shapes_in(message: str) -> list[list[str]]:
    """The shapes that a message names: ``(n, mod(n, 2))`` is ``["n", "mod(n, 2)"]``.

    So is ``float32[n,mod(n, 2)]``.
    """
    starts = re.finditer(r"(?<!\w)\(|\b(?:[a-z]+\d+|bool)\[", message)
    texts = (_enclosed(message, m.end(), ")" if m[0] == "(" else "]") for m in starts)
    return [list(filter(None, split_at_commas(text))) for text in texts if text is not None]


def _enclosed(message: str, start: int, closing: str) -> str | None:
    """The text up to the bracket that closes one before it; None if there is none."""
    depth = 0
    for end in range(start, len(message)):
        if depth == 0 and message[end] == closing:
            return message[start:end]
        depth += {"(": 1, ")": -1}.get(message[end], 0)
    return None


def guards_instead(
    error: Exception, guards: Sequence[Guard], sizes: Mapping[str, int]
) -> list[Guard] | None:
    """Guards to try in place of those that ``jax.export`` refuses; None if there are none."""
    if even := decide_even(str(error), sizes, guards):
        return [*guards, even]
    # JAX cannot assume constraints such as ``b - 1 == 0``: each variable is fixed instead.
    sole = [Guard(v, "==", str(sizes[v])) for g in guards[-1:] for v in sorted(g.variables)]
    if sole and sole != [guards[-1]]:
        return [*guards[:-1], *sole]
    # Some follow from others, which fix all their variables.
    fixed = {guard.left for guard in guards if guard.pins}
    fewer = [guard for guard in guards if guard.pins or not guard.variables <= fixed]
    return fewer if fewer != guards else None


def fixed_by(guards: Iterable[Guard], sizes: Mapping[str, int]) -> set[str]:
    """The variables to which guards leave the size that they have in ``sizes``, and no other."""
    limits, fixed = [g for g in guards if g.op != "!="], set[str]()
    for v, n in [*sizes.items()] * len(sizes):  # what fixes one may fix another
        about = [g for g in limits if v in g.variables <= {v, *fixed}]
        beside = itertools.chain(*((n + i, n - i, n * i) for i in range(1, _LOOKED_AT)))
        sizes_beside = (m for m in beside if m > 0 and m != n)
        if about and not any(all(g.holds({**sizes, v: m}) for g in about) for m in sizes_beside):
            fixed.add(v)
    return fixed


def lower_bounds(variables: Sequence[str], guards: Iterable[Guard]) -> dict[str, int]:
    """The smallest size of each variable, by guards such as ``b >= 4``."""
    lower = dict.fromkeys(variables, 1)
    for guard in guards:
        is_bound = guard.left in lower and guard.op in (">=", "==")
        if is_bound and not variables_of(guard.right):
            lower[guard.left] = max(lower[guard.left], evaluate_text(guard.right, {}))
    return lower
