"""Which size expressions are never negative, without a question to JAX."""

import itertools

import pytest

from bucketjit._ir.bounds import LARGE, is_never_negative, magnitude
from bucketjit._ir.expressions import evaluate_text, variables_of

NEVER_NEGATIVE = [
    *("0", "n - 1", "n*m - n", "n^2 - n", "floordiv(n, 3)", "n - floordiv(2*n, 3)"),
    *("n - floordiv(95*n, 100)", "2*n - floordiv(7*n + 3, 4)"),
    *("floordiv(2*n, 3) - floordiv(n, 3)", "floordiv(n + 2, 3) - 1"),
    *("n - floordiv(floordiv(n, 2)*2, 3)", "max(1, floordiv(n, 2)) - 1"),
    *("n - max(1, floordiv(n, 2))", "n - min(n, floordiv(10*n, 7))", "min(n, m) - 1"),
    *("2 - mod(n, 3)", "n - mod(n, 3)", "m*n - m*floordiv(n, 2)"),
]
MAYBE_NEGATIVE = [
    *("-1", "n - 2", "n - m", "floordiv(n, 2) - 1", "n - floordiv(10*n, 7)"),
    *("floordiv(n - 5, 2) - n + 5", "n - max(n, m)", "min(n, m) - n", "mod(n, 3) - 1"),
    *("floordiv(n, 3) - floordiv(n, 4) - 1", "n - max(2, floordiv(n, 2))"),
]


def _least(text: str) -> int:
    names = variables_of(text)
    boxes = itertools.product(range(1, 30), repeat=len(names))
    return min(evaluate_text(text, dict(zip(names, box, strict=True))) for box in boxes)


@pytest.mark.parametrize("text", NEVER_NEGATIVE)
def test_what_is_never_negative_is_known(text: str) -> None:
    assert _least(text) >= 0
    assert is_never_negative(text)


@pytest.mark.parametrize("text", MAYBE_NEGATIVE)
def test_what_may_be_negative_is_not(text: str) -> None:
    assert _least(text) < 0
    assert not is_never_negative(text)


def test_no_answer_is_wrong() -> None:
    atoms = ["1", "n", "m", "floordiv(2*n, 3)", "max(m, floordiv(n, 2))", "min(n, 2*m - 3)"]
    for one, sign, other, c in itertools.product(atoms, "+-", atoms, (-2, 0, 1)):
        text = f"{one} {sign} 2*({other}) + {c}"
        assert not is_never_negative(text) or _least(text) >= 0, text


def test_variables_with_bounds() -> None:
    most_of = (("size_1", "n + 1"), ("size_2", "floordiv(size_1, 2) + 1"))
    assert is_never_negative("n + 1 - size_1", most_of)
    assert is_never_negative("n + 2 - size_2", most_of)
    assert not is_never_negative("n - size_1", most_of)
    assert not is_never_negative("size_1 - 2", most_of)


def test_magnitudes() -> None:
    assert magnitude("7") == 7 and magnitude("n") == magnitude("n*m") == LARGE
    assert magnitude("n - m") == 2 * LARGE
    assert magnitude("floordiv(100*n, 50)") == 2 * LARGE
    assert magnitude("min(1000*n, 5)") == 5 and magnitude("mod(1000*n, 5)") == 5
    assert magnitude("-max(n, 5)") == LARGE
