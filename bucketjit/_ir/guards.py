"""Guards: comparisons of sizes that must hold for a program to serve a call.

    JAX      "comparison 'n' >= '8' is inconclusive"       while a function is traced at n = 5
    guard    n <= 7                                        the program serves sizes up to 7

JAX cannot answer every comparison of symbolic sizes. Its error names the comparison, the sizes of
the call decide it, and the decision becomes a guard of the program.
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bucketjit._ir.expressions import evaluate_text, parsed, split_at_commas, variables_of

_COMPARE = {">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne}
# The texts of JAX's errors (jax 0.10 to 0.12).
_COMPARISON = re.compile(r"comparison '(.+?)' (>=|<=|>|<) '(.+?)' is inconclusive")
_DIVISION = re.compile(r"The remainder (.+?) should be 0")
_UNEVEN = re.compile(r"partitioned (\d+) times, but does not evenly divide .*? size (.+?)\. ")
_SLICE = re.compile(r"[Ss]lice size at index \d+ in gather op .*? \[0, (.+?) \+ 1\), got (.+?)\.")
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
        return bool(_COMPARE[self.op](a, b))

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
    found = re.fullmatch(r"\s*(.+?)\s*(>=|<=|==)\s*(.+?)\s*", text)
    if not found:
        raise ValueError(f"{text!r} is not of the form 'e1 >= e2', 'e1 <= e2' or 'e1 == e2'")
    for side in (found[1], found[3]):
        variables_of(side)
        if re.search(r"\d\.|\.\d", side):
            raise ValueError(f"{text!r} compares a size with {side}; sizes are whole numbers")
    return Guard(found[1], found[2], found[3])


def _side(left: str, right: str, shift: int, sizes: Mapping[str, int]) -> Guard:
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


def decide(error: Exception, sizes: Mapping[str, int]) -> Guard | None:
    """The guard that decides, as at these sizes, the comparison that an error of JAX is about."""
    message = str(error)
    if found := _COMPARISON.search(message):
        left, op, right = found.groups()
        return _side(left, right, int(op in (">", "<=")), sizes)
    if (found := _DIVISION.search(message)) and evaluate_text(found[1], sizes) == 0:
        return Guard(found[1], "==", "0")
    if (found := _DIVISOR.search(message)) and evaluate_text(found[1], sizes) >= 1:
        return Guard(found[1], ">=", "1")
    return None


def decide_min_max(message: str, sizes: Mapping[str, int], known: Sequence[Guard]) -> Guard | None:
    """A guard that decides a ``min`` or ``max`` in the error of a failed trace.

    ``table[: x.shape[1]]`` has ``min(64, s)`` rows. It can be added to nothing of size ``s`` until
    a guard says which of the two is smaller.
    """
    for found in re.finditer(r"\b(?:min|max)\(", message):
        try:
            left, right = split_at_commas(_enclosed(message, found.end(), ")") or "")
            a, b = evaluate_text(left, sizes), evaluate_text(right, sizes)
        except (SyntaxError, KeyError, ValueError):
            continue  # not an expression of sizes
        guard = Guard(left, ">=", right) if a >= b else Guard(left, "<=", right)
        if guard not in known:
            return guard
    return None


def decide_slice(message: str, sizes: Mapping[str, int], known: Sequence[Guard]) -> Guard | None:
    """A guard that an axis has as many elements as a gather takes of it, or has fewer.

    An axis of a computed size may have none, and JAX then refuses to take one.
    """
    found = _SLICE.search(message)
    if found is None:
        return None
    try:
        guard = _side(found[1], found[2], 0, sizes)
    except (SyntaxError, KeyError, ValueError):
        return None  # not expressions of sizes
    return guard if guard not in known and guard.variables else None


def decide_even(message: str, sizes: Mapping[str, int], known: Sequence[Guard]) -> Guard | None:
    """A guard that a size is a multiple of the parts of a mesh, which a failed trace asks for.

    Explicit axes of a mesh are part of types, so JAX must know that each cut is even. A derived
    size needs a guard of its own: ``concatenate([x, x])`` has ``2*b`` rows.
    """
    found = _UNEVEN.search(message)
    if found is None:
        return None
    guard = Guard(f"mod({found[2]}, {found[1]})", "==", "0")
    try:
        return guard if guard not in known and guard.holds(sizes) else None
    except (SyntaxError, KeyError, ValueError):
        return None  # not an expression of sizes


def decide_equal(message: str, sizes: Mapping[str, int], known: Sequence[Guard]) -> Guard | None:
    """A guard that makes two shapes in the error of a failed trace equal.

    ``x[::2] + x[1::2]`` adds arrays of ``floordiv(n + 1, 2)`` and ``floordiv(n, 2)`` elements. The
    two numbers are equal at even sizes.
    """
    for one, other in itertools.combinations(shapes_in(message), 2):
        if len(one) != len(other):
            continue
        for left, right in zip(one, other, strict=True):
            try:
                equal = evaluate_text(left, sizes) == evaluate_text(right, sizes)
                left, right = (left, right) if variables_of(left) else (right, left)
                guard = Guard(left, "==", right)
                if any(a in b and not a.isidentifier() for a, b in ((left, right), (right, left))):
                    even = _even(left if variables_of(left) else right, sizes)
                    if even is None or even in known:
                        continue
                    guard = even
                if left != right and equal and variables_of(left) and guard not in known:
                    return guard
            except (SyntaxError, KeyError, ValueError, TypeError):
                continue  # not expressions of sizes
    return None


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
    found = []
    for start in re.finditer(r"(?<!\w)\(|\b(?:[a-z]+\d+|bool)\[", message):
        inside = _enclosed(message, start.end(), ")" if start[0] == "(" else "]")
        if inside is not None:
            found.append([item for item in split_at_commas(inside) if item])
    return found


def _enclosed(message: str, start: int, closing: str) -> str | None:
    """The text up to the bracket that closes one before it; None if there is none."""
    depth = 0
    for end in range(start, len(message)):
        if depth == 0 and message[end] == closing:
            return message[start:end]
        depth += {"(": 1, ")": -1}.get(message[end], 0)
    return None


def pinned(guard: Guard, sizes: Mapping[str, int]) -> list[Guard]:
    """Guards that fix each variable of ``guard``, in place of a guard that JAX cannot assume.

    ``jax.export`` refuses constraints such as ``b - 1 == 0``.
    """
    return [Guard(v, "==", str(sizes[v])) for v in sorted(guard.variables)]


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


def without_implied(guards: Sequence[Guard]) -> list[Guard]:
    """The guards without those that follow from others, which fix all their variables."""
    fixed = {guard.left for guard in guards if guard.pins}
    return [guard for guard in guards if guard.pins or not guard.variables <= fixed]


def lower_bounds(variables: Sequence[str], constraints: Sequence[str]) -> dict[str, int]:
    """The smallest size of each variable, read from constraints such as ``b >= 4``."""
    lower = dict.fromkeys(variables, 1)
    for text in constraints:
        if found := re.fullmatch(r"\s*(\w+)\s*(>=|==)\s*(.+)", text):
            name, _, bound = found.groups()
            if name in lower and not variables_of(bound):
                lower[name] = max(lower[name], evaluate_text(bound, {}))
    return lower
