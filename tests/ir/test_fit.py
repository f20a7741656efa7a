"""Expressions found for values, and none found where there is none."""

from collections.abc import Callable

import pytest

from bucketjit._ir.expressions import evaluate_text, fit

SAMPLES = [
    *({"b": 3, "s": 5}, {"b": 4, "s": 5}, {"b": 3, "s": 7}, {"b": 6, "s": 9}, {"b": 7, "s": 14}),
    *({"b": 8, "s": 17}, {"b": 5, "s": 8}),
]
ELSEWHERE = [{"b": b, "s": s} for b in (2, 5, 9, 30) for s in (1, 4, 8, 31)]


@pytest.mark.parametrize(
    "of",
    [
        *(lambda b, s: s, lambda b, s: s - 1, lambda b, s: 2 * b + 3, lambda b, s: b * s),
        *(lambda b, s: 4 * b * s - b, lambda b, s: b + s, lambda b, s: b * b),
        *(lambda b, s: 3 * b - 2 * s + 40, lambda b, s: s // 2, lambda b, s: (s + 3) // 4),
        *(lambda b, s: 4 * ((s + 3) // 4), lambda b, s: b % 3),
    ],
)
def test_expressions_that_are_found(of: Callable[[int, int], int]) -> None:
    text = fit([of(**x) for x in SAMPLES], SAMPLES)
    assert isinstance(text, str)
    for sizes in ELSEWHERE:
        assert evaluate_text(text, sizes) == of(**sizes), text


def test_what_does_not_vary_is_an_int() -> None:
    assert fit([8] * len(SAMPLES), SAMPLES) == 8


def test_what_no_expression_gives() -> None:
    assert fit([1, 9, 2, 40, 0, 3, 3], SAMPLES) is None
