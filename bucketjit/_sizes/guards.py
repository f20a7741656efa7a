"""Guards: comparisons of sizes under which a program holds.

What JAX cannot answer for symbolic sizes is decided by the sizes at hand: its error says which
comparison it was.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bucketjit._sizes.expressions import dim_operands, evaluate_text, variables_of

_COMPARE = {">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne}
_COMPARISON = re.compile(r"comparison '(.+?)' (>=|<=|>|<) '(.+?)' is inconclusive")
_DIVISION = re.compile(r"The remainder (.+?) should be 0")
_UNEVEN = re.compile(r"partitioned (\d+) times, but does not evenly divide .*? size (.+?)\. ")
_DIVISOR = re.compile(r"Possible division by 0 in division by (.+)")


@dataclass(frozen=True)
class Guard:
    """A comparison of sizes that holds in every call its program serves.

    Attributes:
        left, right: Expressions of dimension variables, as text.
        op: One of ``>=``, ``<=``, ``==``, ``!=``.
    """

    left: str
    op: str
    right: str

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether the guard holds at these sizes; where it divides by zero, another one fails."""
        try:
            a, b = evaluate_text(self.left, sizes), evaluate_text(self.right, sizes)
        except ZeroDivisionError:
            return False
        return bool(_COMPARE[self.op](a, b))

    @property
    def pins(self) -> bool:
        """Whether it leaves a variable one size only."""
        return self.op == "==" and self.left.isidentifier() and not variables_of(self.right)

    @property
    def variables(self) -> frozenset[str]:
        """The dimension variables the guard speaks of."""
        return frozenset(variables_of(self.left)) | frozenset(variables_of(self.right))

    def __str__(self) -> str:
        return f"{self.left} {self.op} {self.right}"


def parse_constraint(text: str) -> Guard:
    """Parse ``e1 >= e2``, ``e1 <= e2`` or ``e1 == e2``.

    Raises:
        ValueError: The text is none of these.
    """
    found = re.fullmatch(r"\s*(.+?)\s*(>=|<=|==)\s*(.+?)\s*", text)
    if not found:
        raise ValueError(f"{text!r} is not of the form 'e1 >= e2', 'e1 <= e2' or 'e1 == e2'")
    for side in (found[1], found[3]):
        variables_of(side)
        if re.search(r"\d\.|\.\d", side):
            raise ValueError(f"{text!r} compares a size with {side}; sizes are whole numbers")
    return Guard(found[1], found[2], found[3])


def _plus(text: str, n: int) -> str:
    if not variables_of(text):
        return str(evaluate_text(text, {}) + n)
    return f"{text} {'+' if n > 0 else '-'} {abs(n)}"


def decide(error: Exception, sizes: Mapping[str, int]) -> Guard | None:
    """The guard that answers an inconclusive comparison by the sizes at hand."""
    message = str(error)
    if found := _COMPARISON.search(message):
        left, op, right = found.groups()
        a, b = evaluate_text(left, sizes), evaluate_text(right, sizes)
        match op, {">=": a >= b, "<=": a <= b, ">": a > b, "<": a < b}[op]:
            case (">=", True) | ("<", False):
                return Guard(left, ">=", right)
            case (">=", False) | ("<", True):
                return Guard(left, "<=", _plus(right, -1))
            case (">", True) | ("<=", False):
                return Guard(left, ">=", _plus(right, 1))
            case _:
                return Guard(left, "<=", right)
    if (found := _DIVISION.search(message)) and evaluate_text(found[1], sizes) == 0:
        return Guard(found[1], "==", "0")
    if (found := _DIVISOR.search(message)) and evaluate_text(found[1], sizes) >= 1:
        return Guard(found[1], ">=", "1")
    return None


def decide_min_max(message: str, sizes: Mapping[str, int], known: Sequence[Guard]) -> Guard | None:
    """A guard that resolves a ``min`` or ``max`` of sizes which a failed trace complains of.

    ``table[: x.shape[1]]`` has ``min(64, s)`` rows, which fits nothing of size ``s`` until it
    is settled which of the two is smaller.
    """
    for found in re.finditer(r"\b(?:min|max)\(", message):
        end, depth = found.end(), 1
        while depth and end < len(message):
            depth += {"(": 1, ")": -1}.get(message[end], 0)
            end += 1
        try:
            left, right = dim_operands(message[found.start() : end])
            a, b = evaluate_text(left, sizes), evaluate_text(right, sizes)
        except (SyntaxError, KeyError, ValueError):
            continue  # not an expression of sizes
        guard = Guard(left, ">=", right) if a >= b else Guard(left, "<=", right)
        if guard not in known:
            return guard
    return None


def decide_even(message: str, sizes: Mapping[str, int], known: Sequence[Guard]) -> Guard | None:
    """A guard by which a mesh cuts an axis into equal parts, where JAX complains that it may not.

    Explicit axes of a mesh are part of types, and ``concatenate([x, x])`` has ``2*b`` rows.
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
    """A guard that makes two shapes agree which a failed trace complains of.

    ``x[::2] + x[1::2]`` adds arrays of ``floordiv(n + 1, 2)`` and ``floordiv(n, 2)`` elements,
    which are as many at even sizes.
    """
    for one, other in itertools.combinations(_tuples_in(message), 2):
        if len(one) != len(other):
            continue
        for left, right in zip(one, other, strict=True):
            try:
                equal = evaluate_text(left, sizes) == evaluate_text(right, sizes)
                left, right = (left, right) if variables_of(left) else (right, left)
                guard = Guard(left, "==", right)
                if left != right and equal and variables_of(left) and guard not in known:
                    return guard
            except (SyntaxError, KeyError, ValueError, TypeError):
                continue  # not expressions of sizes
    return None


def _tuples_in(message: str) -> list[list[str]]:
    """The shapes that a message names: ``(n, mod(n, 2))`` is ``["n", "mod(n, 2)"]``."""
    found = []
    for start in re.finditer(r"(?<!\w)\(", message):
        items, depth = [""], 0
        for character in message[start.end() :]:
            if depth == 0 and character == ")":
                found.append([item.strip() for item in items if item.strip()])
                break
            depth += {"(": 1, ")": -1}.get(character, 0)
            if depth == 0 and character == ",":
                items.append("")
            else:
                items[-1] += character
    return found


def pinned(guard: Guard, sizes: Mapping[str, int]) -> list[Guard]:
    """What to assume where ``jax.export`` cannot hold a guard such as ``b - 1 == 0``."""
    return [Guard(v, "==", str(sizes[v])) for v in sorted(guard.variables)]


def without_implied(guards: Sequence[Guard]) -> list[Guard]:
    """Without guards of variables that others leave one size only, at which they hold."""
    fixed = {guard.left for guard in guards if guard.pins}
    return [guard for guard in guards if guard.pins or not guard.variables <= fixed]


def lower_bounds(variables: Sequence[str], constraints: Sequence[str]) -> dict[str, int]:
    """Smallest size of each variable, read off constraints of the form ``b >= 4``."""
    lower = dict.fromkeys(variables, 1)
    for text in constraints:
        if found := re.fullmatch(r"\s*(\w+)\s*(>=|==)\s*(.+)", text):
            name, _, bound = found.groups()
            if name in lower and not variables_of(bound):
                lower[name] = max(lower[name], evaluate_text(bound, {}))
    return lower
